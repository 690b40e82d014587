"""A random program over the simulated transport: clients call servers, and everything that can go wrong does.

python -m tests.integration.kit.simulation.random_program SEED…    prints each seed's trace hash
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.kit.simulation.loop import Outcome, Owner, SimLoop, run
from tests.kit.simulation.network import Network
from tests.kit.simulation.transport import SimTransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVICE = "test.Service"
SERVERS = ("server-0", "server-1", "server-2")
CLIENTS = ("client-0", "client-1", "client-2", "client-3")
NUM_CALLS = 40
NUM_FAULTS = 20
OPTIONS = [
    ("grpc.keepalive_time_ms", 500),
    ("grpc.keepalive_timeout_ms", 200),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 1000),
]


class Program:
    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.network = Network(loop)
        self.random = loop.random_for("program")
        self.servers: dict[str, Owner] = {}
        self.kept: list[Any] = []
        self.results: Counter[str] = Counter()

    async def run(self) -> Counter[str]:
        for name in SERVERS:
            self.start_server(name)
        clients = [self.loop.spawn(self.loop.owner(name), self.call_often(name)) for name in CLIENTS]
        faults = asyncio.create_task(self.go_wrong())
        await asyncio.gather(*clients)
        faults.cancel()
        return self.results

    # Servers.

    def start_server(self, name: str) -> None:
        self.servers[name] = owner = self.loop.owner(name)
        self.loop.spawn(owner, self.serve(name, owner))

    async def serve(self, name: str, owner: Owner) -> None:
        server = SimTransport(self.network, name, owner).server(OPTIONS)
        handlers = {
            "One": grpc.unary_unary_rpc_method_handler(self.answer_one),
            "Many": grpc.unary_stream_rpc_method_handler(self.answer_many),
            "Take": grpc.stream_unary_rpc_method_handler(self.take),
            "Talk": grpc.stream_stream_rpc_method_handler(self.talk),
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
        server.add_insecure_port(f"{name}:1")
        await server.start()
        self.kept.append(server)
        if self.random.random() < 0.3:
            await asyncio.sleep(self.random.uniform(0, 5))
            await server.stop(self.random.choice([None, 0.1, 1.0]))
            self.start_server(name)

    async def pause(self, context: Any) -> None:
        chance = self.random.random()
        if chance < 0.05:
            await context.abort(grpc.StatusCode.ABORTED, "at random")
        elif chance < 0.1:
            await asyncio.to_thread(len, "work")
        elif chance < 0.6:
            await asyncio.sleep(self.random.expovariate(20))

    async def answer_one(self, request: bytes, context: Any) -> bytes:
        await self.pause(context)
        return request

    async def answer_many(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(self.random.randint(0, 20)):
            await self.pause(context)
            yield bytes(self.random.randint(0, 20_000))

    async def take(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        size = 0
        async for request in requests:
            size += len(request)
            await self.pause(context)
        return b"%d" % size

    async def talk(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await self.pause(context)
            await context.write(request)

    # Clients.

    async def call_often(self, name: str) -> None:
        transport = SimTransport(self.network, name)
        channels = [transport.channel(f"{server}:1", OPTIONS) for server in SERVERS]
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CALLS):
                await asyncio.sleep(self.random.expovariate(20))
                group.create_task(self.call(self.random.choice(channels)))
        for channel in channels:
            await channel.close()

    async def call(self, channel: Any) -> None:
        timeout = self.random.choice([0.05, 0.5, 5.0])
        options = {"timeout": timeout, "wait_for_ready": self.random.random() < 0.5}
        kind = self.random.choice(["One", "Many", "Take", "Talk"])
        make = {"One": channel.unary_unary, "Many": channel.unary_stream, "Take": channel.stream_unary}
        multicallable = make.get(kind, channel.stream_stream)(f"/{SERVICE}/{kind}")
        call = multicallable(self.requests() if kind in ("Take", "Talk") else b"request", **options)
        if self.random.random() < 0.2:
            self.loop.call_later(self.random.expovariate(10), call.cancel)
        with suppress(grpc.RpcError, asyncio.CancelledError):
            if kind in ("One", "Take"):
                await call
            else:
                async for _ in call:
                    await asyncio.sleep(self.random.choice([0, 0, 0.01]))
        self.results[f"{kind} {(await call.code()).name}"] += 1

    async def requests(self) -> AsyncIterator[bytes]:
        for _ in range(self.random.randint(0, 10)):
            yield bytes(self.random.randint(0, 50_000))
            if self.random.random() < 0.5:
                await asyncio.sleep(self.random.expovariate(50))

    # Faults.

    async def go_wrong(self) -> None:
        faults = [self.kill, self.freeze, self.slow, self.partition, self.flap, self.break_one, self.delay]
        for _ in range(NUM_FAULTS):
            await asyncio.sleep(self.random.expovariate(5))
            fault = self.random.choice(faults)
            self.loop.note(fault.__name__)
            fault(self.random.choice(SERVERS))

    def kill(self, name: str) -> None:
        self.network.kill(self.servers[name], silently=self.random.random() < 0.3)
        self.loop.call_later(self.random.uniform(0, 1), self.start_server_unless_there, name)

    def start_server_unless_there(self, name: str) -> None:
        if not self.servers[name].alive:
            self.start_server(name)

    def freeze(self, name: str) -> None:
        self.loop.freeze(owner := self.servers[name])
        self.loop.call_later(self.random.uniform(0, 1), self.loop.thaw, owner)

    def slow(self, name: str) -> None:
        self.loop.slow(self.servers[name], self.random.choice([1, 10, 1000]))

    def partition(self, name: str) -> None:
        block = self.network.block([name], CLIENTS, both_ways=self.random.random() < 0.5)
        self.loop.call_later(self.random.expovariate(2), block.lift)

    def flap(self, name: str) -> None:
        self.network.flap([name], self.random.sample(CLIENTS, 2), 0.1, 3)

    def break_one(self, _: str) -> None:
        if connections := self.network.connections():
            self.network.break_connection(self.random.choice(connections))

    def delay(self, name: str) -> None:
        self.network.delay([name], CLIENTS, self.random.choice([0, 0.05, 0.3]))


async def main() -> Counter[str]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    return await Program(loop).run()


def run_program(seed: int) -> Outcome[Counter[str]]:
    return run(main(), seed)


if __name__ == "__main__":
    sys.stdout.write("".join(f"{run_program(int(seed)).trace_hash}\n" for seed in sys.argv[1:]))
