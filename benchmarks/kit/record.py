"""Where a benchmark's runs are kept: `results/NAME.json`, a list of runs, each with its command, machine and date."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.kit import processor

RESULTS = Path(__file__).parents[1] / "results"


def append(name: str, results: Any, cpu_kernels: str = "auto") -> None:
    """Adds this run to the kept ones. Call it before other work: the load average is part of the record.

    Args:
        name: of the file.
        results: what JSON can hold.
        cpu_kernels: what the run's workers were given, if they were: the record names the instruction set.
    """
    path = RESULTS / f"{name}.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    run = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *(arg.removeprefix(f"{Path.cwd()}/") for arg in sys.argv)]),
        "machine": {
            "processor": processor.name(),
            "flags": " ".join(processor.flags()),
            "instruction_set": processor.instruction_set(cpu_kernels),
            "cpus": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "python": platform.python_version(),
        },
        "results": results,
    }
    path.write_text(json.dumps([*runs, run], indent=2) + "\n")
