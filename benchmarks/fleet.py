"""How far one scheduler goes: fleets of 1 to 64 replicas, whose steps take 5 ms each and give 64 sequences a token.

    python benchmarks/fleet.py [--replicas 1 2 4 8 16 32 64] [--gateways 1] [--rows 64] [--seconds 4] [--write]

The scheduler is the process that is served, on a core of its own. This process is all else, on the other cores: the
workers, each a server on a Unix socket that answers by a timer, and the gateways, which read what they are sent. On two
cores it may give out before the scheduler does: `fakes_cpu_share` is what it takes of one core, `late_ms` how late its
timers are.

A step begins when it has come and its predecessor has ended. So what a step takes beyond 5 ms (`added_ms`) is time in
which a device would have waited for its scheduler. Two steps are in flight: none is added as long as a step comes
within 5 ms after the answer that made room for it (`round_trip_ms`).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import selectors
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from blockyard.service import grpc_environment

grpc_environment.prepare()

from benchmarks import boundary
from benchmarks.kit import record
from benchmarks.kit.cores import pinned, split_cores
from benchmarks.kit.figures import quantiles, round_figures
from benchmarks.kit.processes import cpu_seconds, memory_bytes
from blockyard.common.v1 import status_pb2
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2
from tests.kit.fakes.fake_worker import FakeWorker, FakeWorkerOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

REPLICAS = (1, 2, 4, 8, 16, 32, 64)
STEP_SECONDS = 0.005
BLOCK_SIZE = 16
NUM_IN_FLIGHT = 2
WARM_UP_SECONDS = 1.0
START_SECONDS = 120.0
FIRST_TOKEN_ID = 1000
# So many that no sequence has to wait for one: for 5,000 steps, the warm-up among them.
NUM_BLOCKS_OF_ROW = 320


class Size(NamedTuple):
    """Of a fleet; `num_rows`: the sequences of each replica's steps."""

    num_replicas: int
    num_gateways: int
    num_rows: int


class Sample(NamedTuple):
    """What is known of one step, in seconds.

    Attributes:
        added: between the end of its predecessor and its own beginning, where the device had nothing to do.
        round_trip: from the answer that made room for it to its arrival.
        late: its answer was sent so long after its end.
    """

    added: float
    round_trip: float
    late: float


class TimedWorker(FakeWorker):
    """A worker whose steps take a fixed time, by its event loop's clock; it has no device's thread.

    Attributes:
        full: set once a step has computed as many sequences as it may.
        samples: of the steps since they were last cleared.
        num_rows: that those steps computed.
    """

    def __init__(self, address: str, max_num_rows: int) -> None:
        options = FakeWorkerOptions(
            block_size=BLOCK_SIZE,
            num_device_blocks=NUM_BLOCKS_OF_ROW * max_num_rows,
            num_host_blocks=0,
            vocab_size=boundary.VOCAB_SIZE,
            max_model_len=10**6,
            strict=False,
        )
        super().__init__(options, address)
        self._max_num_rows = max_num_rows
        self.full = asyncio.Event()
        self.samples: list[Sample] = []
        self.num_rows = 0

    async def ExecuteModel(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        """Answers every step with a token for each of its sequences."""
        self.state = status_pb2.WORKER_STATE_RUNNING
        answers: asyncio.Queue[worker_pb2.ExecuteModelResponse] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, answers))
        try:
            while True:
                yield await answers.get()
        finally:
            reader.cancel()

    async def _read(self, steps: Any, answers: asyncio.Queue[worker_pb2.ExecuteModelResponse]) -> None:
        loop = asyncio.get_running_loop()
        free_at = loop.time()
        # When the answers were sent that the steps to come wait for.
        sent_at = [free_at] * NUM_IN_FLIGHT

        def answer(step: worker_pb2.ExecuteModelRequest, end: float, added: float, round_trip: float) -> None:
            message = worker_pb2.ExecuteModelResponse(epoch=step.epoch, step_id=step.step_id)
            message.sequence_ids.extend(step.sequence_ids)
            message.token_ids.extend(range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + len(step.sequence_ids)))
            message.times.forward.nanos = int(STEP_SECONDS * 1e9)
            answers.put_nowait(message)
            sent_at.append(loop.time())
            self.samples.append(Sample(added, round_trip, sent_at[-1] - end))
            self.num_rows += len(step.sequence_ids)

        async for step in steps:
            now = loop.time()
            begin = max(now, free_at)
            added, free_at = begin - free_at, begin + STEP_SECONDS
            loop.call_at(free_at, answer, step, free_at, added, now - sent_at.pop(0))
            if len(step.sequence_ids) == self._max_num_rows:
                self.full.set()


class Gateway:
    """Attaches to the scheduler and counts the messages that it is sent."""

    def __init__(self, address: str, name: str) -> None:
        self._channel = internal_channel(address)
        self._name = name
        self.num_messages = 0

    async def __aenter__(self) -> Gateway:
        self._call: Any = scheduler_pb2_grpc.SchedulerServiceStub(self._channel).Attach(wait_for_ready=True)
        await self._call.write(scheduler_pb2.AttachRequest(hello=scheduler_pb2.Hello(gateway_id=self._name)))
        while not (await boundary.next_message(self._call)).readiness.ready:
            pass
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader
        self._call.cancel()
        await self._channel.close(None)

    async def add(self, numbers: range) -> None:
        """Adds requests that outlive the measurement."""
        requests = [boundary.make_request(number) for number in numbers]
        await self._call.write(scheduler_pb2.AttachRequest(add=requests))

    async def _read(self) -> None:
        while True:
            await boundary.next_message(self._call)
            self.num_messages += 1


