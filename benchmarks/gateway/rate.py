"""How many tokens a second one gateway process turns into text and streams, and what each costs it in CPU time.

Three processes: a fake scheduler as the source, `python -m gateway`, and clients that read every stream. The source
gives every sequence a token a step, as fast as it is taken or at a fixed rate. A delivered token counts once, however
deltas merged. CPU time is that of the gateway process, all of its threads, between the first and the last token.

With --chat the streams are chats, in pairs of rounds: answers as text, and the same answers told apart into text,
reasoning and calls of tools, in turns, all at one gateway: two of them differ by more than what is measured. The ratios
are the medians of those of the pairs, parsed to unparsed. With --tools too the chats have a tool, and the answers are
calls of it.

    python benchmarks/gateway/rate.py --streams 128 --tokens 800
    python benchmarks/gateway/rate.py --rate 20000 --stop "never to be seen"
    python benchmarks/gateway/rate.py --chat --tools --tokens 400 --rounds 30
    python benchmarks/gateway/rate.py --chat --begin "<think>" --tokens 400 --rounds 30
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kit import record
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.model_files import DEMO_FOLDER, model_digest
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.fakes.fake_scheduler import FakeScheduler, hashed_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.scheduler.v1 import scheduler_pb2

ROOT = Path(__file__).parents[2]
START_SECONDS = 30.0
ROUND_SECONDS = 600.0
DIALECT = "hermes"
TOOL = "write"
CALL = (
    'I write it.\n<tool_call>\n{"name": "write", "arguments": {"path": "src/main.py", "content": "def add(a, b):\\n'
    '    \\"\\"\\"Adds.\\"\\"\\"\\n    return a + b\\n", "lines": [1, 2, 3]}}\n</tool_call>\n'
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=800, help="of each stream")
    parser.add_argument("--rate", type=float, default=0, help="tokens a second that the source gives; 0: as taken")
    parser.add_argument("--stop", action="append", default=[], help="a stop string of every request")
    parser.add_argument("--chat", action="store_true", help="chats, with answers that are parsed and that are not")
    parser.add_argument("--tools", action="store_true", help="the chats have a tool, which the answers call")
    parser.add_argument("--begin", default="", help="what every answer begins with, such as <think>")
    parser.add_argument("--rounds", type=int, default=3, help="of each kind, with --chat")
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/gateway_rate.json")
    parser.add_argument("--role", choices=("main", "source"), default="main", help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.tools and not options.chat:
        parser.error("--tools goes with --chat")
    return options


async def run_source(options: argparse.Namespace) -> None:
    """Gives tokens until it is killed. Waits with the first step of each round until every stream is queued."""
    tokenizer = load_tokenizer(DEMO_FOLDER)
    begin = tokenizer.encode(options.begin, add_special_tokens=False)
    call = tokenizer.encode(CALL, add_special_tokens=False)

    def script(request: scheduler_pb2.AddRequest, index: int, position: int) -> int:
        if position < len(begin):
            return begin[position]
        return call[position % len(call)] if options.tools else hashed_tokens(request, index, position)

    scheduler = FakeScheduler(
        script=script,
        model_digest=model_digest(DEMO_FOLDER),
        max_model_len=options.tokens + 64,
        step_seconds=options.streams / options.rate if options.rate else 0.0,
        paused=True,
    )
    scheduler.address = options.address
    async with scheduler:
        while True:
            num_added = len(scheduler.added) + options.streams
            await scheduler.wait_until(lambda: len(scheduler.added) == num_added, timeout_seconds=START_SECONDS)  # noqa: B023
            scheduler.go_on()
            await scheduler.wait_until(lambda: not scheduler.num_sequences, timeout_seconds=ROUND_SECONDS)
            scheduler.pause()


def begin_stream(stub: Any, options: argparse.Namespace, *, parses: bool) -> Any:
    """Asks for one stream."""
    stop = {"max_tokens": options.tokens, "ignore_eos": True, "stop_strings": options.stop}
    if not options.chat:
        spec = inference_pb2.GenerationSpec(text="Once upon a time", stop=stop)
        return stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec))
    conversation = inference_pb2.Conversation(
        messages=[{"role": inference_pb2.ROLE_USER, "content": [{"text": "Tell me."}]}],
        tools=[{"name": TOOL}] if options.tools else (),
        parse_answer=parses,
    )
    spec = inference_pb2.GenerationSpec(conversation=conversation, stop=stop)
    return stub.StreamChat(inference_pb2.StreamChatRequest(spec=spec))


async def read_stream(stream: Any, marks: dict[str, float]) -> tuple[int, int, int]:
    """Reads one stream; returns its tokens, its deltas, and whether it has calls of tools."""
    num_tokens = num_deltas = calls_tools = 0
    async for message in stream:
        event = message.event
        if event.HasField("delta"):
            marks.setdefault("first", time.perf_counter())
            num_deltas += 1
        elif event.HasField("finished"):
            num_tokens = event.finished.usage.num_completion_tokens
            calls_tools = int(event.finished.calls_tools)
    return num_tokens, num_deltas, calls_tools


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def measure(
    options: argparse.Namespace, gateway_address: str, process: psutil.Process, kinds: Sequence[bool]
) -> list[dict[str, float]]:
    """Measures a round for each of `kinds`: whether its answers are parsed."""
    async with grpc.aio.insecure_channel(gateway_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await wait_until_served(stub)
        return [await measure_round(options, stub, process, parses=parses) for parses in kinds]


async def measure_round(
    options: argparse.Namespace, stub: Any, process: psutil.Process, *, parses: bool
) -> dict[str, float]:
    before = cpu_seconds(process)
    marks: dict[str, float] = {}
    streams = [begin_stream(stub, options, parses=parses) for _ in range(options.streams)]
    counts = await asyncio.gather(*(read_stream(stream, marks) for stream in streams))
    seconds = time.perf_counter() - marks["first"]
    spent = cpu_seconds(process) - before
    num_tokens, num_deltas, num_calling = (sum(column) for column in zip(*counts, strict=True))
    return {
        "num_tokens": num_tokens,
        "num_streams_with_calls": num_calling,
        "tokens_per_second": round(num_tokens / seconds),
        "tokens_per_delta": round(num_tokens / num_deltas, 2),
        "gateway_cpu_share": round(spent / seconds, 2),
        "gateway_cpu_us_per_token": round(spent / num_tokens * 1e6, 1),
        "tokens_per_gateway_cpu_second": round(num_tokens / spent),
    }


async def wait_until_served(stub: Any) -> None:
    """Waits until the gateway lists its model: it has attached then."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            response = await stub.ListModels(inference_pb2.ListModelsRequest(), wait_for_ready=True)
            if response.models:
                return
            await asyncio.sleep(0.05)


