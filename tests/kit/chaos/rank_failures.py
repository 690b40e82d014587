"""What a rank can do to its replica, in each phase of the replica's life: nobody loses a token, and ranks that are well
do not load again.

Each failure comes twice: a rank that computes for streams is killed, and its next life meets a fault at a point of its
choice while these streams wait for it.

    python -m tests.kit.chaos.rank_failures
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard import AsyncClient
from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import status_pb2
from blockyard.service import faults
from tests.kit.chaos import rank_faults
from tests.kit.chaos.chaos_requests import make_requests
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.oracles.answers import Known, check_all, run_alone
from tests.kit.processes.cluster import POLL_SECONDS, Cluster
from tests.kit.processes.scrape import Scrape
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from blockyard.client.results import GenerationOptions
    from tests.kit.oracles.transcript import Transcript

RANKS = ("rank-0", "rank-1")
DEADLINE_SECONDS = 1.5
FLAGS = (
    *("--dtype", "float32", "--num-device-blocks", "200", "--num-host-blocks", "32", "--debug-integrity"),
    # Prompts take several steps.
    *("--max-num-batched-tokens", "32", "--step-deadline-seconds", str(DEADLINE_SECONDS)),
)
WORKER_FLAGS = ("--num-threads", "1", "--worker-metrics-port", "0")
# Of different kinds; one has a long prompt.
REQUESTS = (0, 1, 3, 5)
SHORT: GenerationOptions = {"max_tokens": 64}
# Of what goes over the scheduler's connection to a rank: a dozen steps.
BUSY_BYTES = 2_000

PHASES = {
    "load": f"{faults.BEFORE_LOAD}:{{}}",
    "meet": f"{faults.BEFORE_JOIN}:{{}}",
    "greet": f"{faults.IN_COLLECTIVE}:{{}}@2",
    # Where no rank knows the fingerprint, they compute it behind the three operations by which they greet.
    "fingerprint": f"{faults.IN_COLLECTIVE}:{{}}@6",
    "prefill": f"{faults.BEFORE_ANSWER}:{{}}@3",
    "decode": f"{faults.IN_COLLECTIVE}:{{}}@200",
}
ACTIONS = (faults.Action.KILL, faults.Action.HANG)


@dataclass(frozen=True, slots=True)
class Failure:
    """A rank fails in a phase."""

    name: str
    phase: str
    action: faults.Action

    def __str__(self) -> str:
        return f"{self.action} of {self.name} in {self.phase}"

    @property
    def fault(self) -> str:
        """What the rank's next life gets as BLOCKYARD_FAULTS."""
        return PHASES[self.phase].format(self.action)

    @property
    def killed(self) -> tuple[str, ...]:
        """The ranks that begin anew for it."""
        return RANKS if self.phase == "fingerprint" else (self.name,)


FAILURES = tuple(Failure(*each) for each in product(RANKS, PHASES, ACTIONS))


class RankFailures:
    """Has the first two ranks of a cluster fail, which are its one replica that serves."""

    def __init__(self, cluster: Cluster, client: AsyncClient, known: Sequence[Known]) -> None:
        self._cluster = cluster
        self._client = client
        self._known = known
        self._num_runs = 0

    @asynccontextmanager
    async def _streams(self, loading: Sequence[str] = ()) -> AsyncIterator[None]:
        """Has streams under way. In the end they have the right answers, and only `loading` have loaded again."""
        deaths, streams = self._count_deaths(), self._begin_streams()
        await self._cluster.links[RANKS[0]].until_busy(BUSY_BYTES)
        yield
        await streams
        await self._check(deaths, loading)

    def _begin_streams(self) -> asyncio.Task[list[Transcript]]:
        self._num_runs += 1
        return asyncio.create_task(check_all(self._client, self._known, f"run-{self._num_runs}"))

    def _count_deaths(self) -> dict[str, int]:
        return {name: self._cluster.num_deaths(name) for name in RANKS}

    async def _check(self, deaths: dict[str, int], loading: Sequence[str]) -> None:
        """Checks that the replica is whole again, and that no other process than those of `loading` has ended."""
        await self._cluster.wait_until_ready(num_replicas=1)
        for name, num_deaths in self._count_deaths().items():
            assert (num_deaths > deaths[name]) == (name in loading), name
            assert num_loads(self._cluster, name) == 1
        self._cluster.check()

    async def meet(self, failure: Failure) -> None:
        """A rank dies, and its next life fails at a point."""
        cluster = self._cluster
        cluster.arm(failure.name, failure.fault)
        told, num_told = "a fault on purpose", cluster.log(failure.name).count("a fault on purpose")
        async with self._streams(failure.killed):
            for name in failure.killed:
                cluster.kill(name)
            await until(lambda: cluster.log(failure.name).count(told) > num_told)
            if failure.action is faults.Action.HANG:
                await self._until_missed(failure.name)
                cluster.thaw(failure.name)

    async def signal(self, names: Sequence[str], number: int) -> None:
        """Ranks get a signal while they compute."""
        async with self._streams(names if number == signal.SIGKILL else ()):
            for name in names:
                self._cluster.kill(name, number)
            if number == signal.SIGSTOP:
                for name in names:
                    await self._until_missed(name)
                    self._cluster.thaw(name)

    async def signal_idle(self, names: Sequence[str], number: int) -> None:
        """Ranks get a signal while nothing runs; then streams begin."""
        deaths = self._count_deaths()
        for name in names:
            self._cluster.kill(name, number)
        streams = self._begin_streams()
        if number == signal.SIGSTOP:
            for name in names:
                await self._until_missed(name)
                self._cluster.thaw(name)
        await streams
        await self._check(deaths, names if number == signal.SIGKILL else ())

    async def differ(self, name: str) -> None:
        """A rank leaves a digest that differs from the other's: the log has what both told."""
        await self.signal([name], rank_faults.DIFFER)
        told = re.search(
            r"two ranks differ: a bug .*differs=input_digest history=(.*) other_history=(.*)",
            self._cluster.log("scheduler"),
        )
        assert told
        histories = [re.findall(r"(\d+):([0-9a-f]{16})", each) for each in told.groups()]
        steps = [[step for step, _ in history] for history in histories]
        assert steps[0] == steps[1]
        equal = [mine == other for mine, other in zip(*histories, strict=True)]
        assert equal == [*[True] * (len(equal) - 1), False]

    async def hand_over(self) -> None:
        """Both ranks die for good: what they had goes on at the other replica, exactly."""
        await serve_at(self._cluster, 0, 1)
        streams = self._begin_streams()
        await self._cluster.links[RANKS[0]].until_busy(BUSY_BYTES)
        for name in RANKS:
            self._cluster.end(name)
        recoveries = [recovered for transcript in await streams for recovered in transcript.recoveries]
        assert recoveries
        assert all(recovered.exact for recovered in recoveries)

    async def _until_missed(self, name: str) -> None:
        """Waits until the scheduler misses a rank that hangs: by the deadline of a step, or because nobody answers."""
        log_length = len(self._cluster.log("scheduler"))
        while f"was not answered within {DEADLINE_SECONDS:g} s" not in self._cluster.log("scheduler")[log_length:]:
            replicas = (await self._cluster.status()).scheduler.replicas
            states = {worker.rank: worker.state for worker in replicas[0].workers}
            if states[RANKS.index(name)] == status_pb2.WORKER_STATE_UNREACHABLE:
                return
            await asyncio.sleep(POLL_SECONDS)


