"""A service's thread pool. When it closes, waiting work fails with an error on which clients retry elsewhere."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from blockyard.errors import BlockyardError, Reason
from blockyard.panics import panics_as_errors

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def stopping() -> BlockyardError:
    """Creates the error of work that has not begun when the process stops."""
    return BlockyardError(
        Reason.DRAINING,
        "this process stops before the work has begun: send the request again, to another process",
        retry_after_seconds=1.0,
    )


class Threads:
    """A pool of `number` threads. Its creator must close it."""

    def __init__(self, number: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(number, name)
        self._is_closed = False

    def close(self) -> None:
        """Closes the pool: running work goes on, waiting work fails."""
        self._is_closed = True
        self._executor.shutdown(wait=False)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs work in a thread; raises BlockyardError DRAINING if the pool was closed before the work began."""
        self._require_open()
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._begin, work)

    def _begin(self, work: Callable[[], T]) -> T:
        self._require_open()
        with panics_as_errors():
            return work()

    def _require_open(self) -> None:
        if self._is_closed:
            raise stopping()