def spawn(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def run(options: argparse.Namespace, kinds: Sequence[bool] = (False,)) -> list[dict[str, float]]:
    """Measures rounds, with a source and a gateway of their own."""
    with tempfile.TemporaryDirectory() as folder:
        link, port = f"unix:{folder}/scheduler", free_port()
        source = spawn(__file__, *sys.argv[1:], "--role", "source", "--address", link)
        gateway = spawn(
            "-m", "gateway", "--scheduler-address", link, "--grpc-port", str(port), "--http-port", "0",
            "--admin-port", "0", "--drain-seconds", "0", "--log-level", "warning", "--dialect", DIALECT,
        )  # fmt: skip
        try:
            return asyncio.run(measure(options, f"127.0.0.1:{port}", psutil.Process(gateway.pid), kinds))
        finally:
            gateway.terminate()
            source.terminate()
            gateway.wait()
            source.wait()


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Measures rounds with and without parsing in turns, and their ratios."""
    # Neither is always the first. What a gateway does once falls into two rounds that do not count.
    kinds = [parses for number in range(options.rounds + 1) for parses in ((False, True), (True, False))[number % 2]]
    told = run(options, kinds)[2:]
    rounds = {kind: [each for each, parses in zip(told, kinds[2:], strict=True) if parses is kind] for kind in kinds}
    medians = {
        parses: {name: statistics.median(each[name] for each in several) for name in several[0]}
        for parses, several in rounds.items()
    }
    pairs = list(zip(rounds[True], rounds[False], strict=True))
    ratios = {
        name: [round(parsed[name] / unparsed[name], 3) for parsed, unparsed in pairs]
        for name in ("tokens_per_second", "tokens_per_gateway_cpu_second")
    }
    return {
        "tools": options.tools,
        "begin": options.begin,
        "unparsed": medians[False],
        "parsed": medians[True],
        "parsed_to_unparsed": {name: round(statistics.median(each), 3) for name, each in ratios.items()},
        "of_each_pair": ratios,
    }


def main() -> None:
    options = parse()
    if options.role == "source":
        asyncio.run(run_source(options))
        return
    result = compare(options) if options.chat else run(options)[0]
    summary = {"streams": options.streams, "rate": options.rate, "stop": options.stop, **result}
    print(json.dumps(summary))
    if options.write:
        record.append("gateway_rate", summary)


if __name__ == "__main__":
    main()
