"""Five times more requests than can be served: the queue stays bounded, and a quiet tenant hardly waits.

    python benchmarks/overload.py [--seconds 60] [--factor 5] [--write]

A scheduler process, a fake worker process with steps of a fixed time, and this process as their gateway. First the
capacity is measured, with as many requests at a time as keep every row busy, then arrivals come at so many times that
rate. A request that is refused comes again after the delay that the refusal names, until the arrivals have stopped and
everybody was served. One tenant floods; beside it another sends one request at a time, and its time to first token is
reported as steps more than on an idle system.
Targets: 95 % of the capacity, every rejection with a time, four steps.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.boundary import start
from benchmarks.kit import record
from blockyard.errors import BlockyardError
from tests.kit.fakes.token_client import TokenClient

NUM_ROWS = 32
MAX_WAITING = 64
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 32
STEP_SECONDS = 0.01
POLL_SECONDS = 0.1
QUIET_PERIOD_SECONDS = 0.3


@dataclass
class Counts:
    """What happened. `ended_at`: when each request was complete."""

    num_rejections: int = 0
    num_rejections_without_time: int = 0
    num_returns: int = 0
    num_returns_refused: int = 0
    max_waiting: int = 0
    num_liveness_checks: int = 0
    num_liveness_failures: int = 0
    ended_at: list[float] = field(default_factory=list[float])
    quiet_seconds: list[float] = field(default_factory=list[float])

    def rate(self, begin: float, end: float) -> float:
        """Requests completed in a second of a span."""
        return sum(begin <= at < end for at in self.ended_at) / (end - begin)


class Load:
    """Sends requests through one attached gateway."""

    def __init__(self, client: TokenClient) -> None:
        self.counts = Counts()
        self._client = client
        self._number = 0

    async def serve_one(self, tenant: str) -> float:
        """Sends a request, again after each refusal, until it is answered. Returns the seconds to its first token."""
        self._number += 1
        number, begin, returns = self._number, time.monotonic(), 0
        while True:
            stream = await self._client.add(
                f"{tenant}{number}",
                [number % 97, *[(number >> shift) % 97 for shift in range(PROMPT_TOKENS - 1)]],
                max_tokens=OUTPUT_TOKENS,
                tenant=tenant,
            )
            try:
                await self._client.wait_until(lambda: stream.is_done or stream.token_ids[0], 600)  # noqa: B023
                first = time.monotonic() - begin
                await self._client.result(stream)
            except BlockyardError as error:
                self._note_rejection(error, returns)
                returns += 1
                await asyncio.sleep(error.retry_after_seconds or 1.0)
                continue
            del self._client.streams[stream.request_id]
            self.counts.ended_at.append(time.monotonic())
            return first

    def _note_rejection(self, error: BlockyardError, returns: int) -> None:
        self.counts.num_rejections += 1
        self.counts.num_rejections_without_time += error.retry_after_seconds is None
        self.counts.num_returns += 1
        self.counts.num_returns_refused += returns > 0

    async def keep_busy(self, num_at_a_time: int, seconds: float) -> float:
        """As many at a time as keep every row busy. Returns the requests completed in a second, the ends left out."""
        begin = time.monotonic()

        async def repeat() -> None:
            while time.monotonic() < begin + seconds:
                await self.serve_one("peak")

        await asyncio.gather(*(repeat() for _ in range(num_at_a_time)))
        return self.counts.rate(begin + seconds / 4, begin + seconds)

    async def arrive(self, rate: float, seconds: float) -> float:
        """Arrivals at a fixed rate, then until all were served. Returns the completions in a second meanwhile."""
        begin, tasks = time.monotonic(), list[asyncio.Task[float]]()
        while (now := time.monotonic()) < begin + seconds:
            due = int((now - begin) * rate)
            tasks += [asyncio.create_task(self.serve_one("flood")) for _ in range(due - len(tasks))]
            await asyncio.sleep(0.005)
        goodput = self.counts.rate(begin + seconds / 4, begin + seconds)
        await asyncio.gather(*tasks)
        return goodput

    async def be_quiet(self) -> None:
        """One request at a time, for ever; the seconds to each first token are kept."""
        while True:
            self.counts.quiet_seconds.append(await self.serve_one("quiet"))
            await asyncio.sleep(QUIET_PERIOD_SECONDS)

    async def watch_queue(self) -> None:
        """Keeps the longest queue seen, for ever."""
        while True:
            status = await self._client.status()
            self.counts.max_waiting = max(self.counts.max_waiting, status.num_waiting_requests)
            await asyncio.sleep(POLL_SECONDS)

    async def watch_liveness(self, port: int) -> None:
        """Asks the scheduler's health port, as a kubelet does but more often, for ever."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            while True:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=1.0)
                self.counts.num_liveness_checks += 1
                self.counts.num_liveness_failures += answer.status != health_pb2.HealthCheckResponse.SERVING
                await asyncio.sleep(POLL_SECONDS)


