"""Work in threads of a process that stops: what has begun ends, and all else is for another one."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest

from blockyard.errors import BlockyardError, Reason
from blockyard.service.threads import Threads


async def test_what_has_not_begun_when_they_are_closed_fails_with_draining() -> None:
    threads, has_begun, may_end = Threads(1, "test"), Event(), Event()

    def work() -> str:
        has_begun.set()
        assert may_end.wait(30)
        return "done"

    running = asyncio.create_task(threads.run(work))
    await asyncio.to_thread(has_begun.wait, 30)
    waiting = asyncio.create_task(threads.run(lambda: "never"))
    await asyncio.sleep(0)
    threads.close()
    may_end.set()
    assert await running == "done"
    for late in (waiting, threads.run(lambda: "never")):
        with pytest.raises(BlockyardError) as raised:
            await late
        assert raised.value.reason is Reason.DRAINING
