"""The proxy between plain sockets: what arrives, to the byte, and how connections end."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.chaos.fault_proxy import FaultProxy
from tests.kit.chaos.faulty_connection import Direction, EndAt, Ending, Rule, random_rules

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[3]
SECONDS = 10.0
# Long enough for data that is not held back to arrive many times over.
QUIET_SECONDS = 0.1


# Of the test that runs.
sides: list[Side] = []


@pytest.fixture(autouse=True)
async def close_all_sides() -> AsyncIterator[None]:
    yield
    while sides:
        writer = sides.pop().writer
        writer.close()
        with suppress(OSError):
            await asyncio.wait_for(writer.wait_closed(), SECONDS)


class Peer:
    """A server that keeps what it receives and says what it is told to."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.accepted: asyncio.Queue[Side] = asyncio.Queue()


class Side:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        sides.append(self)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def receive(self, num_bytes: int) -> bytes:
        async with asyncio.timeout(SECONDS):
            return await self.reader.readexactly(num_bytes)

    async def receive_all(self) -> bytes:
        async with asyncio.timeout(SECONDS):
            return await self.reader.read()

    async def hears_nothing(self) -> bool:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                return not await self.reader.read(1)
        except TimeoutError:
            return True

    async def close(self) -> None:
        self.writer.close()


@asynccontextmanager
async def listening(folder: Path | None = None) -> AsyncIterator[Peer]:
    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer.accepted.put_nowait(Side(reader, writer))

    if folder is None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        peer = Peer("{}:{}".format(*server.sockets[0].getsockname()))
    else:
        server = await asyncio.start_unix_server(accept, folder / "peer")
        peer = Peer(f"unix:{folder}/peer")
    try:
        yield peer
    finally:
        # `async with` would wait for the connections, from Python 3.12 on, which are closed after the test.
        server.close()


async def dial(address: str) -> Side:
    if address.startswith("unix:"):
        return Side(*await asyncio.open_unix_connection(address.removeprefix("unix:")))
    host, _, port = address.rpartition(":")
    return Side(*await asyncio.open_connection(host, int(port)))


@asynccontextmanager
async def connected(rule: Rule | None = None) -> AsyncIterator[tuple[FaultProxy, Side, Side]]:
    """A client and its server with a proxy between."""
    async with listening() as peer, FaultProxy(peer.address, rule_of=lambda _: rule or Rule()) as proxy:
        client = await dial(proxy.address)
        server = await asyncio.wait_for(peer.accepted.get(), SECONDS)
        yield proxy, client, server


async def until_closed(proxy: FaultProxy) -> None:
    async with asyncio.timeout(SECONDS):
        while proxy.connections:  # noqa: ASYNC110 - a connection tells nobody of its end
            await asyncio.sleep(0.002)


async def test_bytes_go_both_ways_and_are_counted() -> None:
    up, down = random.Random(1).randbytes(300_000), random.Random(2).randbytes(500_000)
    async with connected() as (proxy, client, server):
        sending = asyncio.gather(client.send(up), server.send(down))
        assert await asyncio.gather(server.receive(len(up)), client.receive(len(down))) == [up, down]
        await sending
        assert proxy.stats.num_bytes == {Direction.UP: len(up), Direction.DOWN: len(down)}
        assert proxy.stats.num_connections == len(proxy.connections) == 1


async def test_unix_sockets_are_proxied_and_cleaned_up(tmp_path: Path) -> None:
    async with listening(tmp_path) as peer:
        async with FaultProxy(peer.address, f"unix:{tmp_path}/proxy") as proxy:
            client = await dial(proxy.address)
            await client.send(b"up")
            server = await peer.accepted.get()
            assert await server.receive(2) == b"up"
            await client.close()
            assert await server.receive_all() == b""
        assert not (tmp_path / "proxy").exists()


async def test_an_end_of_file_one_way_leaves_the_other_way_open() -> None:
    async with connected() as (proxy, client, server):
        client.writer.write_eof()
        assert await server.receive_all() == b""
        await server.send(b"still here")
        assert await client.receive(10) == b"still here"
        await server.close()
        assert await client.receive_all() == b""
        await until_closed(proxy)


@pytest.mark.parametrize("num_bytes", [0, 1, 999, 70_000])
@pytest.mark.parametrize("direction", list(Direction))
async def test_a_cut_lets_exactly_so_many_bytes_through(direction: Direction, num_bytes: int) -> None:
    data = random.Random(3).randbytes(100_000)
    async with listening() as peer:
        rule = Rule(end_at=EndAt(direction, num_bytes))
        async with FaultProxy(peer.address, rule_of=lambda _: rule) as proxy:
            client = await dial(proxy.address)
            server = await asyncio.wait_for(peer.accepted.get(), SECONDS)
            sender, receiver = (client, server) if direction is Direction.UP else (server, client)
            sender.writer.write(data)
            assert await receiver.receive_all() == data[:num_bytes]
            await until_closed(proxy)
            assert proxy.stats.num_bytes[direction] == num_bytes
            assert proxy.stats.num_endings == {Ending.CUT: 1, Ending.RESET: 0}


async def test_a_reset_is_one_for_both_ends() -> None:
    async with connected(Rule(end_at=EndAt(Direction.UP, 3, Ending.RESET))) as (proxy, client, server):
        await client.send(b"abcdef")
        for side in (client, server):
            with pytest.raises(ConnectionResetError):
                await side.receive(4)
        assert proxy.stats.num_endings[Ending.RESET] == 1


