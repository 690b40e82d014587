"""What everything but the network costs: CPU time of gateway, scheduler, the worker's host side and a client.

    python benchmarks/host_cost.py [--streams 1 8 32 64] [--step-milliseconds 4 15] [--tokens 128] [--write]

Four processes: the services as `blockyard serve` starts them, over their own sockets, and a client that reads every
stream. The worker is the real one, but in the place of the network its device thread sleeps for a fixed time; what that
costs is taken off. CPU time is that of a process, all its threads, user and system, by the kernel's own clock of it.
Beside it stand context switches, which on few cores disturb whoever computes. Last: what each costs when nothing runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import grpc.aio

from benchmarks.kit import record
from benchmarks.kit.sleeping_worker import read_ledger
from blockyard.client.asynchronous import AsyncClient
from blockyard.client.sync import Client
from blockyard.common.v1 import sampling_pb2
from blockyard.configuration import SystemConfiguration
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.local.local_system import LocalSystem
from blockyard.local.supervisor import Supervisor
from blockyard.settings import resolve

PROMPT = "Once upon a time there was a little girl who lived in a house by the sea. " * 6
IDLE_SECONDS = 5.0
BLOCKS_OF_A_STREAM = 24
CLIENTS = ("async", "sync", "whole")
SERVICES = ("gateway", "scheduler", "worker", "client")


class Sample(NamedTuple):
    """What a process has cost so far."""

    seconds: float
    num_switches: int


def sample(pid: int) -> Sample:
    """Reads a process's own clock, to the nanosecond, ended threads included; and the switches of its threads."""
    # The number of the CPU clock of a process: see clock_getcpuclockid(3).
    seconds = time.clock_gettime((~pid << 3) | 2)
    return Sample(seconds, sum(_count_switches(path) for path in Path(f"/proc/{pid}/task").iterdir()))


def _count_switches(task: Path) -> int:
    try:
        lines = (task / "status").read_text().splitlines()
    except OSError:
        # The thread has ended meanwhile.
        return 0
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


# The client, a process of its own.


def run_client(target: str, kind: str) -> None:
    """Reads `STREAMS TOKENS` from each line, asks for so many answers of so many tokens, and writes what came."""
    run = {"async": _make_async, "sync": _make_sync, "whole": _make_whole}[kind](target)
    for line in sys.stdin:
        num_streams, num_tokens = map(int, line.split())
        begin = time.perf_counter()
        received = run(num_streams, num_tokens)
        print(json.dumps({"seconds": time.perf_counter() - begin, "tokens": received}), flush=True)


def _make_async(target: str) -> Any:
    loop = asyncio.new_event_loop()
    client = AsyncClient(target)

    async def read(num_tokens: int) -> int:
        async with client.stream(PROMPT, max_tokens=num_tokens, ignore_eos=True, temperature=0) as stream:
            return (await stream.result()).usage.num_completion_tokens

    async def run(num_streams: int, num_tokens: int) -> int:
        return sum(await asyncio.gather(*(read(num_tokens) for _ in range(num_streams))))

    return lambda num_streams, num_tokens: loop.run_until_complete(run(num_streams, num_tokens))


def _make_whole(target: str) -> Any:
    loop = asyncio.new_event_loop()
    stop = sampling_pb2.StopCriteria(ignore_eos=True)
    spec = inference_pb2.GenerationSpec(text=PROMPT, stop=stop, sampling=sampling_pb2.SamplingParams(temperature=0))

    async def run(num_streams: int, num_tokens: int) -> int:
        spec.stop.max_tokens = num_tokens
        async with grpc.aio.insecure_channel(target) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            calls = (stub.Generate(inference_pb2.GenerateRequest(spec=spec)) for _ in range(num_streams))
            answers = await asyncio.gather(*calls)
        return sum(answer.choices[0].finished.usage.num_completion_tokens for answer in answers)

    return lambda num_streams, num_tokens: loop.run_until_complete(run(num_streams, num_tokens))


