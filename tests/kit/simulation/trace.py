"""The record of a simulated run, as a hash by which two runs are compared."""

from __future__ import annotations

import hashlib
from array import array
from asyncio import Task
from functools import partial
from typing import Any

_NAMES_AT_ONCE = 8192


class Trace:
    """Hashes events: each is a virtual time and two names. `record` is called for every callback, so it is short.

    Attributes:
        log: None, or a list to which the events are added too, in pieces; `hexdigest` adds the rest.
    """

    def __init__(self) -> None:
        self.log: list[tuple[float, str, str]] | None = None
        # Apart, so that the result does not depend on where the events were cut into pieces.
        self._hash_of_times = hashlib.blake2b()
        self._hash_of_names = hashlib.blake2b()
        self._times = array("d")
        self._names: list[str] = []

    def record(self, now: float, owner: str, event: str) -> None:
        names = self._names
        names.append(owner)
        names.append(event)
        self._times.append(now)
        if len(names) > _NAMES_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        if self.log is not None:
            self.log.extend(zip(self._times, self._names[::2], self._names[1::2], strict=True))
        self._hash_of_times.update(self._times.tobytes())
        self._hash_of_names.update("\n".join([*self._names, ""]).encode())
        del self._times[:], self._names[:]

    def hexdigest(self) -> str:
        """Returns the hash of all events so far."""
        self._flush()
        both = self._hash_of_times.digest() + self._hash_of_names.digest()
        return hashlib.blake2b(both, digest_size=16).hexdigest()


def name_of(callback: Any) -> str:
    """Returns a name that is the same in every run."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, Task):
        return task.get_name()
    while isinstance(callback, partial):
        callback = callback.func
    return getattr(callback, "__qualname__", None) or type(callback).__qualname__
