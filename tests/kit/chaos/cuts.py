"""Connections between clients and gateways cut at random bytes, again and again: every answer stays what it was.

python -m tests.kit.chaos.cuts --cuts 1000 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard import AsyncClient, RetryPolicy
from tests.kit.chaos.chaos_requests import make_requests
from tests.kit.chaos.fault_proxy import FaultProxy
from tests.kit.chaos.faulty_connection import Rule, random_rules
from tests.kit.oracles.answers import Known, noted_losses, run_alone
from tests.kit.processes.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_STREAMS = 24
# A request takes some hundred bytes up, an answer some thousand down: a cut hits any part of either.
MAX_UP_BYTES = 1500
MAX_DOWN_BYTES = 8000
# A stream may be cut many times before its first event. It is the answer that is tested, and not the patience.
RETRY = RetryPolicy(max_attempts=100, initial_delay_seconds=0.02, max_delay_seconds=0.2)


@dataclass(slots=True)
class CutsReport:
    """What came of it. It is good where `failures` is empty."""

    seed: int
    num_cuts: int = 0
    num_streams: int = 0
    num_resumes: int = 0
    failures: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        head = f"seed {self.seed}: {self.num_cuts} connections cut, {self.num_streams} streams finished, "
        lines = [f"{head}{self.num_resumes} times read on", *(f"FAILED: {failure}" for failure in self.failures)]
        return "\n".join(lines)


class Cutter:
    """Streams through proxies that end every connection, until so many are cut."""

    def __init__(self, targets: Sequence[str], known: Sequence[Known], seed: int, num_cuts: int) -> None:
        self.report = CutsReport(seed)
        self._targets = targets
        self._known = known
        self._seed = seed
        self._num_cuts = num_cuts
        self._proxies: list[FaultProxy] = []

    async def run(self) -> CutsReport:
        """Cuts, then lets the streams that are left end in peace."""
        async with AsyncExitStack() as stack:
            for number, target in enumerate(self._targets):
                rules = random_rules(self._seed + number, MAX_UP_BYTES, MAX_DOWN_BYTES)
                self._proxies.append(await stack.enter_async_context(FaultProxy(target, rule_of=rules)))
            with noted_losses() as losses:
                await asyncio.gather(*(self._run_streams(number) for number in range(NUM_STREAMS)))
            self.report.failures.extend(losses)
        self.report.num_cuts = self._count()
        return self.report

    def _count(self) -> int:
        return sum(sum(proxy.stats.num_endings.values()) for proxy in self._proxies)

    async def _run_streams(self, number: int) -> None:
        draw = random.Random(f"{self._seed}/cuts/{number}")
        count = 0
        while self._count() < self._num_cuts and not self.report.failures:
            await self._run_stream(draw.choice(self._known), f"cut-{self._seed}-{number}-{count}")
            count += 1
        for proxy in self._proxies:
            proxy.rule_of = lambda _: Rule()

    async def _run_stream(self, known: Known, request_id: str) -> None:
        """Reads one answer over connections of its own."""
        addresses = [proxy.address for proxy in self._proxies]
        async with AsyncClient(addresses, retry=RETRY) as client:
            transcript, wrong = await known.check(client, request_id)
        self.report.num_streams += 1
        self.report.num_resumes += transcript.num_resumes
        if wrong:
            self.report.failures.append(wrong)


async def run_cuts(cluster: Cluster, seed: int, num_cuts: int, num_requests: int = 32) -> CutsReport:
    """Cuts connections to the gateways of a cluster that is otherwise left in peace."""
    await cluster.wait_until_ready()
    async with AsyncClient(cluster.targets) as client:
        known = await run_alone(client, make_requests(seed, num_requests))
    return await Cutter(cluster.targets, known, seed, num_cuts).run()


async def _main(seed: int, num_cuts: int) -> CutsReport:
    from tests.kit.kernels.tiny_models import tiny_model

    folder = Path(tempfile.mkdtemp(prefix="cuts-"))
    async with Cluster(tiny_model("llama"), folder, scheduler_flags=["--dtype", "bfloat16"]) as cluster:
        return await run_cuts(cluster, seed, num_cuts)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser("cuts", description="Streams outlive every cut of their connections.")
    parser.add_argument("--cuts", type=int, default=1000, help="how many connections to cut")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic and the cuts")
    arguments = parser.parse_args()
    report = asyncio.run(_main(arguments.seed, arguments.cuts))
    sys.stdout.write(f"{report}\n")
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