async def test_a_frozen_connection_takes_nothing_and_closes_nothing() -> None:
    async with connected() as (proxy, client, server):
        await client.send(b"before")
        assert await server.receive(6) == b"before"
        proxy.freeze()
        await client.send(b"during")
        assert await server.hears_nothing()
        assert not server.reader.at_eof()
        # What no socket's buffer holds stays with its sender.
        client.writer.write(bytes(20_000_000))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(QUIET_SECONDS):
                await client.writer.drain()
        proxy.thaw()
        assert (await server.receive(20_000_006))[:6] == b"during"


async def test_the_end_of_a_frozen_peer_is_not_told_before_it_thaws() -> None:
    async with connected() as (proxy, client, server):
        proxy.freeze()
        await client.close()
        assert await server.hears_nothing()
        assert not server.reader.at_eof()
        proxy.thaw()
        assert await server.receive_all() == b""


async def test_a_frozen_connection_can_be_cut() -> None:
    async with connected() as (proxy, _, server):
        proxy.freeze()
        proxy.end()
        assert await server.receive_all() == b""


async def test_only_the_open_connections_freeze() -> None:
    async with connected() as (proxy, _, _):
        proxy.freeze()
        second = await dial(proxy.address)
        await second.send(b"x")
        await second.close()
        async with asyncio.timeout(SECONDS):
            while proxy.stats.num_bytes[Direction.UP] != 1:  # noqa: ASYNC110
                await asyncio.sleep(0.002)


async def test_a_partition_is_a_hole_for_old_and_new_connections_until_it_heals() -> None:
    async with listening() as peer, FaultProxy(peer.address) as proxy:
        old = await dial(proxy.address)
        old_server = await peer.accepted.get()
        proxy.partition()
        new = await dial(proxy.address)
        await old.send(b"old")
        await new.send(b"new")
        assert await old_server.hears_nothing()
        assert peer.accepted.empty()
        proxy.heal()
        assert await old_server.receive(3) == b"old"
        new_server = await asyncio.wait_for(peer.accepted.get(), SECONDS)
        assert await new_server.receive(3) == b"new"


async def test_a_partition_may_refuse_new_connections() -> None:
    async with listening() as peer, FaultProxy(peer.address) as proxy:
        proxy.partition(refuses=True)
        refused = await dial(proxy.address)
        assert await refused.receive_all() == b""
        assert proxy.stats.num_refused == 1
        proxy.heal()
        await dial(proxy.address)
        assert await asyncio.wait_for(peer.accepted.get(), SECONDS)


async def test_nobody_at_the_target_is_a_closed_connection(tmp_path: Path) -> None:
    async with FaultProxy(f"unix:{tmp_path}/nobody") as proxy:
        client = await dial(proxy.address)
        assert await client.receive_all() == b""
        await until_closed(proxy)


async def test_a_lost_peer_is_lost_to_the_other_one() -> None:
    async with connected() as (proxy, client, server):
        client.writer.transport.abort()
        assert await server.receive_all() == b""
        await server.close()
        await until_closed(proxy)


async def test_each_piece_of_data_is_delayed() -> None:
    async with connected(Rule(delay_seconds=0.2)) as (_, client, server):
        begin = asyncio.get_running_loop().time()
        await client.send(b"late")
        assert await server.receive(4) == b"late"
        assert asyncio.get_running_loop().time() - begin >= 0.19


def test_random_rules_are_a_function_of_the_seed() -> None:
    first, again, other = (
        [make(number) for number in range(200)]
        for make in (random_rules(1, 50, 1000), random_rules(1, 50, 1000), random_rules(2, 50, 1000))
    )
    assert first == again != other
    ends = [rule.end_at for rule in first if rule.end_at]
    assert {end.direction for end in ends} == set(Direction)
    assert {end.ending for end in ends} == set(Ending)
    assert max(end.num_bytes for end in ends if end.direction is Direction.UP) < 50
    assert 500 < max(end.num_bytes for end in ends if end.direction is Direction.DOWN) < 1000


async def test_the_program_obeys_lines(tmp_path: Path) -> None:
    async with listening(tmp_path) as peer:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.kit.chaos.fault_proxy", "--listen", "127.0.0.1:0", "--target", peer.address),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        program = Side(process.stdout, process.stdin)

        async def answer() -> str:
            async with asyncio.timeout(SECONDS):
                return (await program.reader.readline()).decode().strip()

        async def say(line: str) -> str:
            await program.send(f"{line}\n".encode())
            return await answer()

        try:
            address = (await answer()).removeprefix("listening on ")
            client = await dial(address)
            await client.send(b"abc")
            server = await peer.accepted.get()
            assert await server.receive(3) == b"abc"
            assert await say("stats") == "open=1 connections=1 refused=0 cut=0 reset=0 bytes_up=3 bytes_down=0"
            assert await say("freeze 0") == "ok"
            await client.send(b"def")
            assert await server.hears_nothing()
            assert await say("thaw") == "ok"
            assert await server.receive(3) == b"def"
            assert await say("freeze 7") == "error: freeze: connection 7 is not open"
            assert await say("delay soon") == "error: delay: could not convert string to float: 'soon'"
            assert (await say("delay")).startswith("error: delay: ")
            assert (await say("dance")).startswith("error: the commands are freeze, thaw, cut, ")
            assert await say("cut") == "ok"
            assert await server.receive_all() == b""
            assert await say("end-at up 2 reset") == "ok"
            second = await dial(address)
            await second.send(b"xyz")
            with pytest.raises(ConnectionResetError):
                await second.receive(1)
            assert [await say(line) for line in ("random 100 200", "clear", "partition refuse", "heal")] == ["ok"] * 4
            assert await say("quit") == "ok"
            assert await asyncio.wait_for(process.wait(), SECONDS) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
