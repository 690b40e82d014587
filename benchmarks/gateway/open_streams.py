"""What a gateway holds: very many open streams, what each costs it in memory and what their tokens cost it in CPU time.

    python benchmarks/gateway/open_streams.py [--fronts grpc http] [--streams 10000] [--rates 1] [--seconds 6] [--write]

The gateway is the process that is served, on a core of its own. This process is all else, on the other cores: a fake
scheduler, whose messages have 64 tokens for as many streams, each in its turn, and the clients. Over gRPC these share
connections; over HTTP, where they read server-sent events, each stream has its own. Streams are opened 500 at a time;
at first no token comes (`idle`), then a fixed number a second of each (`rates`). Memory is what is resident; `delay_ms`
is how long a token was on its way on average, from how many were.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from blockyard.service import grpc_environment

grpc_environment.prepare()

import grpc.aio

from benchmarks.gateway.rate import free_port, wait_until_served
from benchmarks.kit import record
from benchmarks.kit.cores import pinned, split_cores
from benchmarks.kit.figures import round_figures
from benchmarks.kit.processes import cpu_seconds, memory_bytes
from blockyard.errors import BlockyardError, from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.load.http_stream import post_events
from blockyard.model_files import DEMO_FOLDER, model_digest
from blockyard.service.process import raise_file_limit
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

# "x" in the demo model: tokens are counted by their text, however many come at once.
TOKEN_ID = 92
PROMPT = "Once upon a time"
ENDLESS = 1_000_000
NUM_AT_ONCE = 500
NUM_ROWS = 64
OPEN_SECONDS = 120.0
WARM_UP_SECONDS = 2.0
SAMPLE_SECONDS = 0.05


class Front(Protocol):
    """An API of the gateway's."""

    def read(self, number: int) -> AsyncGenerator[str]:
        """Yields the text of a stream, as it comes. Raises BlockyardError."""
        ...


class GrpcFront:
    """InferenceService. The streams are spread over connections."""

    def __init__(self, port: int, num_connections: int) -> None:
        # Channels share connections unless an option forbids it.
        own = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", own) for _ in range(num_connections)]
        self._stubs: list[Any] = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]

    async def read(self, number: int) -> AsyncGenerator[str]:
        """Yields the text of a stream, as it comes. Raises BlockyardError."""
        spec = inference_pb2.GenerationSpec(text=PROMPT, stop={"max_tokens": ENDLESS, "ignore_eos": True})
        request = inference_pb2.StreamGenerateRequest(spec=spec)
        try:
            async for message in self._stubs[number % len(self._stubs)].StreamGenerate(request):
                if message.event.HasField("delta"):
                    yield message.event.delta.text
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


class HttpFront:
    """Completions of the OpenAI API, as server-sent events."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"

    async def read(self, number: int) -> AsyncGenerator[str]:
        """Yields the text of a stream, as it comes. Raises BlockyardError."""
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
        async with aclosing(post_events(self._url, body)) as events:
            async for event in events:
                yield event["choices"][0]["text"]


class Streams:
    """Streams that are read until they are closed.

    Attributes:
        num_given, num_tokens: that the scheduler gave, and that the clients have read.
        ends: how many streams ended how.
    """

    def __init__(self, front: Front, scheduler: FakeScheduler) -> None:
        self.num_given = self.num_tokens = 0
        self.ends = Counter[str]()
        self._front = front
        self._scheduler = scheduler
        scheduler.script = self._give
        self._tasks: list[asyncio.Task[None]] = []

    def _give(self, *_: object) -> int:
        self.num_given += 1
        return TOKEN_ID

    async def open(self, count: int) -> None:
        """Opens streams; returns when the scheduler has each of them, or it was refused."""
        while len(self._tasks) < count:
            for number in range(len(self._tasks), min(len(self._tasks) + NUM_AT_ONCE, count)):
                self._tasks.append(asyncio.create_task(self._read(number)))
            await until(self._have_begun, OPEN_SECONDS)

    def _have_begun(self) -> bool:
        return len(self._scheduler.added) + self.ends.total() >= len(self._tasks)

    async def close(self) -> None:
        """Ends all of them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _read(self, number: int) -> None:
        try:
            async for text in self._front.read(number):
                self.num_tokens += len(text)
        except BlockyardError as error:
            self.ends[f"{error.reason}: {error.message}"] += 1


@contextmanager
def gateway_process(scheduler: str, http_port: int, grpc_port: int, flags: list[str], cores: set[int]) -> Iterator[int]:
    """Runs the gateway on cores that are its own, and yields the process's id."""
    command = [
        sys.executable, "-m", "gateway", "--scheduler-address", scheduler, "--http-port", str(http_port),
        "--grpc-port", str(grpc_port), "--admin-port", "0", "--drain-seconds", "0", "--log-level", "warning", *flags,
    ]  # fmt: skip
    with pinned(cores):
        process = subprocess.Popen(command, cwd=ROOT)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


