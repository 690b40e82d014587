"""What a gateway does with very many streams at once: how each of them ends, what they cost, and whether it keeps its
scheduler.

Processes: a fake scheduler as the source, `python -m gateway`, clients that read every stream, and some that only
burn CPU. The source waits with its first token until every stream is queued or refused.

    python benchmarks/gateway/burst.py --streams 10000 --connections 100
    python benchmarks/gateway/burst.py --streams 10000 --max-requests 4000      # what is too much is refused
    python benchmarks/gateway/burst.py --streams 1000 --seconds 120 --busy 2    # endless ones, beside other work
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc.aio

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.gateway import rate
from benchmarks.kit import record
from benchmarks.kit.processes import cpu_seconds, peak_memory_bytes
from blockyard.errors import from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.model_files import DEMO_FOLDER, model_digest
from tests.kit.fakes.fake_scheduler import FakeScheduler

# Tokens of a stream that ends only with the run.
ENDLESS = 1_000_000
LOSSES = "blockyard_scheduler_losses_total"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=1, help="that the streams are spread over")
    parser.add_argument("--clients", type=int, default=1, help="processes that read")
    parser.add_argument("--tokens", type=int, default=20, help="of each stream")
    parser.add_argument("--seconds", type=float, default=0, help="let every stream run so long; 0: to its last token")
    parser.add_argument("--busy", type=int, default=0, help="processes that burn CPU beside it")
    parser.add_argument("--max-requests", type=int, default=16_384, help="the gateway's limit")
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/burst.json")
    parser.add_argument("--role", choices=("main", "source", "client"), default="main", help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.seconds:
        options.tokens = ENDLESS
    return options


async def run_source(options: argparse.Namespace) -> None:
    """Gives no token until it gets SIGUSR1, and then as many as are taken, until it is killed."""
    scheduler = FakeScheduler(model_digest=model_digest(DEMO_FOLDER), max_model_len=options.tokens + 64, paused=True)
    scheduler.address = options.address
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, scheduler.go_on)
    async with scheduler:
        await asyncio.Event().wait()


class Readers:
    """Streams that are started as fast as one process can, and how they ended.

    Attributes:
        ends: how many ended how.
        num_tokens: that came.
        num_retry_infos: errors that say when to try again.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.ends = Counter[str]()
        self.num_tokens = 0
        self.num_retry_infos = 0
        self._options = options
        self._num_begun = 0
        self._have_begun = asyncio.Event()

    def summary(self) -> dict[str, Any]:
        return {"ends": dict(self.ends), "num_tokens": self.num_tokens, "num_retry_infos": self.num_retry_infos}

    async def run(self) -> None:
        """Says `queued` when each stream is queued or refused; reads each to its end, or until time is up."""
        options = self._options
        # Channels share connections unless an option forbids it.
        own = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(options.address, own) for _ in range(options.connections)]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        await asyncio.gather(*(rate.wait_until_served(stub) for stub in stubs))
        streams = asyncio.gather(*(self._read(stubs[number % len(stubs)]) for number in range(options.streams)))
        await self._have_begun.wait()
        print("queued", flush=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(options.seconds or None):
                await streams
        await asyncio.gather(*(channel.close() for channel in channels))

    def _begun(self) -> None:
        self._num_begun += 1
        if self._num_begun == self._options.streams:
            self._have_begun.set()

    async def _read(self, stub: Any) -> None:
        spec = inference_pb2.GenerationSpec(
            text="Once upon a time", stop={"max_tokens": self._options.tokens, "ignore_eos": True}
        )
        messages = aiter(stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec)))
        try:
            await anext(messages)
            self._begun()
            self.ends[await self._read_rest(messages)] += 1
        except asyncio.CancelledError:
            self.ends["runs"] += 1
            raise
        except grpc.aio.AioRpcError as status:
            error = from_rpc_error(status)
            self.ends[f"{status.code().name} {error.reason}"] += 1
            self.num_retry_infos += error.retry_after_seconds is not None
            self._begun()

    async def _read_rest(self, messages: Any) -> str:
        num_tokens, is_whole = 0, False
        async for message in messages:
            if message.event.HasField("delta"):
                self.num_tokens += message.event.delta.num_tokens - num_tokens
                num_tokens = message.event.delta.num_tokens
            is_whole = is_whole or message.event.HasField("finished")
        return "whole" if is_whole and num_tokens == self._options.tokens else "SHORT"


