"""What sleep, wake and new weights cost, beside the load of the same model: by AdminService, in a whole system.

    python benchmarks/sleep.py [--model llama-1.1b] [--rounds 3] [--write]

A round sleeps and wakes at level 1, sleeps at level 2 and loads anew, and takes the weights that this process has: it
sends them, and then has the worker read them itself, from a folder whose files are in memory. Seconds are those that an
operator waits; a request behind each says how long until the next token. The shares of memory are those of what a level
gives up: pages of the worker's process before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import grpc.aio

from benchmarks.kit import models, record
from benchmarks.kit.figures import round_figures, spread_of
from benchmarks.kit.ideal import Shape
from benchmarks.kit.whole_system import WholeSystem
from benchmarks.kit.worker_alone import Settings
from benchmarks.kit.workload import Workload
from blockyard import update_weights
from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

NUM_BLOCKS, NUM_SEQUENCES, NUM_TOKENS = 150, 16, 256


def resident_bytes(pid: int) -> int:
    """The pages that a process has in memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Rounds:
    """Measures one round after another."""

    def __init__(self, system: WholeSystem, stub: Any, vocab_size: int, pid: int) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.freed: dict[str, list[float]] = {}
        self._system, self._stub, self._pid = system, stub, pid
        # Fills most of the pool, and one token for whoever comes next.
        self._load = Workload(NUM_SEQUENCES, NUM_TOKENS, 2, vocab_size)
        self._one = Workload(1, 8, 1, vocab_size)

    async def time(self, name: str, work: Callable[[], Awaitable[Any]]) -> None:
        """Measures what an operator waits for."""
        begin = time.perf_counter()
        await work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)

    async def token(self, name: str) -> None:
        """Measures the first token after an operation, whose pages are not there yet."""
        await self.time(f"token after {name}", lambda: self._system.run(self._one))

    async def sleep(self, level: int, num_bytes: int) -> None:
        """Puts the replica to sleep, and records which share of the expected bytes it freed."""
        await self._system.run(self._load)
        before = resident_bytes(self._pid)
        request = admin_pb2.SleepReplicaRequest(level=level)
        await self.time(f"sleep {level}", lambda: self._stub.SleepReplica(request))
        self.freed.setdefault(f"level {level}", []).append((before - resident_bytes(self._pid)) / num_bytes)

    async def wake(self, name: str, *, reload: bool) -> None:
        """Wakes, and computes a token."""
        await self.time(name, lambda: self._stub.WakeReplica(admin_pb2.WakeReplicaRequest(reload=reload)))
        await self.token(name)

    async def update(self, name: str, folder: str, version: str, *, shared: bool) -> None:
        """Sends weights or shares them, and computes a token."""
        address = self._system.admin_address
        await self.time(name, lambda: asyncio.to_thread(update_weights, address, folder, version, shared=shared))
        await self.token(name)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Starts a system and measures all rounds."""
    settings = Settings(options.folder, num_device_blocks=NUM_BLOCKS, max_num_seqs=NUM_SEQUENCES)
    shape = Shape.read(Path(options.folder))
    async with WholeSystem(settings) as system, grpc.aio.insecure_channel(system.admin_address) as channel:
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        worker = (await stub.GetStatus(admin_pb2.GetStatusRequest())).scheduler.replicas[0].workers[0]
        rounds = Rounds(system, stub, shape.vocab_size, system.worker_pid)
        # What the load writes: a share of the pool.
        written = worker.device_cache_bytes * NUM_SEQUENCES * (NUM_TOKENS + 2) // 32 // NUM_BLOCKS
        for number in range(options.rounds):
            await rounds.token("nothing")
            await rounds.sleep(1, written)
            await rounds.wake("wake 1", reload=False)
            await rounds.sleep(2, worker.weights_bytes + written)
            await rounds.wake("wake 2 and reload", reload=True)
            await rounds.update("update", options.folder, f"{number} sent", shared=False)
            await rounds.update("shared update", options.folder, f"{number} shared", shared=True)
        return {
            "weights_bytes": worker.weights_bytes,
            "pool_bytes": worker.device_cache_bytes,
            "seconds": {name: spread_of(seconds) for name, seconds in rounds.seconds.items()},
            "freed_share": {name: spread_of(shares) for name, shares in rounds.freed.items()},
        }


def report(results: dict[str, Any]) -> str:
    """The results for a person: of times the least, since whatever else ran made the others longer."""
    seconds = {name: spread["min"] for name, spread in results["seconds"].items()}
    lines = [f"{name:28}{least:9.3f} s" for name, least in seconds.items()]
    lines += [f"{name:28}{spread['min']:9.1%} of what it gives up" for name, spread in results["freed_share"].items()]
    reload = seconds["wake 2 and reload"]
    lines += [f"{name + ' / reload':28}{seconds[name] / reload:9.2f}" for name in ("update", "shared update")]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `folder` is the model's, made if it is one of benchmarks/kit/models.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1.1b", help="a name of benchmarks/kit/models.py, or a folder")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/sleep.json")
    options = parser.parse_args(arguments)
    named = options.model in models.RECIPES
    options.folder = str(models.make_model(options.model) if named else Path(options.model).resolve())
    return options


def main() -> None:
    """Measures, prints, and writes with --write."""
    options = parse()
    results = round_figures({"model": Path(options.folder).name, **asyncio.run(measure(options))})
    print(report(results))
    if options.write:
        record.append("sleep", results)


if __name__ == "__main__":
    main()
