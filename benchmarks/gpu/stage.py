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
    from collections.abc import Callable, Mapping

# A line is timed at least so often and so long, in rounds of so long, in seconds.
ROUNDS, SECONDS, ROUND_SECONDS = 5, 0.2, 0.04
# Calls of one graph, at most.
MAX_RECORDED = 20


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

    def measure(
        self, name: str, run: Callable[[], object], work: Mapping[str, float], *, calls: int = 1, recorded: bool = False
    ) -> None:
        """Keeps the time of a line; one that the device cannot do is kept with its error, and the next goes on.

        Args:
            name: of the line.
            run: does the work.
            work: how much of it, by the ceiling that bounds it: bytes or products. The longest is the ideal time.
            calls: into how many `run` is divided.
            recorded: see `seconds_of`.
        """
        ceilings = self.ceilings()
        ideals = [amount / ceilings[limit] for limit, amount in work.items() if limit in ceilings]
        facts = {"ideal_seconds": max(ideals)} if ideals else {}
        try:
            self.keep(name, {"seconds": self.seconds_of(run, recorded=recorded) / calls, **facts})
        except Exception as error:  # noqa: BLE001 - a device's and a compiler's may be any
            self.keep(name, {"error": str(error).partition("\n")[0][:200], **facts})
            self._forget()

    def seconds_of(self, run: Callable[[], object], *, recorded: bool = False) -> float:
        """The median time of a call, of rounds of as many calls as take some milliseconds.

        `recorded`: of calls in a CUDA graph, as a step's are, so that the time which the host takes to launch them is
        left out. A dry run calls once.
        """
        if self.is_dry:
            return self._round(run, 1)
        run()
        once = self._round(run, 1)
        calls, per_run = max(1, min(1000, int(ROUND_SECONDS / max(once, 1e-6)))), 1
        if recorded and self.device.type == "cuda":
            per_run = min(calls, MAX_RECORDED)
            run, calls = _record(run, per_run), calls // per_run
        rounds, begin = [], time.perf_counter()
        while len(rounds) < ROUNDS or (time.perf_counter() - begin < SECONDS and len(rounds) < 50):
            rounds.append(self._round(run, calls) / per_run)
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


def _record(run: Callable[[], object], count: int) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            run()
    return graph.replay


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
