"""Where a benchmark's runs are kept: `results/NAME.json`, a list of runs, each with its command, machine and date."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def processor() -> str:
    """The processor's name, where Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def append(name: str, results: Any) -> None:
    """Adds this run to the kept ones. Call it before other work: the load average is part of the record."""
    path = RESULTS / f"{name}.json"
    runs: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    machine = {"processor": processor(), "cpus": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    run = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *(arg.removeprefix(f"{Path.cwd()}/") for arg in sys.argv)]),
        "machine": {**machine, "python": platform.python_version()},
        "results": results,
    }
    path.write_text(json.dumps([*runs, run], indent=2) + "\n")
