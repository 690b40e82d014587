"""The meeting point of a group's ranks: who waits there, and how that ends."""

from __future__ import annotations

import asyncio

import pytest

from worker_service.groups.rendezvous import Rendezvous


async def test_what_was_told_is_read_before_and_after() -> None:
    point = Rendezvous(1)
    reading = asyncio.create_task(point.get("k", 20.0))
    await asyncio.sleep(0)
    await point.set("k", b"v")
    assert await reading == await point.get("k") == b"v"


async def test_nobody_waits_longer_than_they_want() -> None:
    point = Rendezvous(1)
    with pytest.raises(TimeoutError):
        await point.get("k", 0.001)
    await point.set("k", b"v")
    assert await point.get("k", 0.001) == b"v"


async def test_who_gives_up_as_it_closes_is_not_told_why() -> None:
    """An error that nobody waits for would be written to the log."""
    point = Rendezvous(1)
    reading = asyncio.create_task(point.get("k", 20.0))
    await asyncio.sleep(0)
    point.close("over")
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
