"""What further ranks cost the scheduler: its CPU time for a step to replicas of 1, 2, 4 and 8 ranks.

    python benchmarks/groups/rank_cost.py [--steps 2000] [--rounds 7] [--write]

The ranks are servers on Unix sockets in a process of their own. They answer each step at once: the sampling rank with
what was sampled of 64 sequences, the others with their hashes alone. The scheduler's half is its own: steps are encoded
and sent to all ranks, answers are decoded and compared; two are in flight. Above 4 ranks 7 of 8 steps are quiet.
What counts is the CPU time of this process, of all its threads, as a ratio to that of one rank in the same round.
Targets: 80 µs for each further rank, 600 µs in all for 8 ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kit import record
from benchmarks.kit.figures import number, round_figures, spread_of
from blockyard.contract.parallel import Parallel
from blockyard.service.servers import bind, make_server
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_service.core.values import SchedulerOutput
from scheduler_service.replicas.steps.answer_checks import AnswerLimits
from scheduler_service.replicas.steps.group_steps import GroupSteps
from scheduler_service.replicas.worker_link import StepStream, WorkerLink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from scheduler_service.replicas.worker_link import Steps

WORLD_SIZES = (1, 2, 4, 8)
NUM_SEQUENCES = 64
SEQUENCE_IDS = tuple(range(1, NUM_SEQUENCES + 1))
BLOCK_SIZE = 16
LIMITS = AnswerLimits(32_000, 4096, NUM_SEQUENCES)
NUM_IN_FLIGHT = 2
NUM_WARM_UP = 200
EPOCH = 1
DIGEST = 0x0123456789ABCDEF
MESSAGE_BYTES = 2**24


class Echo(worker_pb2_grpc.WorkerServiceServicer):
    """A rank that has done every step the moment it comes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    async def ExecuteModel(  # type: ignore[override]
        self, request_iterator: AsyncIterator[worker_pb2.ExecuteModelRequest], context: Any
    ) -> AsyncIterator[worker_pb2.ExecuteModelResponse]:
        """Answers as this rank would."""
        answer = worker_pb2.ExecuteModelResponse(epoch=EPOCH, input_digest=DIGEST, output_digest=DIGEST)
        answer.times.forward.nanos = 10**6
        if self._rank == 0:
            answer.sequence_ids.extend(SEQUENCE_IDS)
            answer.token_ids.extend(range(1000, 1000 + NUM_SEQUENCES))
        async for step in request_iterator:
            answer.step_id = step.step_id
            if self._rank == 0 or not step.quiet:
                yield answer


async def serve(folder: Path) -> None:
    """Runs as many ranks as the largest world has, until this process is ended."""
    servers = [make_server(MESSAGE_BYTES, []) for _ in range(WORLD_SIZES[-1])]
    for rank, server in enumerate(servers):
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(Echo(rank), server)
        bind(server, address(folder, rank))
        await server.start()
    print("ready", flush=True)
    await servers[0].wait_for_termination()


def address(folder: Path, rank: int) -> str:
    """Where a rank listens."""
    return f"unix:{folder}/rank-{rank}"


class Cost(NamedTuple):
    """Of one step, in microseconds: this process's CPU time, and the time from one answer to the next."""

    cpu: float
    time: float


def open_steps(links: Sequence[WorkerLink]) -> Steps:
    """The steps of a replica of these ranks, as the scheduler opens them."""
    calls = [link.open_steps() for link in links]
    if len(calls) == 1:
        return StepStream(calls[0], EPOCH, LIMITS)
    return GroupSteps(calls, EPOCH, LIMITS, Parallel(len(calls)), lambda: 10.0)


async def measure(links: Sequence[WorkerLink], num_steps: int) -> Cost:
    """Runs steps of steady decodes, a sixteenth of which fill a block."""
    appended = SEQUENCE_IDS[: NUM_SEQUENCES // BLOCK_SIZE]
    steps = open_steps(links)
    cpu = begin = 0.0
    for step_id in range(1, NUM_WARM_UP + num_steps + 1):
        ones = (1,) * NUM_SEQUENCES
        await steps.send(
            SchedulerOutput(
                step_id,
                sequence_ids=SEQUENCE_IDS,
                num_new_tokens=ones,
                appended_sequence_ids=appended,
                appended_block_ids=appended,
            )
        )
        if step_id >= NUM_IN_FLIGHT:
            await steps.receive()
        if step_id == NUM_WARM_UP:
            cpu, begin = time.process_time(), time.perf_counter()
    cost = Cost(1e6 * (time.process_time() - cpu) / num_steps, 1e6 * (time.perf_counter() - begin) / num_steps)
    steps.cancel()
    return cost


async def run(folder: Path, num_steps: int, num_rounds: int) -> list[dict[str, Any]]:
    """Measures each size in each round, and compares them within it."""
    links = [WorkerLink(address(folder, rank)) for rank in range(WORLD_SIZES[-1])]
    rounds = [{size: await measure(links[:size], num_steps) for size in WORLD_SIZES} for _ in range(num_rounds)]
    for link in links:
        await link.close()
    alone = [costs[1].cpu for costs in rounds]
    results: list[dict[str, Any]] = []
    for size in WORLD_SIZES:
        cpu = [costs[size].cpu for costs in rounds]
        further = [(mine - one) / max(size - 1, 1) for mine, one in zip(cpu, alone, strict=True)]
        results.append(
            {
                "num_ranks": size,
                "cpu_us": spread_of(cpu),
                "cpu_ratio": spread_of(cpu, alone),
                "cpu_us_for_each_further_rank": spread_of(further),
                "step_us": spread_of([costs[size].time for costs in rounds]),
            }
        )
    return results


def measure_all(num_steps: int, num_rounds: int) -> list[dict[str, Any]]:
    """Starts the ranks, measures, and ends them."""
    with tempfile.TemporaryDirectory(prefix="rank-cost-") as folder:
        ranks = subprocess.Popen([sys.executable, __file__, "--serve", folder], stdout=subprocess.PIPE, text=True)
        with ranks:
            try:
                assert ranks.stdout is not None
                assert ranks.stdout.readline() == "ready\n"
                return asyncio.run(run(Path(folder), num_steps, num_rounds))
            finally:
                ranks.kill()


def main() -> None:
    """Measures, prints, and writes if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/rank_cost.json")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.serve))
        return
    gc.freeze()  # as the scheduler's process does after its start
    results = measure_all(options.steps, options.rounds)
    print("ranks  CPU µs a step     ratio to 1 rank      µs for each further rank")
    for each in results:
        cells = (number(each["cpu_us"]), number(each["cpu_ratio"], 2), number(each["cpu_us_for_each_further_rank"]))
        print(f"{each['num_ranks']:>5}  {cells[0]:<18}{cells[1]:<21}{cells[2]}")
    if options.write:
        record.append("rank_cost", round_figures(results))


if __name__ == "__main__":
    main()