async def give_tokens(scheduler: FakeScheduler, interval_seconds: float) -> None:
    """Has the scheduler take a step at each interval."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        await scheduler.step()
        due = max(due + interval_seconds, loop.time())
        await asyncio.sleep(due - loop.time())


async def stream(streams: Streams, scheduler: FakeScheduler, pid: int, rate: float, seconds: float) -> dict[str, Any]:
    """Measures streams that get so many tokens a second each."""
    num_streams = len(scheduler.live)
    scheduler.rows_per_step = min(NUM_ROWS, num_streams)
    giving = asyncio.create_task(give_tokens(scheduler, scheduler.rows_per_step / (rate * num_streams)))
    await asyncio.sleep(WARM_UP_SECONDS)
    begin, cpu, own_cpu, num_tokens = time.perf_counter(), cpu_seconds(pid), time.process_time(), streams.num_tokens
    on_their_way: list[int] = []
    # A busy machine may need longer for a first token.
    while time.perf_counter() < begin + seconds or streams.num_tokens == num_tokens:
        await asyncio.sleep(SAMPLE_SECONDS)
        on_their_way.append(streams.num_given - streams.num_tokens)
    seconds, cpu, own_cpu = time.perf_counter() - begin, cpu_seconds(pid) - cpu, time.process_time() - own_cpu
    num_tokens = streams.num_tokens - num_tokens
    giving.cancel()
    with suppress(asyncio.CancelledError):
        await giving
    return {
        "rate": rate,
        "tokens_per_second": num_tokens / seconds,
        "cpu_share": cpu / seconds,
        "cpu_us_per_token": 1e6 * cpu / num_tokens,
        # Little's law.
        "delay_ms": 1e3 * sum(on_their_way) / len(on_their_way) * seconds / num_tokens,
        "memory_mib": memory_bytes(pid) / 2**20,
        "clients_cpu_share": own_cpu / seconds,
    }


async def measure(options: argparse.Namespace, front: str, cores: set[int]) -> dict[str, Any]:
    """Measures the streams of one front of a gateway that has these cores."""
    http_port, grpc_port = free_port(), free_port()
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="streams-"))
        scheduler = FakeScheduler(model_digest=model_digest(DEMO_FOLDER), max_model_len=ENDLESS + 64, paused=True)
        scheduler.address = f"unix:{folder}/scheduler"
        await stack.enter_async_context(scheduler)
        flags = [f"--max-connections={options.max_connections}", f"--max-requests={options.max_requests}"]
        gateway = gateway_process(scheduler.address, http_port, grpc_port, flags, cores)
        pid = stack.enter_context(gateway)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            await wait_until_served(inference_pb2_grpc.InferenceServiceStub(channel))
        streams = Streams(
            GrpcFront(grpc_port, options.connections) if front == "grpc" else HttpFront(http_port), scheduler
        )
        stack.push_async_callback(streams.close)
        memory, begin, cpu = memory_bytes(pid), time.perf_counter(), cpu_seconds(pid)
        await streams.open(options.streams)
        result: dict[str, Any] = {
            "front": front,
            "num_streams": len(scheduler.live),
            "ends": dict(streams.ends),
            "open_seconds": time.perf_counter() - begin,
            "open_cpu_us_per_stream": 1e6 * (cpu_seconds(pid) - cpu) / options.streams,
            "memory_mib": memory / 2**20,
            "idle_kib_per_stream": (memory_bytes(pid) - memory) / len(scheduler.live) / 2**10,
        }
        # What came with the last of them is done by then.
        await asyncio.sleep(WARM_UP_SECONDS)
        cpu, begin = cpu_seconds(pid), time.perf_counter()
        await asyncio.sleep(WARM_UP_SECONDS)
        result["idle_cpu_share"] = (cpu_seconds(pid) - cpu) / (time.perf_counter() - begin)
        result["rates"] = [await stream(streams, scheduler, pid, rate, options.seconds) for rate in options.rates]
        streaming = result["rates"][-1]["memory_mib"] * 2**20 - memory
        result["streaming_kib_per_stream"] = streaming / len(scheduler.live) / 2**10
        return result


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures one front after the other."""
    raise_file_limit()
    own, others = split_cores()
    results: list[dict[str, Any]] = []
    with pinned(others):
        for front in options.fronts:
            results.append(asyncio.run(measure(options, front, own)))
            print_result(results[-1])
    return results


def print_result(result: dict[str, Any]) -> None:
    """Prints what one front's streams cost."""
    print(
        f"{result['num_streams']} streams over {result['front']}, opened in {result['open_seconds']:.1f} s"
        f" with {result['open_cpu_us_per_stream']:.0f} µs of CPU each; {result['memory_mib']:.0f} MiB before,"
        f" {result['idle_kib_per_stream']:.1f} KiB each idle, {result['streaming_kib_per_stream']:.1f} KiB streaming;"
        f" idle {result['idle_cpu_share']:.1%} of a core; ended: {result['ends'] or 'none'}"
    )
    for each in result["rates"]:
        print(
            f"  {each['rate']:g} tokens/s each: {each['tokens_per_second']:.0f} tokens/s, {each['cpu_share']:.0%} of a"
            f" core, {each['cpu_us_per_token']:.0f} µs a token, {each['delay_ms']:.0f} ms on their way;"
            f" clients and scheduler {each['clients_cpu_share']:.0%}",
            flush=True,
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fronts", choices=("grpc", "http"), nargs="+", default=["grpc", "http"])
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=100, help="that the streams over gRPC are spread over")
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="tokens a second of each stream")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each rate")
    parser.add_argument("--max-connections", type=int, default=20_000, help="the gateway's limit; its default is 4,096")
    parser.add_argument("--max-requests", type=int, default=16_384, help="the gateway's limit")
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/open_streams.json")
    return parser.parse_args(arguments)


def main() -> None:
    """Measures, prints, and writes if asked."""
    options = parse()
    sys.setswitchinterval(1e-4)
    # What this process stands still for would be counted against the measured one.
    gc.disable()
    results = measure_all(options)
    if options.write:
        record.append("open_streams", round_figures(results))


if __name__ == "__main__":
    main()
