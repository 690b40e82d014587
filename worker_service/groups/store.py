"""The meeting point as a store of torch.distributed, whose own stores would listen at a port that is open to all."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from typing import TYPE_CHECKING, Any, TypeVar

from torch._C import _distributed_c10d as c10d

from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from datetime import timedelta

    from worker_service.groups.rendezvous import RendezvousPoint

T = TypeVar("T")


class RendezvousStore(c10d.Store):
    """A store for the thread that joins a group; the event loop sends its calls to the meeting point.

    It has only the operations of gloo and NCCL: set a key, wait for keys, get a key. Errors of the meeting point pass
    unchanged through the process group's constructor.
    """

    def __init__(self, point: RendezvousPoint, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        """`seconds`: the time limit for all operations together, from now on."""
        super().__init__()
        self._point = point
        self._loop = loop
        self._deadline = time.monotonic() + seconds
        self._problem = ""
        self._call: concurrent.futures.Future[Any] | None = None

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def set(self, key: str, value: bytes | str) -> None:
        self._run(self._point.set(key, value.encode() if isinstance(value, str) else bytes(value)))

    def get(self, key: str) -> bytes:
        """Waits for a value, and returns it."""
        return self._run(self._point.get(key, self.seconds_left))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Waits until every key is set, within the time limit of the store."""
        for key in keys:
            self.get(key)

    def close(self, reason: str) -> None:
        """Frees the thread that waits here. Called in the event loop."""
        self._problem = reason
        if self._call is not None:
            self._call.cancel()

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        self._call = running = asyncio.run_coroutine_threadsafe(call, self._loop)
        if self._problem:
            running.cancel()
        try:
            return running.result()
        except concurrent.futures.CancelledError:
            raise BlockyardError(Reason.GROUP_BROKEN, self._problem) from None
