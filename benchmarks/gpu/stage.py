"""What the stages of benchmarks/gpu_day.sh share: arguments, results that are kept line by line, and a clock.

    python -m benchmarks.gpu.stage --missing benchmarks/gpu/wheels.txt --wheels FOLDER

prints which of the packages that a file names this interpreter lacks and the folder has, and complains of those that
neither has.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# A line is timed at least so often and so long, in seconds.
ROUNDS, SECONDS = 5, 0.5


@dataclass(slots=True)
class Stage:
    """One stage: where it computes, how large, and what it has found so far."""

    device: torch.device
    is_dry: bool
    out: Path
    results: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str, value: Any) -> None:
        """Adds a result, and writes all of them whole: whoever ends this process now leaves what there is."""
        self.results[name] = value
        part = self.out.with_suffix(".part")
        part.write_text(json.dumps(self.results, indent=1) + "\n")
        part.replace(self.out)

    def measure(self, name: str, run: Callable[[], object], **facts: Any) -> None:
        """Keeps the time of a line; one that the device cannot do is kept with its error, and the next goes on."""
        try:
            self.keep(name, {"seconds": self.seconds_of(run), **facts})
        except RuntimeError as error:
            self.keep(name, {"error": str(error).partition("\n")[0][:200], **facts})
            self._forget()

    def seconds_of(self, run: Callable[[], object]) -> float:
        """The median time of a call, of rounds of as many calls as take some milliseconds."""
        run()
        once = self._round(run, 1)
        calls = 1 if self.is_dry else max(1, min(1000, int(0.02 / max(once, 1e-6))))
        rounds, begin = [], time.perf_counter()
        while len(rounds) < (1 if self.is_dry else ROUNDS) or (
            not self.is_dry and time.perf_counter() - begin < SECONDS and len(rounds) < 50
        ):
            rounds.append(self._round(run, calls))
        return statistics.median(rounds)

    def _round(self, run: Callable[[], object], calls: int) -> float:
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        self.synchronize()
        return (time.perf_counter() - begin) / calls

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forget(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def ceilings(self) -> dict[str, float]:
        """What the stage before this one measured of the machine; empty where it found nothing."""
        path = self.out.with_name("machine.json")
        return json.loads(path.read_text()).get("ceilings", {}) if path.exists() else {}


def start(description: str | None) -> Stage:
    """Reads a stage's arguments."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="on the processor, with tiny shapes")
    parser.add_argument("--out", type=Path, required=True, help="file for the results, JSON")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    if arguments.dry:
        torch.set_num_threads(1)
    return Stage(torch.device("cpu" if arguments.dry else "cuda"), arguments.dry, arguments.out)


def missing(names: list[str]) -> list[str]:
    """Those packages that are not installed."""
    found: list[str] = []
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(name)
    return found


def has_wheel(name: str, folder: Path) -> bool:
    """Returns whether a folder has a wheel of a package, of whatever version."""
    return any(_plain(path.name.partition("-")[0]) == _plain(name) for path in folder.glob("*.whl"))


def _plain(name: str) -> str:
    """A package's name as all its spellings have it."""
    return re.sub(r"[-_.]+", "_", name).lower()


def main() -> None:
    """Prints what can be installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", type=Path, required=True, help="file of package names, one a line")
    parser.add_argument("--wheels", type=Path, required=True, help="folder of wheels")
    arguments = parser.parse_args()
    names = missing([line for line in arguments.missing.read_text().splitlines() if line and not line.startswith("#")])
    there = [name for name in names if has_wheel(name, arguments.wheels)]
    if lacking := sorted(set(names) - set(there)):
        print(f"neither installed nor in {arguments.wheels}: {', '.join(lacking)}", file=sys.stderr)
    print(*there)


if __name__ == "__main__":
    main()
