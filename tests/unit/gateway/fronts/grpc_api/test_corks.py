from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

import pytest

from gateway.fronts.grpc_api.corks import MAX_CONNECTIONS, MAX_MESSAGES, Connections, find_socket
from tests.unit.gateway.harness import Front, rest_of, spec

if TYPE_CHECKING:
    from collections.abc import Iterator

HOSTS = {"127.0.0.1": "127.0.0.1", "::1": "%5B::1%5D"}
NUM_STREAMS, NUM_TOKENS = 8, 20
# Of Linux's tcp_info.
DATA_SEGMENTS_OUT = 156


class Pair:
    """Both ends of a connection, and what gRPC calls the client on it."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            self.client = socket.create_connection(listener.getsockname()[:2])
            self.server, (_, port, *_) = listener.accept()
        self.client.setblocking(False)
        self.peer = f"ipv{6 if family == socket.AF_INET6 else 4}:{HOSTS[host]}:{port}"

    def close(self) -> None:
        self.client.close()
        self.server.close()

    def received(self) -> bytes:
        """What has come to the client."""
        with suppress(BlockingIOError):
            return self.client.recv(4096)
        return b""


@pytest.fixture
def pair() -> Iterator[Pair]:
    with closing(Pair()) as pair:
        yield pair


@pytest.mark.parametrize("host", HOSTS)
def test_a_connection_is_found_by_its_peer(host: str) -> None:
    with closing(Pair(host)) as pair, closing(Pair(host)):
        assert find_socket(pair.peer) == pair.server.fileno()


@pytest.mark.parametrize("peer", ["unix:", "unix:/tmp/gateway", "ipv4:127.0.0.1:1", "ipv4:nowhere:50051", ""])
def test_what_is_no_connection_of_this_process_is_not_found(peer: str, pair: Pair) -> None:
    assert find_socket(peer) is None


async def test_the_messages_of_a_turn_leave_when_it_ends(pair: Pair) -> None:
    connections = Connections()
    with connections.writing_to(pair.peer) as first, connections.writing_to(pair.peer) as second:
        for turn in (b"one", b"two"):
            for connection in (first, second):
                connection.hold()
                pair.server.send(turn)
            assert pair.received() == b""
            await asyncio.sleep(0)
            assert pair.received() == 2 * turn


async def test_no_message_waits_for_more_than_a_few_others(pair: Pair) -> None:
    connections = Connections()
    with connections.writing_to(pair.peer) as connection, connections.writing_to(pair.peer):
        for _ in range(MAX_MESSAGES):
            connection.hold()
            pair.server.send(b"a")
        assert pair.received() == b""
        connection.hold()
        pair.server.send(b"b")
        assert pair.received() == MAX_MESSAGES * b"a"
        await asyncio.sleep(0)
        assert pair.received() == b"b"


async def test_a_stream_by_itself_is_not_held_back(pair: Pair) -> None:
    connections = Connections()
    with connections.writing_to(pair.peer):
        pass
    with connections.writing_to(pair.peer) as connection:
        connection.hold()
        pair.server.send(b"a")
        assert pair.received() == b"a"


async def test_with_many_connections_nothing_is_held_back(pair: Pair) -> None:
    connections = Connections()
    with ExitStack() as stack:
        for number in range(MAX_CONNECTIONS):
            stack.enter_context(connections.writing_to(f"ipv4:192.0.2.1:{number}"))
        connection = stack.enter_context(connections.writing_to(pair.peer))
        stack.enter_context(connections.writing_to(pair.peer))
        connection.hold()
        pair.server.send(b"a")
        assert pair.received() == b"a"


async def test_a_socket_that_was_closed_hurts_nobody(pair: Pair) -> None:
    connections = Connections()
    with connections.writing_to(pair.peer) as connection, connections.writing_to(pair.peer):
        connection.hold()
        pair.server.close()
        await asyncio.sleep(0)
        connection.hold()
        descriptor = os.open(os.devnull, os.O_RDONLY)
        await asyncio.sleep(0)
        os.close(descriptor)


def num_packets(front: Front) -> int:
    """Packets with data that the gateway has sent to its clients."""
    port, total = int(front.address.rpartition(":")[2]), 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found = socket.socket(fileno=int(name))
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockname()[1] == port:
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("I", info, DATA_SEGMENTS_OUT)[0]
            # It is gRPC's.
            found.detach()
    return total


async def test_a_step_leaves_for_a_client_in_one_packet(front: Front) -> None:
    front.scheduler.pause()
    calls = [front.stream(spec(max_tokens=NUM_TOKENS, stop={"ignore_eos": True})) for _ in range(NUM_STREAMS)]
    for call in calls:
        assert (await call.read()).event.HasField("accepted")
    before = num_packets(front)
    front.scheduler.go_on()
    for call in calls:
        assert len(await rest_of(call)) > NUM_TOKENS / 2
    # A token of each stream a step; and a few for the ends, and what else HTTP/2 has to say.
    assert num_packets(front) - before < 3 * NUM_TOKENS
