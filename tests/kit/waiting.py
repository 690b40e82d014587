"""Waiting, with a time limit, for what sets no event here: what another process does, or a peer behind a socket."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_PAUSE_SECONDS = 0.005


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Lets the event loop turn until a condition holds; raises TimeoutError when it does not in time."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_SECONDS)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Blocks this thread until a condition holds; raises TimeoutError when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come true within {seconds:g} s")
        time.sleep(_PAUSE_SECONDS)