@contextmanager
def scheduler_process(address: str, workers: list[str], num_rows: int, cores: set[int]) -> Iterator[int]:
    """Runs the scheduler on cores that are its own, and yields the process's id."""
    command = [
        sys.executable, "-m", "scheduler_service", "--scheduler-address", address,
        "--worker-address", ",".join(workers), "--model", "fake", "--max-num-seqs", str(num_rows),
        "--max-num-batched-tokens", str(num_rows * len(boundary.PROMPT)), "--max-waiting-requests", "0",
        "--log-level", "warning",
    ]  # fmt: skip
    with pinned(cores):
        process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


async def measure(folder: Path, size: Size, seconds: float, cores: set[int]) -> dict[str, Any]:
    """Measures a fleet of one size, whose scheduler has these cores."""
    address = f"unix:{folder}/scheduler"
    workers = [TimedWorker(f"unix:{folder}/worker-{number}", size.num_rows) for number in range(size.num_replicas)]
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        process = scheduler_process(address, [worker.address for worker in workers], size.num_rows, cores)
        pid = stack.enter_context(process)
        async with asyncio.timeout(START_SECONDS):
            gateways = [Gateway(address, f"gateway-{number}") for number in range(size.num_gateways)]
            for number, gateway in enumerate(gateways):
                await stack.enter_async_context(gateway)
                await gateway.add(range(number, size.num_rows * size.num_replicas, size.num_gateways))
            for worker in workers:
                await worker.full.wait()
        await asyncio.sleep(WARM_UP_SECONDS)
        return {**size._asdict(), **await observe(pid, workers, gateways, seconds)}


async def observe(pid: int, workers: list[TimedWorker], gateways: list[Gateway], seconds: float) -> dict[str, Any]:
    """Watches a fleet at work."""
    for worker in workers:
        worker.samples, worker.num_rows = [], 0
    begin, cpu, own_cpu = time.perf_counter(), cpu_seconds(pid), time.process_time()
    num_messages = sum(gateway.num_messages for gateway in gateways)
    await asyncio.sleep(seconds)
    samples = [sample for worker in workers for sample in worker.samples]
    seconds, cpu, own_cpu = time.perf_counter() - begin, cpu_seconds(pid) - cpu, time.process_time() - own_cpu
    num_messages = sum(gateway.num_messages for gateway in gateways) - num_messages
    added, round_trips, late = ([1e3 * value for value in column] for column in zip(*samples, strict=True))
    return {
        "steps_per_second": len(samples) / seconds,
        "share_of_ideal": len(samples) / seconds * STEP_SECONDS / len(workers),
        "rows_per_step": sum(worker.num_rows for worker in workers) / len(samples),
        "messages_per_step": num_messages / len(samples),
        "cpu_share": cpu / seconds,
        "cpu_us_per_step": 1e6 * cpu / len(samples),
        "added_ms": quantiles(added),
        "round_trip_ms": quantiles(round_trips),
        "late_ms": quantiles(late),
        "fakes_cpu_share": own_cpu / seconds,
        "memory_mib": memory_bytes(pid) >> 20,
    }


def measure_all(sizes: Iterable[Size], seconds: float) -> Iterator[dict[str, Any]]:
    """Measures one size after another."""
    own, others = split_cores()
    with (
        tempfile.TemporaryDirectory(prefix="fleet-") as folder,
        pinned(others),
        asyncio.Runner(loop_factory=make_loop) as runner,
    ):
        for size in sizes:
            yield runner.run(measure(Path(folder), size, seconds, own))


def make_loop() -> asyncio.AbstractEventLoop:
    """Makes a loop whose timers are exact; on epoll they are those of milliseconds."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def make_line(result: dict[str, Any]) -> str:
    """Formats a result as a row of a table."""
    cells = (
        f"{result['steps_per_second']:.0f} ({result['share_of_ideal']:.1%})",
        f"{result['cpu_share']:.0%}, {result['cpu_us_per_step']:.0f}",
        *(f"{result[name]['median']:.2f} / {result[name]['p99']:.2f}" for name in ("added_ms", "round_trip_ms")),
        f"{result['fakes_cpu_share']:.0%}, {result['late_ms']['p99']:.2f}",
    )
    counts = f"{result['num_replicas']:>8} {result['num_gateways']:>8} {result['num_rows']:>5}  "
    return counts + "".join(f"{cell:<17}" for cell in cells)


def main() -> None:
    """Measures, prints, and writes if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS)
    parser.add_argument("--gateways", type=int, nargs="+", default=[1])
    parser.add_argument("--rows", type=int, nargs="+", default=[64], help="sequences of a step")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/fleet.json")
    options = parser.parse_args()
    sys.setswitchinterval(1e-4)
    # What this process stands still for would be counted against the measured one.
    gc.disable()
    titles = ("steps/s (ideal)", "CPU, µs a step", "added, ms", "round trip, ms", "fakes: CPU, late")
    print("replicas gateways  rows  " + "".join(f"{title:<17}" for title in titles))
    results: list[dict[str, Any]] = []
    sizes = (Size(*each) for each in product(options.replicas, options.gateways, options.rows))
    for result in measure_all(sizes, options.seconds):
        print(make_line(result), flush=True)
        results.append(result)
    if options.write:
        record.append("fleet", round_figures(results))


if __name__ == "__main__":
    main()