def _make_sync(target: str) -> Any:
    client = Client(target)

    def run(num_streams: int, num_tokens: int) -> int:
        counts: list[int] = []

        def read() -> None:
            with client.stream(PROMPT, max_tokens=num_tokens, ignore_eos=True, temperature=0) as stream:
                counts.append(stream.result().usage.num_completion_tokens)

        threads = [threading.Thread(target=read) for _ in range(num_streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(counts)

    return run


# The services.


class Rig:
    """The processes of one measurement."""

    def __init__(self, pids: dict[str, int], client: subprocess.Popen[str], ledger: Path) -> None:
        self._pids = pids
        self._client = client
        self._ledger = ledger

    async def run(self, num_streams: int, num_tokens: int) -> dict[str, Any]:
        """Has the client read streams; returns what that cost."""
        before, begun = self._sample(), read_ledger(self._ledger)
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(f"{num_streams} {num_tokens}\n")
        self._client.stdin.flush()
        reported = json.loads(await asyncio.to_thread(self._client.stdout.readline))
        after, ended = self._sample(), read_ledger(self._ledger)
        spent = {name: after[name].seconds - before[name].seconds for name in SERVICES}
        spent["worker"] -= ended.computing_seconds - begun.computing_seconds
        switches = {name: after[name].num_switches - before[name].num_switches for name in SERVICES}
        return {**reported, "steps": ended.num_steps - begun.num_steps, "spent": spent, "switches": switches}

    async def idle(self, seconds: float) -> dict[str, float]:
        """CPU milliseconds a second of each process while nothing runs."""
        before = self._sample()
        await asyncio.sleep(seconds)
        after = self._sample()
        return {name: round((after[name].seconds - before[name].seconds) / seconds * 1e3, 3) for name in SERVICES}

    def _sample(self) -> dict[str, Sample]:
        return {name: sample(pid) for name, pid in self._pids.items()}


def spawn(command: list[str]) -> subprocess.Popen[str]:
    # A client's process is not ours: its gRPC is as it comes.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT, env=environment)


async def measure(step_seconds: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts the system once, and measures each number of streams on it."""
    settings = {"grpc_port": 0, "http_port": 0, "admin_port": 0, "log_level": "warning", "device": "cpu"}
    blocks = {"num_device_blocks": 1 + BLOCKS_OF_A_STREAM * max(options.streams), "num_host_blocks": 0}
    system = LocalSystem(resolve(SystemConfiguration, {**settings, **blocks, "enable_prefix_caching": False}))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ledger = Path(folder) / "ledger"
        worker, *others = system.make_services()
        flags = (str(step_seconds), str(ledger), *(f for f in worker.flags if not f.startswith("--num-threads")))
        services = [replace(worker, module="benchmarks.kit.sleeping_worker", flags=flags), *others]
        supervisor = Supervisor(services, system.is_ready, environment=system.make_environment())
        try:
            await supervisor.start()
            command = [sys.executable, __file__, "--role", options.client, "--target", system.endpoints.grpc]
            client = stack.enter_context(spawn(command))
            stack.callback(client.terminate)
            pids = dict(zip(("worker", "scheduler", "gateway"), (c.pid for c in supervisor.children), strict=True))
            return await measure_streams(Rig({**pids, "client": client.pid}, client, ledger), step_seconds, options)
        finally:
            await supervisor.stop()
            await system.close()


async def measure_streams(rig: Rig, step_seconds: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    head = {"step_milliseconds": step_seconds * 1e3, "client": options.client}
    for num_streams in options.streams:
        await rig.run(num_streams, 16)
        num_rounds = max(options.rounds, min(4 * options.rounds, 32 // num_streams))
        runs = [await rig.run(num_streams, options.tokens) for _ in range(num_rounds)]
        rows.append({**head, "streams": num_streams, **summarize(runs)})
        print(line_of(rows[-1]), flush=True)
    idle = await rig.idle(IDLE_SECONDS)
    print("| idle: ms a second |" + "".join(f" {name} {idle[name]:.2f} |" for name in SERVICES), flush=True)
    return [*rows, {**head, "streams": 0, "idle_ms_per_second": idle}]


def summarize(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals of the runs together, by token and by step; the cheapest run beside them."""
    num_tokens, num_steps = sum(run["tokens"] for run in runs), sum(run["steps"] for run in runs)
    seconds = sum(run["seconds"] for run in runs)
    spent = {name: sum(run["spent"][name] for run in runs) for name in SERVICES}
    switches = {name: sum(run["switches"][name] for run in runs) for name in SERVICES}
    total = sum(spent.values())
    return {
        "tokens": num_tokens,
        "tokens_per_second": round(num_tokens / seconds, 1),
        "cpu_seconds_per_1000_tokens": {name: round(spent[name] / num_tokens * 1e3, 4) for name in SERVICES},
        "total_per_1000_tokens": round(total / num_tokens * 1e3, 4),
        "best_per_1000_tokens": round(min(sum(run["spent"].values()) / run["tokens"] for run in runs) * 1e3, 4),
        "cpu_us_per_step": {name: round(spent[name] / num_steps * 1e6, 1) for name in SERVICES},
        "total_us_per_step": round(total / num_steps * 1e6, 1),
        "switches_per_step": {name: round(switches[name] / num_steps, 2) for name in SERVICES},
        "share_of_two_cores": round(total / seconds / 2, 4),
    }


# The report.


def line_of(row: dict[str, Any]) -> str:
    """One measurement as a line of a table."""
    per_step, switches = row["cpu_us_per_step"], row["switches_per_step"]
    cells = [f"{row['step_milliseconds']:g} ms", str(row["streams"]), f"{row['tokens_per_second']:.0f}"]
    cells += [f"{per_step[name]:.0f} ({switches[name]:.1f})" for name in SERVICES]
    cells += [f"{row['total_us_per_step']:.0f}", f"{row['total_per_1000_tokens']:.3f}"]
    cells += [f"{row['best_per_1000_tokens']:.3f}", f"{row['share_of_two_cores']:.1%}"]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "CPU µs a step (context switches a step) of each; CPU seconds per 1,000 tokens of all together.\n\n"
    "| step | streams | tok/s | "
    + " | ".join(SERVICES)
    + " | all | per 1,000 | best run | of 2 cores |\n"
    + "|---" * 11
    + "|"
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--step-milliseconds", type=float, nargs="+", default=[4.0, 15.0])
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--rounds", type=int, default=2)
    explanation = "async and sync stream, whole waits for whole answers"
    parser.add_argument("--client", choices=CLIENTS, default="async", help=explanation)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/host_cost.json")
    parser.add_argument("--role", choices=("main", *CLIENTS), default="main", help=argparse.SUPPRESS)
    parser.add_argument("--target", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


async def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for milliseconds in options.step_milliseconds:
        rows += await measure(milliseconds / 1e3, options)
    return rows


def main() -> None:
    """Measures, prints, and writes with --write."""
    options = parse()
    if options.role != "main":
        run_client(options.target, options.role)
        return
    print(HEAD, flush=True)
    rows = asyncio.run(run_all(options))
    if options.write:
        record.append("host_cost", rows)


if __name__ == "__main__":
    main()
