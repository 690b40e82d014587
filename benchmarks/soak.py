"""The whole system under a steady load for some minutes: memory stays flat, and nothing is left behind.

    python benchmarks/soak.py [--seconds 600] [--share 0.8] [--write]

Gateway, scheduler and worker as processes on the demo model, and this process as their clients. First the capacity is
measured, with as many clients as keep it busy; then requests arrive at a share of it, of a mix: streams, whole answers,
chats, streams that their reader leaves, streams whose reader goes and comes again, prompts that are only tokenized.
Resident memory, file descriptors and threads of each process are sampled throughout, and all again once nothing runs:
targets are a growth of less than 1 % a minute over the second half, and as many file descriptors, threads and tasks
as before the load.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import grpc.aio
import psutil

from benchmarks.kit import record
from benchmarks.kit.figures import round_figures
from blockyard import AsyncClient, Message
from blockyard.contract.events import Delta
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.kit.processes.scrape import Scrape
from tests.kit.processes.system import System

MODEL = ROOT / "models" / "demo"
NUM_CLIENTS = 24
CAPACITY_SECONDS = 15.0
SAMPLE_SECONDS = 2.0
QUIET_SECONDS = 30.0
MAX_TOKENS = (16, 96)
PROMPTS = ("def read_lines(path):\n", "Once upon a time", "import os\n\n\nclass Store:\n", "The first of them was")
# What a share of the requests is; the rest are streams that are read to their end.
MIX = {"generate": 0.2, "chat": 0.15, "leave": 0.1, "come_again": 0.1, "tokenize": 0.1}
SERVICES = ("gateway", "scheduler", "worker")


@dataclass(slots=True)
class Samples:
    """Of one process: when, since the load's begin, and what it held. The seconds grow."""

    process: psutil.Process
    seconds: list[float] = field(default_factory=list[float])
    resident: list[int] = field(default_factory=list[int])
    descriptors: list[int] = field(default_factory=list[int])
    threads: list[int] = field(default_factory=list[int])

    def take(self, now: float) -> None:
        """Looks at the process."""
        self.seconds.append(now)
        self.resident.append(self.process.memory_info().rss)
        self.descriptors.append(self.process.num_fds())
        self.threads.append(self.process.num_threads())

    def growth_of_a_minute(self) -> float:
        """Resident bytes that the second half gained a minute, by their regression line, as a share."""
        first = len(self.seconds) // 2
        slope = statistics.linear_regression(self.seconds[first:], self.resident[first:]).slope
        return 60 * slope / self.resident[first]