async def run_client(options: argparse.Namespace) -> None:
    readers = Readers(options)
    await readers.run()
    print(json.dumps(readers.summary()))


def num_losses(http_port: int) -> int:
    """How often the gateway has lost its scheduler."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=60) as response:
        lines: list[str] = response.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(LOSSES))


def _flags(options: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


class System:
    """The processes of a run, ended with it: `with System(options) as system`."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._stack = ExitStack()
        self.http_port = rate.free_port()
        self.grpc_address = f"127.0.0.1:{rate.free_port()}"

    def __enter__(self) -> System:
        options = self._options
        link = f"unix:{self._stack.enter_context(tempfile.TemporaryDirectory())}/scheduler"
        source = ("--role", "source", "--address", link)
        self._source = self._spawn(__file__, "--tokens", str(options.tokens), *source)
        self.gateway = self._spawn(
            "-m", "gateway", "--scheduler-address", link, "--grpc-port", self.grpc_address.rpartition(":")[2],
            "--http-port", str(self.http_port), "--admin-port", "0", "--drain-seconds", "0", "--log-level", "warning",
            "--max-requests", str(options.max_requests),
        )  # fmt: skip
        for _ in range(options.busy):
            self._spawn("-c", "while True: pass")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _spawn(self, *arguments: str, **streams: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, *arguments], cwd=rate.ROOT, **streams)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def run_clients(self) -> dict[str, Any]:
        """Has the streams read, and adds up what came of them."""
        options = self._options
        flags = {
            "streams": options.streams // options.clients,
            "connections": max(1, options.connections // options.clients),
            "tokens": options.tokens,
            "seconds": options.seconds,
        }
        begin, cpu = time.perf_counter(), cpu_seconds(self.gateway.pid)
        role = ("--role", "client", "--address", self.grpc_address)
        clients = [self._spawn(__file__, *_flags(flags), *role, stdout=subprocess.PIPE) for _ in range(options.clients)]
        for client in clients:
            assert client.stdout is not None and client.stdout.readline() == b"queued\n"
        queue_seconds = time.perf_counter() - begin
        self._source.send_signal(signal.SIGUSR1)
        outcomes = [json.loads(client.communicate()[0]) for client in clients]
        seconds = time.perf_counter() - begin
        num_tokens = sum(each["num_tokens"] for each in outcomes)
        return {
            "ends": dict(sum((Counter(each["ends"]) for each in outcomes), Counter[str]())),
            "num_retry_infos": sum(each["num_retry_infos"] for each in outcomes),
            "num_tokens": num_tokens,
            "queue_seconds": round(queue_seconds, 1),
            "seconds": round(seconds, 1),
            "gateway_cpu_seconds": round(cpu_seconds(self.gateway.pid) - cpu, 1),
            "gateway_peak_memory_mib": peak_memory_bytes(self.gateway.pid) >> 20,
            "num_scheduler_losses": num_losses(self.http_port),
        }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs it once."""
    names = ("streams", "connections", "clients", "tokens", "seconds", "busy", "max_requests")
    with System(options) as system:
        result = system.run_clients()
    return {"settings": {name: getattr(options, name) for name in names}, **result}


def main() -> None:
    options = parse()
    if options.role == "source":
        asyncio.run(run_source(options))
    elif options.role == "client":
        asyncio.run(run_client(options))
    else:
        summary = measure(options)
        print(json.dumps(summary))
        if options.write:
            record.append("burst", summary)


if __name__ == "__main__":
    main()