async def measure(address: str, health_port: int, seconds: float, factor: float) -> dict[str, Any]:
    """The capacity, then the overload."""
    while not Path(address.removeprefix("unix:")).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.05)
    async with TokenClient(address) as client:
        await client.wait_until_ready()
        idle = Load(client)
        idle_seconds = [await idle.serve_one("idle") for _ in range(20)]
        peak = await Load(client).keep_busy(3 * NUM_ROWS // 2, min(seconds, 15))
        load = Load(client)
        watching = (load.be_quiet(), load.watch_queue(), load.watch_liveness(health_port))
        beside = [asyncio.create_task(each) for each in watching]
        goodput = await load.arrive(peak * factor, seconds)
        for task in beside:
            task.cancel()
        ends = await asyncio.gather(*beside, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
    return summarize(load.counts, peak, goodput, statistics.median(idle_seconds))


def summarize(counts: Counts, peak: float, goodput: float, idle: float) -> dict[str, Any]:
    """The figures that are kept."""
    quiet = sorted(counts.quiet_seconds)
    p95 = quiet[int(len(quiet) * 0.95)]
    return {
        "peak_requests_per_second": round(peak, 1),
        "goodput_share": round(goodput / peak, 3),
        "max_waiting": counts.max_waiting,
        "liveness_checks": counts.num_liveness_checks,
        "liveness_failures": counts.num_liveness_failures,
        "rejections": counts.num_rejections,
        "rejections_without_time": counts.num_rejections_without_time,
        "returns_refused_share": round(counts.num_returns_refused / max(counts.num_returns, 1), 4),
        "quiet_requests": len(quiet),
        "idle_first_token_ms": round(1e3 * idle, 1),
        "quiet_median_steps_more": round((statistics.median(quiet) - idle) / STEP_SECONDS, 1),
        "quiet_p95_steps_more": round((p95 - idle) / STEP_SECONDS, 1),
        "quiet_max_steps_more": round((quiet[-1] - idle) / STEP_SECONDS, 1),
    }


def run(seconds: float, factor: float) -> dict[str, Any]:
    """Starts the processes and measures."""
    with tempfile.TemporaryDirectory(prefix="by") as name, ExitStack() as stack:
        worker, scheduler = f"unix:{name}/worker", f"unix:{name}/scheduler"
        options = ["--vocab-size", "100", "--step-seconds", str(STEP_SECONDS), "--no-strict"]
        start(stack, Path(name), "tests.kit.fakes.fake_worker", "--worker-address", worker, *options)
        limits = ["--max-num-seqs", str(NUM_ROWS), "--max-waiting-requests", str(MAX_WAITING)]
        addresses = ["--scheduler-address", scheduler, "--worker-address", worker]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        health = ["--scheduler-health-port", str(port)]
        start(stack, Path(name), "scheduler_service", *addresses, *limits, *health, "--model", "fake")
        return asyncio.run(measure(scheduler, port, seconds, factor))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--factor", type=float, default=5.0)
    parser.add_argument("--write", action="store_true", help="add the run to benchmarks/results/overload.json")
    options = parser.parse_args()
    results = run(options.seconds, options.factor)
    for name, value in results.items():
        print(f"{name:28} {value}")
    if options.write:
        record.append("overload", results)


if __name__ == "__main__":
    main()
