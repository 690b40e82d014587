"""How long a stream pauses when a rank fails: from the blow to the next token, less what cannot be avoided.

    python benchmarks/groups/rank_failure.py [--model models/demo] [--rounds 5] [--write]

A replica of two workers of one thread each, behind the real scheduler and gateway, has one stream. A rank is killed and
started again at once: what cannot be avoided is its start and its load, to its line "model loaded". Or it is stopped
(SIGSTOP), and goes on when the scheduler has given it up; or the connections between the ranks are frozen, or cut: what
cannot be avoided is the step deadline, or nothing. Targets for the rest: 1 s after a kill, 2 s otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kit import record
from benchmarks.kit.figures import number, round_figures, spread_of
from blockyard import AsyncClient
from blockyard.contract.events import Delta, Recovered
from tests.kit.chaos import rank_faults
from tests.kit.processes.cluster import Cluster
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.client.results import GenerationOptions

DEADLINE_SECONDS = 2.0
FLAGS = ("--step-deadline-seconds", str(DEADLINE_SECONDS), "--num-device-blocks", "64")
NUM_TOKENS_BEFORE = 20
OPTIONS: GenerationOptions = {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True}
BLOWS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "cut": rank_faults.CUT, "frozen": rank_faults.FREEZE}
# Whom a blow hits.
SIDES = {"rank 0": ["rank-0"], "rank 1": ["rank-1"], "both ranks": ["rank-0", "rank-1"]}
MEASURED = [
    *((blow, side) for blow in ("killed", "stopped", "cut") for side in ("rank 0", "rank 1")),
    ("frozen", "both ranks"),
]


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds between a blow and the next token, and those of them that cannot be avoided."""

    seconds: float
    unavoidable_seconds: float


class Blow:
    """Hits ranks, and has those go on that were stopped."""

    def __init__(self, cluster: Cluster, name: str, ranks: Sequence[str]) -> None:
        self._cluster = cluster
        self._name = name
        self._ranks = ranks

    async def hit(self) -> float:
        """Returns how long it takes until what cannot be avoided is over."""
        cluster, begin = self._cluster, time.monotonic()
        logs = {name: cluster.log(name) for name in ("scheduler", *self._ranks)}
        for rank in self._ranks:
            cluster.kill(rank, BLOWS[self._name])
        match self._name:
            case "killed":
                await self._written(self._ranks[0], "model loaded", len(logs[self._ranks[0]]))
                return time.monotonic() - begin
            case "stopped":
                await self._written("scheduler", "was not answered within", len(logs["scheduler"]))
                for rank in self._ranks:
                    cluster.thaw(rank)
                return DEADLINE_SECONDS
            case "frozen":
                return DEADLINE_SECONDS
            case _:
                return 0.0

    async def _written(self, name: str, text: str, log_length: int) -> None:
        await until(lambda: text in self._cluster.log(name)[log_length:])


async def pause(client: AsyncClient, blow: Blow) -> Pause:
    """Strikes in the middle of a stream, and reads it to its end."""
    hitting: asyncio.Task[float] | None = None
    num_tokens, begin, next_at, has_recovered = 0, 0.0, 0.0, False
    async for event in client.stream("Once upon a time", **OPTIONS):
        if isinstance(event, Recovered):
            assert event.exact
            has_recovered = True
        elif isinstance(event, Delta):
            num_tokens = event.num_tokens
            if has_recovered and not next_at:
                next_at = time.monotonic()
            if hitting is None and num_tokens >= NUM_TOKENS_BEFORE:
                begin = time.monotonic()
                hitting = asyncio.create_task(blow.hit())
    assert hitting is not None
    assert next_at
    assert num_tokens == OPTIONS.get("max_tokens")
    return Pause(next_at - begin, await hitting)


async def measure(model: Path, num_rounds: int) -> list[dict[str, Any]]:
    """Measures every blow in every round."""
    pauses: dict[tuple[str, str], list[Pause]] = {each: [] for each in MEASURED}
    with tempfile.TemporaryDirectory(prefix="rank-failure-") as folder:
        async with Cluster(model, Path(folder), replica_sizes=[2], num_gateways=1, scheduler_flags=FLAGS) as cluster:
            await cluster.wait_until_ready()
            async with AsyncClient(cluster.targets) as client:
                for _ in range(num_rounds):
                    for (name, side), of_blow in pauses.items():
                        of_blow.append(await pause(client, Blow(cluster, name, SIDES[side])))
                        await cluster.wait_until_ready()
    return [_summarize(name, side, of_blow) for (name, side), of_blow in pauses.items()]


def _summarize(name: str, side: str, pauses: Sequence[Pause]) -> dict[str, Any]:
    return {
        "blow": name,
        "to": side,
        "pause_seconds": spread_of([each.seconds for each in pauses]),
        "unavoidable_seconds": spread_of([each.unavoidable_seconds for each in pauses]),
        "rest_seconds": spread_of([each.seconds - each.unavoidable_seconds for each in pauses]),
    }


def main() -> None:
    """Measures, prints, and writes if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "demo", help="a folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/rank_failure.json")
    options = parser.parse_args()
    results = asyncio.run(measure(options.model.resolve(), options.rounds))
    for each in results:
        seconds, unavoidable, rest = (number(each[f"{name}_seconds"], 2) for name in ("pause", "unavoidable", "rest"))
        print(f"{each['to']} {each['blow']}: next token after {seconds} s, {unavoidable} of them unavoidable: {rest}")
    if options.write:
        record.append("rank_failure", round_figures(results))


if __name__ == "__main__":
    main()
