"""The chaos run: streams that must not notice that everything behind them is killed and frozen all the time.

Each request is run alone first, undisturbed; then many run at a time while a schedule strikes at workers, scheduler and
gateways. Every answer must be the undisturbed one, told once and in order, and nothing may be left behind. Traffic and
strikes are functions of the seed; what the machine makes of them is not, so that a seed does not repeat a failure to
the instant.

    python -m tests.kit.chaos.chaos --seconds 600 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from blockyard import AsyncClient, RetryPolicy
from blockyard.contract.sampling import PredictionUsage
from tests.kit.chaos import rank_faults
from tests.kit.chaos.chaos_requests import TOKEN_IDS, make_requests
from tests.kit.chaos.fault_schedule import Kind, Rates, Strike, make_schedule
from tests.kit.kernels.late_worker import DEPTH_VARIABLE
from tests.kit.oracles.answers import Known, noted_losses, run_alone
from tests.kit.processes.cluster import POLL_SECONDS, Cluster, ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.admin.v1 import admin_pb2
    from blockyard.client.results import GenerationOptions
    from tests.kit.oracles.transcript import Transcript

# Small enough that requests are preempted, by swap and by recompute, while their workers die.
POOLS = ("--dtype", "bfloat16", "--num-device-blocks", "320", "--num-host-blocks", "64")
# Time for all streams to end once nothing strikes any more, and for everything to be idle after that.
FINISH_SECONDS = 120.0
IDLE_SECONDS = 60.0
# For requests that nobody has accepted yet: both gateways may be away for a while, and the scheduler with them.
RETRY = RetryPolicy(max_attempts=30)
# Connections come and go; what leaks grows by one for each strike or stream.
MAX_MORE_FILES = 24
MAX_FAILURES = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """What a chaos run does.

    Attributes:
        seed: of the traffic and the strikes.
        seconds: during which there are strikes.
        num_streams: at a time.
        num_requests: different ones, of which each stream takes one after another.
        num_clients: connections that the streams share.
        rates: of the strikes.
        speculation: whether workers draft; empty: the seed decides.
    """

    seed: int = 1
    seconds: float = 600.0
    num_streams: int = 64
    num_requests: int = 64
    num_clients: int = 8
    rates: Rates = field(default_factory=Rates)
    speculation: str = ""

    def __post_init__(self) -> None:
        drawn = random.Random(f"{self.seed}/drafts").choice(("none", "auto"))
        object.__setattr__(self, "speculation", self.speculation or drawn)


@dataclass(slots=True)
class Report:
    """What a run showed. It is good where `failures` is empty."""

    plan: Plan
    begun_at: float = 0.0
    strikes: Counter[str] = field(default_factory=Counter[str])
    deaths: dict[str, int] = field(default_factory=dict[str, int])
    num_streams: int = 0
    num_tokens: int = 0
    num_resumes: int = 0
    num_recoveries: int = 0
    num_replayed_tokens: int = 0
    prediction: PredictionUsage = field(default_factory=PredictionUsage)
    longest_first_token_seconds: float = 0.0
    longest_gap_seconds: float = 0.0
    longest_gap_at: float = 0.0
    longest_stall_seconds: float = 0.0
    failures: list[str] = field(default_factory=list[str])

    def add(self, transcript: Transcript) -> None:
        """Counts a stream that has ended."""
        self.num_streams += 1
        self.num_resumes += transcript.num_resumes
        self.num_tokens += transcript.num_tokens
        self.num_recoveries += len(transcript.recoveries)
        self.prediction = self.prediction.plus(*transcript.prediction)
        self.num_replayed_tokens += sum(recovered.num_replayed_tokens for recovered in transcript.recoveries)
        self.longest_first_token_seconds = max(self.longest_first_token_seconds, transcript.first_token_seconds)
        if transcript.longest_gap_seconds > self.longest_gap_seconds:
            self.longest_gap_seconds = transcript.longest_gap_seconds
            self.longest_gap_at = transcript.longest_gap_at - self.begun_at

    def __str__(self) -> str:
        strikes = ", ".join(f"{count} x {what}" for what, count in sorted(self.strikes.items()))
        deaths = ", ".join(f"{name} {count}" for name, count in self.deaths.items())
        lines = [
            f"seed {self.plan.seed}, {self.plan.seconds:g} s, {self.plan.num_streams} streams at a time, "
            f"speculation {self.plan.speculation}",
            f"drafts by predictions: {sum(self.prediction)}, right: {self.prediction.num_accepted_tokens}",
            f"strikes: {strikes or 'none'}",
            f"deaths: {deaths}",
            f"streams finished: {self.num_streams}, tokens: {self.num_tokens}, resumed by clients: {self.num_resumes}",
            f"recovered events: {self.num_recoveries}, replayed tokens: {self.num_replayed_tokens}",
            f"longest gap between tokens: {self.longest_gap_seconds:.2f} s, which ended at {self.longest_gap_at:.2f} s",
            f"longest wait for a first token: {self.longest_first_token_seconds:.2f} s",
            f"longest stall of this process itself: {self.longest_stall_seconds:.2f} s",
            *(f"FAILED: {failure}" for failure in self.failures),
        ]
        return "\n".join(lines)


class ChaosRun:
    """One run of a plan on a cluster that has just been started."""

    def __init__(self, plan: Plan, cluster: Cluster, tell: Callable[[str], object] = lambda _: None) -> None:
        self.report = Report(plan)
        self._plan = plan
        self._cluster = cluster
        self._tell = tell
        self._known: list[Known] = []
        self._is_over = False

    async def run(self) -> Report:
        """Runs it. What goes wrong stands in the report."""
        await self._cluster.wait_until_ready()
        async with AsyncClient(self._cluster.targets) as client:
            self._known = await run_alone(client, make_requests(self._plan.seed, self._plan.num_requests))
        if self._plan.speculation != "none":
            self._known = [
                _predict(known, random.Random(f"{self._plan.seed}/{place}")) for place, known in enumerate(self._known)
            ]
        await self._wait_until_idle()
        num_files = {name: self._cluster.num_open_files(name) for name in self._cluster.members}
        async with AsyncExitStack() as clients:
            with noted_losses() as losses:
                await self._run_together([await clients.enter_async_context(each) for each in self._make_clients()])
        for loss in losses:
            self._fail(loss)
        try:
            await self._cluster.wait_until_ready()
            await self._wait_until_idle()
            self._check_files(num_files)
            self._cluster.check()
        except ClusterError as error:
            self._fail(str(error))
        self.report.deaths = {name: self._cluster.num_deaths(name) for name in self._cluster.members}
        return self.report

    def _make_clients(self) -> list[AsyncClient]:
        """Each begins with another gateway."""
        targets = self._cluster.targets
        turns = [number % len(targets) for number in range(self._plan.num_clients)]
        return [AsyncClient(targets[turn:] + targets[:turn], retry=RETRY) for turn in turns]

    # The run.

    async def _run_together(self, clients: list[AsyncClient]) -> None:
        streams = [
            asyncio.create_task(self._run_streams(number, clients[number % len(clients)]))
            for number in range(self._plan.num_streams)
        ]
        watching = asyncio.create_task(self._watch_own_loop())
        await self._strike_all()
        watching.cancel()
        self._is_over = True
        self._tell("no strikes any more")
        _, pending = await asyncio.wait(streams, timeout=FINISH_SECONDS)
        if pending:
            self._fail(f"{len(pending)} streams have not ended {FINISH_SECONDS:g} s after the last strike")
        for task in pending:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)

    async def _run_streams(self, number: int, client: AsyncClient) -> None:
        """Reads one answer after another until the strikes are over."""
        draw = random.Random(f"{self._plan.seed}/stream/{number}")
        count = 0
        while not self._is_over and len(self.report.failures) < MAX_FAILURES:
            known = draw.choice(self._known)
            transcript, wrong = await known.check(client, f"{self._plan.seed}-{number}-{count}")
            self.report.add(transcript)
            if wrong:
                self._fail(wrong)
            count += 1

    async def _watch_own_loop(self) -> None:
        """Notes when this process, and with it the links, stood still: then gaps tell of the machine."""
        while True:
            begin = time.monotonic()
            await asyncio.sleep(POLL_SECONDS)
            stall_seconds = time.monotonic() - begin - POLL_SECONDS
            self.report.longest_stall_seconds = max(self.report.longest_stall_seconds, stall_seconds)

    def _fail(self, told: str) -> None:
        self.report.failures.append(told)
        self._tell(f"FAILED: {told}")

    # The strikes.

    async def _strike_all(self) -> None:
        names = list(self._cluster.members)
        self.report.begun_at = begin = time.monotonic()
        async with asyncio.TaskGroup() as healing:
            for strike in make_schedule(self._plan.seed, self._plan.seconds, names, self._plan.rates):
                await asyncio.sleep(begin + strike.at_seconds - time.monotonic())
                if len(self.report.failures) >= MAX_FAILURES:
                    break
                self._tell(str(strike))
                self.report.strikes[f"{strike.kind} {strike.name.partition('-')[0]}"] += 1
                self._strike(strike, healing)

    def _strike(self, strike: Strike, healing: asyncio.TaskGroup) -> None:
        name, cluster = strike.name, self._cluster
        match strike.kind:
            case Kind.KILL:
                cluster.kill(name)
            case Kind.ARM:
                cluster.arm(name, strike.armed)
                cluster.kill(name)
            case Kind.CUT:
                cluster.links[name].end()
            case Kind.CUT_GROUP:
                cluster.kill(name, rank_faults.CUT)
            case Kind.FREEZE_GROUP:
                cluster.kill(name, rank_faults.FREEZE)
            case Kind.FREEZE:
                cluster.freeze(name)
                healing.create_task(_after(strike.seconds, lambda: cluster.thaw(name)))
            case Kind.PARTITION:
                cluster.links[name].partition()
                healing.create_task(_after(strike.seconds, cluster.links[name].heal))

    # What is left.

    async def _wait_until_idle(self) -> None:
        """Waits until no request is known anywhere and every block is free. Raises ClusterError."""
        deadline = time.monotonic() + IDLE_SECONDS
        busy = ["nobody answered"]
        while time.monotonic() < deadline:
            with suppress(grpc.aio.AioRpcError):
                statuses = [await self._cluster.status(number) for number in range(len(self._cluster.targets))]
                busy = [told for status in statuses for told in _what_is_busy(status)]
                if not busy:
                    return
            await asyncio.sleep(POLL_SECONDS)
        raise ClusterError(f"not idle after {IDLE_SECONDS:g} s: {'; '.join(dict.fromkeys(busy))}")

    def _check_files(self, before: dict[str, int]) -> None:
        for name, count in before.items():
            now = self._cluster.num_open_files(name)
            if now > count + MAX_MORE_FILES:
                self._fail(f"{name} has {now} open files, {count} before")


def _predict(known: Known, draw: random.Random) -> Known:
    """Has every second request predict its answer, a tenth of which is a lie."""
    if known.request.number % 2:
        return known
    answer = known.answer.sequences[0].token_ids
    predicted = [draw.choice(TOKEN_IDS) if draw.random() < 0.1 else token_id for token_id in answer]
    options: GenerationOptions = {**known.request.options, "predicted_token_ids": predicted}
    return replace(known, request=replace(known.request, options=options))


async def _after(seconds: float, then: Callable[[], None]) -> None:
    await asyncio.sleep(seconds)
    then()


def _what_is_busy(status: admin_pb2.GetStatusResponse) -> list[str]:
    """Returns what somebody still holds."""
    gateway, scheduler = status.gateway, status.scheduler
    counts = {f"gateway {gateway.gateway_id}: requests": gateway.num_requests}
    counts["waiting requests"] = scheduler.num_waiting_requests
    for replica in scheduler.replicas:
        named = f"replica {replica.replica_id}: "
        counts[named + "running sequences"] = replica.num_running_sequences
        counts[named + "swapped sequences"] = replica.num_swapped_sequences
        for kind, pool in (("device", replica.device_blocks), ("host", replica.host_blocks)):
            counts[f"{named}{kind} blocks held"] = pool.num_blocks - pool.num_free_blocks
    return [f"{what}: {count}" for what, count in counts.items() if count]


async def run_chaos(
    plan: Plan,
    model: Path,
    folder: Path,
    scheduler_flags: tuple[str, ...] = (),
    tell: Callable[[str], object] = print,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
) -> Report:
    """Runs a plan on a cluster of two replicas and two gateways; the logs go to `folder`."""
    async with Cluster(
        model,
        folder,
        scheduler_flags=(*POOLS, "--speculation", plan.speculation, *scheduler_flags),
        with_links=True,
        replica_sizes=[tensor_parallel_size * pipeline_parallel_size] * 2,
        pipeline_parallel_size=pipeline_parallel_size,
        num_gateways=2,
    ) as cluster:
        return await ChaosRun(plan, cluster, tell).run()


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser("chaos", description="Streams outlive whatever dies behind them.")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long there are strikes")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic and the strikes")
    parser.add_argument("--streams", type=int, default=64, help="how many at a time")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="of each of two replicas")
    parser.add_argument("--pipeline-parallel-size", type=int, default=1, help="of each of two replicas")
    parser.add_argument("--late-depth", type=int, help="workers launch so many steps ahead of a device that is late")
    parser.add_argument("--speculation", default="", choices=("", "none", "auto"), help="default: the seed decides")
    parser.add_argument("--model", type=Path, help="a folder; default: a tiny model with random weights")
    parser.add_argument("--logs", type=Path, help="where the services' logs go; default: a new folder")
    arguments = parser.parse_args()
    plan = Plan(arguments.seed, arguments.seconds, num_streams=arguments.streams, speculation=arguments.speculation)
    folder: Path = arguments.logs or Path(tempfile.mkdtemp(prefix="chaos-"))
    begin = time.monotonic()

    def tell(text: str) -> None:
        print(f"[{time.monotonic() - begin:7.1f}] {text}", flush=True)  # noqa: T201

    tell(f"seed {plan.seed}; logs in {folder}")
    model = arguments.model or _tiny_model()
    sizes = (arguments.tensor_parallel_size, arguments.pipeline_parallel_size)
    if arguments.late_depth:
        # All processes of the cluster have it; workers read it.
        os.environ[DEPTH_VARIABLE] = str(arguments.late_depth)
    report = asyncio.run(run_chaos(plan, model, folder, (), tell, *sizes))
    sys.stdout.write(f"{report}\n")
    sys.exit(bool(report.failures))


def _tiny_model() -> Path:
    from tests.kit.kernels.tiny_models import tiny_model

    return tiny_model("llama")


if __name__ == "__main__":
    main()
