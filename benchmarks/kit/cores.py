"""Gives the measured process a core of its own: on few cores the stand-ins beside it would take its time."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def split_cores() -> tuple[set[int], set[int]]:
    """Returns the core of the measured process, and those of all others; the same where there is only one."""
    first, *others = sorted(os.sched_getaffinity(0))
    return {first}, set(others) or {first}


@contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """Runs this thread, and the threads and processes that it starts inside, on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
