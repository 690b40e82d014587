"""The meeting point of a group's ranks: values that they exchange before they are connected.

It is at rank 0, for one epoch, and lives in the event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch._C import _distributed_c10d as c10d

from blockyard.clock import SYSTEM, Clock
from blockyard.errors import BlockyardError, Reason, Violation, invalid

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from datetime import timedelta


T = TypeVar("T")


class RendezvousStore(c10d.Store):
    """A store for the thread that joins a group; the event loop sends its calls to the meeting point.

    The own stores of torch.distributed would listen at a port that is open to all.
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


SECRET_BYTES = 16

# Several times the size of gloo's and NCCL's values: a few hundred bytes for each pair of ranks.
MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_KEYS = 256, 65536, 16384


class RendezvousPoint(Protocol):
    """The values of a meeting point. A rank sets and reads them from the event loop."""

    async def set(self, key: str, value: bytes) -> None:
        """Sets a value under a key; raises BlockyardError if the meeting point is closed."""

    async def get(self, key: str, seconds: float) -> bytes:
        """Waits up to `seconds` for a value, and returns it; raises BlockyardError or TimeoutError."""
        ...


class Rendezvous:
    """The keys of one epoch, open to callers that know its secret."""

    def __init__(self, epoch: int, clock: Clock = SYSTEM) -> None:
        self.epoch = epoch
        self.secret = clock.token_bytes(SECRET_BYTES)
        self._values: dict[str, asyncio.Future[bytes]] = {}
        self._problem = ""

    def admits(self, epoch: int, secret: bytes) -> bool:
        return epoch == self.epoch and hmac.compare_digest(secret, self.secret)

    async def set(self, key: str, value: bytes) -> None:
        """See RendezvousPoint; raises BlockyardError FIELD_INVALID for a key or value that no rank sets."""
        if len(value) > MAX_VALUE_BYTES:
            raise invalid([Violation("value", f"must have at most {MAX_VALUE_BYTES} bytes")])
        place = self._place(key)
        if place.done():
            raise invalid([Violation("key", "is set already")])
        place.set_result(value)

    async def get(self, key: str, seconds: float | None = None) -> bytes:
        """See RendezvousPoint. `seconds` of None: waits as long as the caller waits."""
        # A caller that leaves is cancelled, though the group ends at that moment: `wait_for` would give it the error.
        async with asyncio.timeout(seconds):
            place = self._place(key)
            # From Python 3.14 on, `shield` reports the error of a group that ends after its caller has left.
            await asyncio.wait({place})
            return place.result()

    def _place(self, key: str) -> asyncio.Future[bytes]:
        if self._problem:
            raise BlockyardError(Reason.GROUP_BROKEN, self._problem)
        if not 0 < len(key.encode()) <= MAX_KEY_BYTES:
            raise invalid([Violation("key", f"must have from 1 to {MAX_KEY_BYTES} bytes")])
        if key not in self._values:
            if len(self._values) >= MAX_KEYS:
                raise invalid([Violation("key", f"a group has at most {MAX_KEYS} keys")])
            self._values[key] = asyncio.get_running_loop().create_future()
        return self._values[key]

    def close(self, reason: str) -> None:
        """Refuses all waiting and all further callers."""
        self._problem = self._problem or reason
        for place in self._values.values():
            if not place.done():
                place.set_exception(BlockyardError(Reason.GROUP_BROKEN, self._problem))
                # The exception is read here, since there may be no waiter.
                place.exception()
        self._values.clear()
