"""Frames are found however the bytes came; a connection says how it ended, notices silence, and holds its peer back."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard import frames
from blockyard.errors import BlockyardError, Reason, to_status

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

SECONDS = 20.0


def frame(payload: bytes, kind: int = frames.MESSAGE) -> bytes:
    return struct.pack("<IB", len(payload), kind) + payload


async def connect(end: socket.socket) -> frames.Connection:
    _, connection = await asyncio.get_running_loop().create_connection(frames.Connection, sock=end)
    return cast("frames.Connection", connection)


@asynccontextmanager
async def pair() -> AsyncGenerator[tuple[frames.Connection, frames.Connection]]:
    """Both ends of a connection."""
    one, other = [await connect(end) for end in socket.socketpair()]
    try:
        async with asyncio.timeout(SECONDS):
            yield one, other
    finally:
        for connection in (one, other):
            connection.abort(frames.broken("the test is over"))
        await asyncio.sleep(0)


@asynccontextmanager
async def against_bytes() -> AsyncGenerator[tuple[frames.Connection, socket.socket]]:
    """A connection whose other side writes what it likes."""
    end, other = socket.socketpair()
    connection = await connect(end)
    try:
        async with asyncio.timeout(SECONDS):
            yield connection, other
    finally:
        connection.abort(frames.broken("the test is over"))
        other.close()
        await asyncio.sleep(0)


def feed(connection: frames.Connection, data: bytes) -> None:
    """Brings bytes as the loop does."""
    while data:
        room = connection.get_buffer(-1)
        taken, data = data[: len(room)], data[len(room) :]
        room[: len(taken)] = taken
        connection.buffer_updated(len(taken))


@given(
    payloads=st.lists(st.binary(max_size=200), max_size=6),
    big=st.integers(0, 200_000),
    cuts=st.lists(st.integers(1, 150_000), max_size=8),
)
def test_messages_are_found_however_the_bytes_are_cut(payloads: list[bytes], big: int, cuts: list[int]) -> None:
    async def run() -> list[bytes]:
        connection = frames.Connection()
        sent = [*payloads, b"x" * big, b"last"]
        data = b"".join(map(frame, sent))
        for cut in cuts:
            feed(connection, data[:cut])
            data = data[cut:]
        feed(connection, data)
        return [cast("bytes", await connection.read()) for _ in sent]

    assert asyncio.run(run()) == [*payloads, b"x" * big, b"last"]


async def test_both_sides_talk() -> None:
    async with pair() as (one, other):
        await one.write(b"ping")
        assert await other.read() == b"ping"
        await other.write(b"")
        assert await one.read() == b""


async def test_a_good_end_comes_behind_the_messages() -> None:
    async with pair() as (one, other):
        await one.write(b"a")
        one.close()
        one.close()
        assert await other.read() == b"a"
        assert await other.read() is None
        with pytest.raises(BlockyardError):
            await other.write(b"b")


async def test_what_the_peer_still_sends_does_not_swallow_the_last_words() -> None:
    error = BlockyardError(Reason.WRONG_STATE, "another epoch")
    async with pair() as (one, other):
        other.send(frames.MESSAGE, b"on its way")
        one.close(to_status(error))
        other.send(frames.MESSAGE, b"on its way")
        with pytest.raises(BlockyardError, match="another epoch") as told:
            await other.read()
        assert told.value.reason is Reason.WRONG_STATE


async def test_a_peer_that_dies_is_told_behind_its_messages() -> None:
    async with against_bytes() as (connection, peer):
        peer.sendall(frame(b"a") + frame(b"cut off")[:-1])
        peer.close()
        assert await connection.read() == b"a"
        with pytest.raises(BlockyardError) as told:
            await connection.read()
        assert told.value.reason is Reason.NO_READY_WORKER


async def test_a_frame_that_is_too_long_ends_it() -> None:
    async with against_bytes() as (connection, peer):
        peer.sendall(struct.pack("<IB", frames.MAX_FRAME_BYTES + 1, frames.MESSAGE))
        with pytest.raises(BlockyardError) as told:
            await connection.read()
        assert told.value.reason is Reason.MESSAGE_TOO_LARGE


async def test_a_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PING_SECONDS", 0.01)
    async with against_bytes() as (connection, peer):
        with pytest.raises(BlockyardError, match="silent") as told:
            await connection.read()
        assert told.value.reason is Reason.NO_READY_WORKER
        # It has said something itself meanwhile.
        peer.setblocking(False)
        assert peer.recv(5) == frame(b"", frames.PING)


async def test_two_idle_sides_keep_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "PING_SECONDS", 0.02)
    async with pair() as (one, other):
        ticks = 0
        real, all_ticked = other.buffer_updated, asyncio.Event()

        def count(nbytes: int) -> None:
            nonlocal ticks
            ticks += 1
            if ticks == 3 * frames.MAX_SILENT_PERIODS:
                all_ticked.set()
            real(nbytes)

        monkeypatch.setattr(other, "buffer_updated", count)
        await all_ticked.wait()
        assert one.is_open
        assert other.is_open


async def test_a_reader_that_does_not_read_holds_the_writer_back() -> None:
    async with pair() as (one, other):
        writing = asyncio.create_task(write_all(one, 4000))
        await asyncio.wait([writing], timeout=0.2)
        assert not writing.done()
        num_read = 0
        while num_read < 4000:
            assert await other.read() == b"x" * 1000
            num_read += 1
        await writing


async def write_all(connection: frames.Connection, number: int) -> None:
    for _ in range(number):
        await connection.write(b"x" * 1000)


async def test_a_writer_that_is_held_back_is_freed_by_the_end() -> None:
    async with against_bytes() as (connection, peer):
        writing = asyncio.create_task(write_all(connection, 4000))
        await asyncio.wait([writing], timeout=0.2)
        peer.close()
        with pytest.raises(BlockyardError):
            await writing
