"""Kills the scheduler again and again while clients resume and cancel at a gateway that did not take their requests.

Each round begins two requests at one gateway and kills the scheduler. At the other gateway the first is resumed and
the second cancelled, before the scheduler has heard of either: in every second round the first gateway stands still
until that is so. The resumed answer must be the undisturbed one, no call may be told REQUEST_EXPIRED, and a cancel that
was taken must end its request.

    python -m tests.kit.chaos.scheduler_kills --kills 50
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockyard import AsyncClient, RetryPolicy
from blockyard.errors import BlockyardError, Reason
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.cluster import Cluster

FLAGS = ("--dtype", "float32", "--num-device-blocks", "2400", "--num-host-blocks", "16")
PROMPT = [5, 6, 7, 8]
ASKED: dict[str, Any] = {"n": 4, "max_tokens": 300, "seed": 3, "ignore_eos": True, "temperature": 1.0}
# Long enough to run still when its cancel comes.
LONG: dict[str, Any] = {**ASKED, "n": 48, "max_tokens": 1500}
ROUND_SECONDS = 60.0
# A scheduler is away for seconds on a busy machine; each try waits at the gateway for it.
RETRY = RetryPolicy(max_attempts=30)


@dataclass
class Report:
    """What came of it. It is good where `failures` is empty."""

    num_kills: int = 0
    num_resumed: int = 0
    num_cancelled: int = 0
    failures: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        head = f"{self.num_kills} kills, {self.num_resumed} answers resumed, {self.num_cancelled} requests cancelled"
        return "\n".join([head, *(f"FAILED: {failure}" for failure in self.failures)])


def _texts(answer: Any) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in answer.choices]


class _Run:
    def __init__(self, cluster: Cluster, here: AsyncClient, there: AsyncClient) -> None:
        self.report = Report()
        self._cluster = cluster
        self._here = here
        self._there = there
        self._expected: list[tuple[int, ...]] = []

    async def run(self, num_kills: int) -> None:
        self._expected = _texts(await self._here.generate(PROMPT, return_token_ids=True, **ASKED))
        for number in range(num_kills):
            try:
                async with asyncio.timeout(ROUND_SECONDS):
                    await self._round(number, holds=number % 2 == 0)
            except (BlockyardError, TimeoutError) as error:
                self.report.failures.append(f"round {number}: {error!r}")
                self._cluster.thaw("gateway-0")
                return
            await self._cluster.wait_until_ready()

    async def _round(self, number: int, *, holds: bool) -> None:
        read_id, cancelled_id = f"read-{number}", f"cancelled-{number}"
        async with (
            self._here.stream(PROMPT, request_id=read_id, return_token_ids=True, **ASKED) as read,
            self._here.stream(PROMPT, request_id=cancelled_id, **LONG) as cancelled,
        ):
            await asyncio.gather(anext(read), anext(cancelled))
            if holds:
                self._cluster.freeze("gateway-0")
            self._cluster.kill("scheduler")
            self.report.num_kills += 1
            resuming = asyncio.create_task(self._resume(read_id))
            ended = asyncio.create_task(_end_of(cancelled))
            was_taken = await self._there.cancel(cancelled_id)
            if holds:
                self._cluster.thaw("gateway-0")
            self._check("resumed", number, await resuming)
            reason = await ended
            if was_taken == [cancelled_id] and reason is Reason.CLIENT_CANCELLED:
                self.report.num_cancelled += 1
            else:
                self.report.failures.append(f"round {number}: cancel {was_taken}, and the stream ended by {reason}")
            self._check("read on", number, await read.result())

    async def _resume(self, request_id: str) -> Any:
        async with self._there.resume(request_id) as stream:
            return await stream.result()

    def _check(self, what: str, number: int, answer: Any) -> None:
        if _texts(answer) != self._expected:
            self.report.failures.append(f"round {number}: what was {what} is another answer")
        elif what == "resumed":
            self.report.num_resumed += 1


async def _end_of(stream: Any) -> Reason | None:
    try:
        async for _ in stream:
            pass
    except BlockyardError as error:
        return error.reason
    return None


async def run_scheduler_kills(num_kills: int, folder: Path) -> Report:
    """Starts a cluster and strikes so often."""
    cluster = Cluster(tiny_model("llama"), folder, replica_sizes=[1], num_gateways=2, scheduler_flags=FLAGS)
    async with cluster:
        await cluster.wait_until_ready()
        here, there = cluster.targets
        async with AsyncClient(here, retry=RETRY) as first, AsyncClient(there, retry=RETRY) as second:
            run = _Run(cluster, first, second)
            await run.run(num_kills)
        cluster.check()
    return run.report


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(run_scheduler_kills(options.kills, Path(folder)))
    sys.stdout.write(f"{report}\n")
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