async def serve_at(cluster: Cluster, *replica_ids: int) -> None:
    """Has these replicas serve, and drains the others of a cluster of two."""
    for number in range(2):
        if number in replica_ids:
            await cluster.admin().UndrainReplica(admin_pb2.UndrainReplicaRequest(replica=str(number)))
        else:
            await cluster.admin().DrainReplica(admin_pb2.DrainReplicaRequest(replica=str(number)))
    await cluster.wait_until_ready(num_replicas=len(replica_ids))


def num_loads(cluster: Cluster, name: str) -> int:
    """How many models the process of a worker has loaded."""
    port = re.findall(r"listening .*metrics_port=(\d+)", cluster.log(name))[-1]
    return int(Scrape.get(f"127.0.0.1:{port}").sum("blockyard_worker_model_loads_total"))


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[RankFailures]:
    """Starts a replica of two workers, and one of a single worker, which gives the answers alone and serves no more."""
    async with Cluster(
        tiny_model("llama"),
        folder,
        replica_sizes=(2, 1),
        num_gateways=1,
        scheduler_flags=FLAGS,
        worker_flags=WORKER_FLAGS,
        with_links=True,
    ) as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            await serve_at(cluster, 1)
            requests = make_requests(1, max(REQUESTS) + 1)
            chosen = [replace(requests[number], options={**requests[number].options, **SHORT}) for number in REQUESTS]
            known = await run_alone(client, chosen)
            await serve_at(cluster, 0)
            yield RankFailures(cluster, client, known)


async def run_all(folder: Path) -> None:
    """Runs every failure. Raises AssertionError at the first that is noticed."""
    begin = time.monotonic()

    def tell(what: object) -> None:
        print(f"[{time.monotonic() - begin:7.1f}] {what}", flush=True)  # noqa: T201

    async with running(folder) as failures:
        for failure in FAILURES:
            tell(failure)
            await failures.meet(failure)
        for number, names in (
            (signal.SIGKILL, RANKS[:1]),
            (signal.SIGKILL, RANKS[1:]),
            (signal.SIGKILL, RANKS),
            (signal.SIGSTOP, RANKS[:1]),
            (signal.SIGSTOP, RANKS[1:]),
            (rank_faults.CUT, RANKS[:1]),
            (rank_faults.CUT, RANKS[1:]),
            (rank_faults.FREEZE, RANKS),
        ):
            for strike in (failures.signal, failures.signal_idle):
                tell(f"{strike.__name__} {signal.Signals(number).name} of {' and '.join(names)}")
                await strike(names, number)
        for name in RANKS:
            tell(f"{name} differs")
            await failures.differ(name)
        tell("both ranks end for good")
        await failures.hand_over()
    tell("all streams had their answers")


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser("rank_failures", description="Streams outlive whatever a rank does.")
    parser.add_argument("--logs", type=Path, help="where the services' logs go; default: a new folder")
    folder: Path = parser.parse_args().logs or Path(tempfile.mkdtemp(prefix="ranks-"))
    sys.stdout.write(f"logs in {folder}\n")
    asyncio.run(run_all(folder))


if __name__ == "__main__":
    main()
