"""Runs simulated clusters: `python -m tests.kit.simulation run`, and `replay SEED [--shrink] [--log]`.

`run` plays scenarios of fresh seeds on all processors, prints those that fail, and ends with 1 if there are any. `make
sim` calls it. `replay` plays one again; `--shrink` first takes away what is not needed for its failure, and `--log`
shows what the services logged, with virtual times.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from typing import TYPE_CHECKING

from tests.kit.simulation.asks import HTTP_CONDUCTS, POOLING_CONDUCTS
from tests.kit.simulation.clients import CONDUCTS, Report, Strike
from tests.kit.simulation.faults import FAULTS
from tests.kit.simulation.health import Judgement
from tests.kit.simulation.matrix import write_matrix
from tests.kit.simulation.play import play
from tests.kit.simulation.scenario import draw_scenario
from tests.kit.simulation.shrink import shrink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kit.simulation.scenario import Scenario

# Seeds that a process plays before it reports.
CHUNK = 4


def scenario_of(seed: int | str) -> Scenario:
    """Draws the scenario of a seed."""
    return draw_scenario(
        seed, list(FAULTS), [name for name in CONDUCTS if name not in (*HTTP_CONDUCTS, *POOLING_CONDUCTS)]
    )


def play_seeds(seeds: list[int | str]) -> list[Report]:
    """Plays the scenarios of some seeds in this process, without their logs."""
    logging.disable(logging.CRITICAL)
    return [play(scenario_of(seed)) for seed in seeds]


def play_for(seconds: float, first_seed: int | str, num_processes: int) -> Iterator[Report]:
    """Plays the seeds from `first_seed` on, on several processors for some time; yields each report.

    A text as the first seed stands before the numbers of the seeds.
    """
    end = time.monotonic() + seconds
    numbers = count(first_seed) if isinstance(first_seed, int) else (f"{first_seed}/{number}" for number in count())
    with ProcessPoolExecutor(num_processes) as pool:
        running = [pool.submit(play_seeds, [next(numbers) for _ in range(CHUNK)]) for _ in range(num_processes + 1)]
        while running:
            yield from running.pop(0).result()
            if time.monotonic() < end:
                running.append(pool.submit(play_seeds, [next(numbers) for _ in range(CHUNK)]))


def run(arguments: argparse.Namespace) -> int:
    """Plays fresh seeds, and tells how it goes."""
    begin, seen, failed = time.monotonic(), 0, 0
    outcomes, strikes, health = Counter[str](), Counter[Strike](), Counter[tuple[str, Judgement]]()
    for report in play_for(arguments.minutes * 60, arguments.seed, arguments.processes):
        seen += 1
        outcomes += report.outcomes
        strikes += report.strikes
        health += report.health
        if report.violations:
            failed += 1
            print(f"\rseed {report.seed}: {'; '.join(report.violations[:3])}", flush=True)
        if sys.stderr.isatty():
            rate = seen / (time.monotonic() - begin)
            print(f"\r{seen} seeds, {rate:.1f} a second, {failed} failed", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - begin
    print(f"\r{seen} scenarios in {seconds:.0f} s, {seen / seconds * 3600:,.0f} an hour; {failed} failed")
    if arguments.write:
        write_matrix(outcomes, strikes, health, seen, failed)
    kinds, phases, answers = Counter[str](), Counter[str](), Counter[str]()
    for (_, judgement), number in health.items():
        answers[judgement] += number
    for strike, number in strikes.items():
        kinds[strike.kind] += number
        phases[strike.phase] += number
    for title, counts in (("requests", outcomes), ("faults", kinds), ("they met", phases), ("health", answers)):
        print(f"{title}: {', '.join(f'{number:,} {name}' for name, number in counts.most_common())}")
    return int(failed > 0)


def replay(arguments: argparse.Namespace) -> int:
    """Plays one seed again."""
    scenario = scenario_of(int(arguments.seed) if arguments.seed.isdecimal() else arguments.seed)
    logging.disable(logging.CRITICAL)
    if arguments.shrink:
        scenario = shrink(scenario, lambda text: print(f"\r{text}    ", end="", file=sys.stderr))
    if arguments.log:
        logging.disable(logging.NOTSET)
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(name)s %(message)s %(fields)s", defaults={"fields": ""}))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
    for fault in scenario.faults:
        print(f"{fault.at:8.3f} s  {fault.kind}: {', '.join(fault.targets)}, {fault.seconds:.2f} s, {fault.size:.2f}")
    for ask in scenario.asks:
        print(f"{ask.at:8.3f} s  {ask}")
    report = play(scenario)
    print(f"trace {report.trace_hash}, {report.num_callbacks} callbacks, {report.virtual_seconds:.1f} virtual seconds")
    print("\n".join(report.violations) or "all promises were kept")
    return int(bool(report.violations))


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.kit.simulation")
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("--seed", default=int(time.time()), type=lambda text: int(text) if text.isdecimal() else text)
    running.add_argument("--minutes", type=float, default=1.0)
    running.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    running.add_argument("--write", action="store_true", help="write docs/reliability/matrix.md")
    running.set_defaults(call=run)
    replaying = commands.add_parser("replay")
    replaying.add_argument("seed")
    replaying.add_argument("--shrink", action="store_true")
    replaying.add_argument("--log", action="store_true")
    replaying.set_defaults(call=replay)
    arguments = parser.parse_args()
    return arguments.call(arguments)


if __name__ == "__main__":
    sys.exit(main())
