"""What a group of ranks costs: to form one, to add over its ranks, to free the others when one of them ends it.

    python benchmarks/groups/group_cost.py [--sizes 2 4] [--groups 20] [--operations 500] [--write]

Groups are formed by worker processes, asked as a scheduler asks them: the time is that of OpenRendezvous and of
FormGroup at all ranks. Sums are those of a step's partial products, float32, over gloo, by processes without a worker.
Beside them, in the same processes and the same round, stands an exchange of as many bytes over a plain TCP connection:
the ratio is what gloo costs. At last one rank ends the group while the others wait in an operation. All on this
machine's loopback. Target: a group is formed within 0.5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch._C import _distributed_c10d as c10d

from benchmarks.kit import record
from benchmarks.kit.figures import number, round_figures, spread_of
from blockyard.contract.parallel import Parallel
from blockyard.errors import BlockyardError
from blockyard.service.servers import internal_channel
from tests.kit.processes.ranks import Ranks
from tests.kit.processes.system import Service
from worker_service.collectives.group import GroupLifetime
from worker_service.collectives.process_group import join_gloo

ROW_BYTES = (2304, 8192, 65536)
NUM_WARM_UP = 20
JOIN_SECONDS = 20.0
HOST = "127.0.0.1"


# Forming groups, by workers.


async def form(folder: Path, size: int, num_groups: int) -> list[float]:
    """Forms groups, one after another, and returns the milliseconds that each took."""
    addresses = [f"unix:{folder}/w{rank}" for rank in range(size)]
    services: list[Service] = []
    try:
        for rank, address in enumerate(addresses):
            flags = ["--worker-address", address, "--worker-device", "cpu", "--num-threads", "1"]
            services.append(Service("worker_service", flags, folder / f"log{rank}"))
        for service in services:
            service.wait_for_log("listening")
        async with AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(internal_channel(address)) for address in addresses]
            ranks = Ranks(channels, addresses[0])
            await ranks.init(size)
            members = await ranks.members()
            milliseconds: list[float] = []
            for epoch in range(1, num_groups + 1):
                begin = time.perf_counter()
                answers = await ranks.form(epoch, members=members)
                milliseconds.append((time.perf_counter() - begin) * 1e3)
                assert not any(isinstance(each, Exception) for each in answers), answers
            return milliseconds
    finally:
        for service in services:
            service.stop()


# Operations, by processes of their own.


def run_rank(rank: int, size: int, folder: Path, num_operations: int) -> None:
    """Adds with the other ranks, and ends the group: prints what rank 0 has measured, and when it was free."""
    torch.set_num_threads(1)
    lifetime = GroupLifetime(rank)
    group = join_gloo(
        c10d.FileStore(str(folder / "store"), size), Parallel(size, 1, rank), lifetime, HOST, JOIN_SECONDS
    )
    plain = _connect(rank, folder) if size == 2 else None
    times: dict[str, dict[str, list[float]]] = {}
    for num_bytes in ROW_BYTES:
        rows = torch.ones(1, num_bytes // 4)
        of_bytes = times[str(num_bytes)] = {"gloo_us": [], "socket_us": []}
        for _ in range(NUM_WARM_UP + num_operations):
            begin = time.perf_counter()
            group.world.add(rows)
            of_bytes["gloo_us"].append((time.perf_counter() - begin) * 1e6)
            rows.fill_(1.0)
            if plain is not None:
                begin = time.perf_counter()
                _exchange(plain, num_bytes)
                of_bytes["socket_us"].append((time.perf_counter() - begin) * 1e6)
    told: dict[str, Any] = {"times": times}
    if rank == size - 1:
        # The others wait by then.
        threading.Event().wait(0.5)
        told["ended_at"] = time.monotonic()
        lifetime.abort("the measurement is over")
    else:
        try:
            group.world.add(torch.ones(1, 1))
        except BlockyardError:
            told["free_at"] = time.monotonic()
    print(json.dumps(told))


def _connect(rank: int, folder: Path) -> socket.socket:
    """Connects two ranks by a plain socket; the first listens."""
    path = folder / "port"
    if rank == 0:
        with socket.create_server((HOST, 0)) as listener:
            path.with_suffix(".new").write_text(str(listener.getsockname()[1]))
            path.with_suffix(".new").rename(path)
            connection, _ = listener.accept()
    else:
        while not path.exists():
            time.sleep(0.005)
        connection = socket.create_connection((HOST, int(path.read_text())))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _exchange(connection: socket.socket, num_bytes: int) -> None:
    """Sends bytes to the other rank and receives as many."""
    sender = bytes(num_bytes)
    # What is sent fits the buffers of the kernel, so that both may send first.
    connection.sendall(sender)
    missing = num_bytes
    while missing:
        missing -= len(connection.recv(missing))


def operate(size: int, num_operations: int) -> dict[str, Any]:
    """Runs the ranks' processes, and returns what they cost."""
    with tempfile.TemporaryDirectory(prefix="group-cost-") as folder:
        command = [sys.executable, __file__, "--operations", str(num_operations), "--sizes", str(size)]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank), "--folder", folder], stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        told = [json.loads(rank.communicate(timeout=600)[0]) for rank in ranks]
    ended_at = told[-1]["ended_at"]
    operations = [_summarize(int(num_bytes), **times) for num_bytes, times in told[0]["times"].items()]
    return {"operations": operations, "free_ms": spread_of([(each["free_at"] - ended_at) * 1e3 for each in told[:-1]])}


def _summarize(num_bytes: int, gloo_us: list[float], socket_us: list[float]) -> dict[str, Any]:
    """Sums up the operations of one size. Of the plain socket there is nothing where more than two ranks add."""
    gloo_us, socket_us = gloo_us[NUM_WARM_UP:], socket_us[NUM_WARM_UP:]
    summary: dict[str, Any] = {"num_bytes": num_bytes, "gloo_us": spread_of(gloo_us)}
    if socket_us:
        summary |= {"socket_us": spread_of(socket_us), "ratio": spread_of(gloo_us, socket_us)}
    return summary


def measure(size: int, num_groups: int, num_operations: int) -> dict[str, Any]:
    """Measures groups of one size."""
    with tempfile.TemporaryDirectory(prefix="by") as folder:
        formed = asyncio.run(form(Path(folder), size, num_groups))
    return {"num_ranks": size, "form_ms": spread_of(formed), **operate(size, num_operations)}


def main() -> None:
    """Measures, prints, and writes if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--operations", type=int, default=500)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/group_cost.json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.sizes[0], options.folder, options.operations)
        return
    results = [measure(size, options.groups, options.operations) for size in options.sizes]
    for result in results:
        size = result["num_ranks"]
        print(f"{size} ranks: formed in {number(result['form_ms'])} ms, freed in {number(result['free_ms'])} ms")
        for each in result["operations"]:
            ratio = f", {number(each['ratio'], 1)} × a plain socket" if "ratio" in each else ""
            print(f"  {each['num_bytes']:>6} bytes: {number(each['gloo_us'])} µs{ratio}")
    if options.write:
        record.append("group_cost", round_figures(results))


if __name__ == "__main__":
    main()