class Users:
    """Send requests, each in its own way, and read the answers."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._draw = random.Random(0)
        self.num_done: Counter[str] = Counter()

    def choose(self) -> str:
        """Draws what a request does."""
        return self._draw.choices([*MIX, "stream"], [*MIX.values(), 1 - sum(MIX.values())])[0]

    async def send(self, kind: str) -> None:
        """Sends one request of a kind and does what its user does."""
        await getattr(self, kind)(self._draw.choice(PROMPTS), self._draw.randint(*MAX_TOKENS))
        self.num_done[kind] += 1

    async def stream(self, prompt: str, max_tokens: int) -> None:
        """Reads a stream to its end."""
        async with self._client.stream(prompt, max_tokens=max_tokens, ignore_eos=True) as stream:
            answer = await stream.result()
        assert answer.usage.num_completion_tokens == max_tokens

    async def generate(self, prompt: str, max_tokens: int) -> None:
        """Waits for a whole answer, of two sequences."""
        answer = await self._client.generate(prompt, n=2, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
        assert len(answer.choices) == 2

    async def chat(self, prompt: str, max_tokens: int) -> None:
        """Chats."""
        messages = [Message("user", prompt)]
        async with self._client.stream_chat(messages, max_tokens=max_tokens) as stream:
            await stream.result()

    async def leave(self, prompt: str, max_tokens: int) -> None:
        """Leaves after the first tokens, which cancels the request."""
        async with self._client.stream(prompt, max_tokens=max_tokens, ignore_eos=True) as stream:
            async for event in stream:
                if isinstance(event, Delta):
                    return

    async def come_again(self, prompt: str, max_tokens: int) -> None:
        """Loses its connection after the first tokens, and reads the answer again over another."""
        spec = inference_pb2.GenerationSpec(text=prompt, on_disconnect=inference_pb2.ON_DISCONNECT_KEEP)
        spec.stop.max_tokens, spec.stop.ignore_eos = max_tokens, True
        request_id = ""
        async with grpc.aio.insecure_channel(self._client.target) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            async for response in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec)):
                request_id = request_id or response.event.accepted.request_id
                if response.event.HasField("delta"):
                    break
        async with self._client.resume(request_id) as stream:
            answer = await stream.result()
        assert answer.usage.num_completion_tokens == max_tokens

    async def tokenize(self, prompt: str, max_tokens: int) -> None:
        """Asks for token ids and back."""
        token_ids = await self._client.tokenize(prompt)
        assert await self._client.detokenize(token_ids)

    async def keep_busy(self, seconds: float) -> float:
        """As many users as keep the system busy. Gives the requests completed in a second."""
        end = time.monotonic() + seconds

        async def repeat() -> None:
            while time.monotonic() < end:
                await self.send(self.choose())

        before = self.num_done.total()
        begin = time.monotonic()
        await asyncio.gather(*(repeat() for _ in range(NUM_CLIENTS)))
        return (self.num_done.total() - before) / (time.monotonic() - begin)

    async def arrive(self, rate: float, seconds: float) -> None:
        """Poisson arrivals of so many a second, until all were answered."""
        async with asyncio.TaskGroup() as group:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                group.create_task(self.send(self.choose()))
                await asyncio.sleep(self._draw.expovariate(rate))


def scrape(system: System) -> dict[str, Scrape]:
    """What each service reports of itself."""
    worker = system.services["worker"].wait_for_log(r"listening.* metrics_port=(\d+)").group(1)
    addresses = {
        "gateway": system.http_url.removeprefix("http://"),
        "scheduler": system.services["scheduler"].wait_for_log(r"listening.* metrics_address=(\S+)").group(1),
        "worker": f"127.0.0.1:{worker}",
    }
    return {name: Scrape.get(address) for name, address in addresses.items()}


def held(system: System, samples: dict[str, Samples]) -> dict[str, dict[str, float]]:
    """What each process holds that must not pile up."""
    found: dict[str, dict[str, float]] = {}
    scraped = scrape(system)
    for name, of_process in samples.items():
        process = of_process.process
        found[name] = {"descriptors": process.num_fds(), "threads": process.num_threads()}
        if name in scraped:
            found[name]["tasks"] = scraped[name].sum("blockyard_tasks")
    found["gateway"]["live_requests"] = scraped["gateway"].sum("blockyard_live_requests")
    found["scheduler"]["sequences"] = scraped["scheduler"].sum("blockyard_sequences")
    return found


async def until_quiet(system: System, samples: dict[str, Samples], before: dict[str, Any]) -> dict[str, Any]:
    """What is held once it is no more than before, or after a while."""
    end = time.monotonic() + QUIET_SECONDS
    while True:
        now = await asyncio.to_thread(held, system, samples)
        if time.monotonic() > end or not left_behind(before, now):
            return now
        await asyncio.sleep(1.0)


def left_behind(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> dict[str, float]:
    """What is more than it was."""
    return {
        f"{name} {what}": count - before[name][what]
        for name, counts in after.items()
        for what, count in counts.items()
        if count > before[name][what]
    }


async def watch(samples: dict[str, Samples], begin: float) -> None:
    """Samples every process, for ever."""
    while True:
        for of_process in samples.values():
            of_process.take(time.monotonic() - begin)
        await asyncio.sleep(SAMPLE_SECONDS)


async def soak(system: System, seconds: float, share: float) -> dict[str, Any]:
    """The capacity, then the load, then what is left."""
    async with AsyncClient(system.grpc_target) as client:
        users = Users(client)
        capacity = await users.keep_busy(CAPACITY_SECONDS)
        samples = {name: Samples(psutil.Process(system.services[name].process.pid)) for name in SERVICES}
        samples["client"] = Samples(psutil.Process())
        await asyncio.sleep(SAMPLE_SECONDS)
        before = await asyncio.to_thread(held, system, samples)
        users.num_done.clear()
        begin = time.monotonic()
        watching = asyncio.create_task(watch(samples, begin))
        await users.arrive(share * capacity, seconds)
        took = time.monotonic() - begin
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        after = await until_quiet(system, samples, before)
    return {
        "capacity_requests_per_second": capacity,
        "load_requests_per_second": users.num_done.total() / took,
        "requests": dict(users.num_done),
        "seconds": took,
        "memory": {
            name: {
                "first_megabytes": of_process.resident[0] / 1e6,
                "last_megabytes": of_process.resident[-1] / 1e6,
                "growth_a_minute": of_process.growth_of_a_minute(),
            }
            for name, of_process in samples.items()
        },
        "most_descriptors": {name: max(of_process.descriptors) for name, of_process in samples.items()},
        "left_behind": left_behind(before, after),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--share", type=float, default=0.8, help="of the capacity")
    parser.add_argument("--write", action="store_true", help="add the run to benchmarks/results/soak.json")
    options = parser.parse_args()
    scheduler = ["--num-device-blocks", "400", "--num-host-blocks", "50", "--scheduler-metrics-port", "0"]
    worker = ["--worker-metrics-port", "0"]
    with tempfile.TemporaryDirectory(prefix="soak") as folder, System(MODEL, Path(folder), scheduler, worker) as system:
        results = round_figures(asyncio.run(soak(system, options.seconds, options.share)))
    for name, value in results.items():
        print(f"{name:30} {value}")
    if options.write:
        record.append("soak", results)


if __name__ == "__main__":
    main()
