"""What texts of megabytes, which no model has room for, cost the others: three numbers of a running system.

    python benchmarks/gateway/long_texts.py [--texts words letters spaces kanji] [--rounds 5] [--write]

The services are those of `blockyard serve` with the demo model. `refused_seconds`: two such texts at once, over each
API, until both are refused. `later_seconds`: how much later a prompt of 4,096 characters is answered with one token
that comes right behind twenty of them, than alone; the median and the most of the rounds. `memory_mib`: by how much the
gateway's memory grew at most meanwhile. The senders are a process of their own, on the same processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from blockyard.service import grpc_environment

grpc_environment.prepare()

import grpc.aio

from benchmarks.kit import record
from benchmarks.kit.figures import round_figures
from benchmarks.kit.processes import memory_bytes, peak_memory_bytes, reset_peak_memory
from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.configuration import SystemConfiguration
from blockyard.errors import Reason, from_rpc_error
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.local.local_system import LocalSystem
from blockyard.local.supervisor import Supervisor
from blockyard.settings import resolve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator

NUM_BYTES = 8_000_000
NUM_CHARACTERS = 4096
NUM_BESIDE = 20
# 4,096 characters of it have fewer tokens than the demo model takes.
SENTENCE = "The function should return something different before the argument is something else entirely. "
TEXTS = {"words": SENTENCE, "letters": "a", "spaces": " ", "lines": "x\n", "kanji": "水"}
PATHS = {
    "completions": ("/v1/completions", lambda text: {"prompt": text, "max_tokens": 1}),
    "chat": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text}]}),
    "tokenize": ("/tokenize", lambda text: {"prompt": text}),
}
GRPC = "grpc"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--apis", nargs="+", choices=(*PATHS, GRPC), default=[*PATHS, GRPC])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/long_texts.json")
    parser.add_argument("--role", choices=("main", "sender"), default="main", help=argparse.SUPPRESS)
    parser.add_argument("--http", default="", help=argparse.SUPPRESS)
    parser.add_argument("--grpc", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def make_text(name: str) -> str:
    """Repeats a sentence until it has 8 MB."""
    sentence = TEXTS[name]
    return sentence * (NUM_BYTES // len(sentence.encode()))


class Sender:
    """The process that sends the texts: for each line `API TEXT COUNT` it answers with what came of them."""

    def __init__(self, http: str, address: str) -> None:
        self._http = http
        self._address = address

    async def run(self) -> None:
        """Serves lines of the standard input until it ends."""
        options = [("grpc.max_send_message_length", PUBLIC_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(self._address, options) for _ in range(NUM_BESIDE)]
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            api, name, count = line.split()
            text = make_text(name)
            if api == GRPC:
                sends = [self._call(channel, text) for channel in self._channels[: int(count)]]
            else:
                path, make_body = PATHS[api]
                body = json.dumps({"model": "demo", **make_body(text)}, ensure_ascii=False).encode()
                sends = [self._post(path, body) for _ in range(int(count))]
            print("sends", flush=True)
            begin = time.perf_counter()
            reasons = await asyncio.gather(*sends)
            print(json.dumps({"seconds": time.perf_counter() - begin, "reasons": Counter(reasons)}), flush=True)

    async def _post(self, path: str, body: bytes) -> str:
        host, _, port = self._http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {path} HTTP/1.1\r\nHost: {self._http}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode())
        writer.write(body)
        answer = await reader.read()
        writer.close()
        return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["reason"]

    async def _call(self, channel: grpc.aio.Channel, text: str) -> str:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            await stub.Generate(inference_pb2.GenerateRequest(spec=inference_pb2.GenerationSpec(text=text)))
        except grpc.aio.AioRpcError as error:
            return str(from_rpc_error(error).reason)
        return "none"


class System:
    """A running system, and the process that sends long texts to it: `async with running() as system`."""

    def __init__(self, local: LocalSystem, supervisor: Supervisor, sender: subprocess.Popen[bytes]) -> None:
        self._sender = sender
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(grpc.aio.insecure_channel(local.endpoints.grpc))
        pid = supervisor.children[-1].pid
        assert pid is not None
        self.gateway_pid: int = pid
        self._num_prompts = 0

    def begin(self, api: str, text: str, count: int) -> None:
        """Has long texts sent; returns when that begins."""
        assert self._sender.stdin is not None and self._sender.stdout is not None
        self._sender.stdin.write(f"{api} {text} {count}\n".encode())
        self._sender.stdin.flush()
        assert self._sender.stdout.readline() == b"sends\n"

    async def end(self) -> float:
        """Waits until all are refused; returns after how many seconds."""
        assert self._sender.stdout is not None
        told = json.loads(await asyncio.to_thread(self._sender.stdout.readline))
        assert set(told["reasons"]) == {Reason.PROMPT_TOO_LONG}, told
        return told["seconds"]

    async def ask(self) -> float:
        """Sends a prompt that nobody sent before; returns after how many seconds its token is there."""
        self._num_prompts += 1
        prompt = f"{self._num_prompts} {SENTENCE * NUM_CHARACTERS}"[:NUM_CHARACTERS]
        spec = inference_pb2.GenerationSpec(text=prompt, stop={"max_tokens": 1, "ignore_eos": True})
        begin = time.perf_counter()
        await self._stub.Generate(inference_pb2.GenerateRequest(spec=spec))
        return time.perf_counter() - begin


@asynccontextmanager
async def running() -> AsyncIterator[System]:
    values: dict[str, Any] = {**dict.fromkeys(("grpc_port", "http_port", "admin_port"), 0), "log_level": "warning"}
    local = LocalSystem(resolve(SystemConfiguration, values))
    supervisor = Supervisor(
        local.make_services(),
        local.is_ready,
        write_line=lambda line: print(line, file=sys.stderr, flush=True),
        environment=local.make_environment(),
    )
    try:
        await supervisor.start()
        with sending(local) as sender:
            system = System(local, supervisor, sender)
            await system.ask()
            yield system
    finally:
        await supervisor.stop()
        await local.close()


@contextmanager
def sending(local: LocalSystem) -> Generator[subprocess.Popen[bytes]]:
    addresses = ("--http", local.endpoints.http, "--grpc", local.endpoints.grpc)
    command = [sys.executable, __file__, "--role", "sender", *addresses]
    sender = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield sender
    finally:
        sender.kill()
        sender.wait()


async def measure_one(system: System, api: str, text: str, rounds: int) -> dict[str, Any]:
    """Measures one kind of text over one API."""
    pid = system.gateway_pid
    alone = statistics.median([await system.ask() for _ in range(rounds)])
    before = memory_bytes(pid)
    reset_peak_memory(pid)
    refused: list[float] = []
    for _ in range(rounds):
        system.begin(api, text, 2)
        refused.append(await system.end())
    later: list[float] = []
    for _ in range(rounds):
        system.begin(api, text, NUM_BESIDE)
        later.append(await system.ask() - alone)
        await system.end()
    return {
        "refused_seconds": {"median": statistics.median(refused), "max": max(refused)},
        "alone_seconds": alone,
        "later_seconds": {"median": statistics.median(later), "max": max(later)},
        "memory_mib": (peak_memory_bytes(pid) - before) / 2**20,
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Runs everything once."""
    results: dict[str, Any] = {}
    async with running() as system:
        for api in options.apis:
            for text in options.texts:
                results.setdefault(api, {})[text] = figures = round_figures(
                    await measure_one(system, api, text, options.rounds)
                )
                print(api, text, figures, flush=True)
    return results


def main() -> None:
    options = parse()
    if options.role == "sender":
        asyncio.run(Sender(options.http, options.grpc).run())
        return
    results = asyncio.run(measure(options))
    if options.write:
        record.append("long_texts", results)


if __name__ == "__main__":
    main()
