"""Starts threads and tasks that nobody waits for, such that a failure of one ends the process.

A process that went on without such a thread would report ready and do nothing. A process that ends is restarted by its
supervisor, and the others recover. All other threads and tasks are awaited by some code, which gets their errors;
docs/concepts/roots.md lists both kinds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

log = EventLogger(__name__)

T = TypeVar("T")
EXIT_CODE = 1
"""The exit code of a process that an uncaught exception ends."""


def end_process(exit_code: int) -> None:
    """Ends the process at once, whatever its threads do."""
    logging.shutdown()
    os._exit(exit_code)


def make_thread(work: Callable[[], None], name: str) -> threading.Thread:
    """Creates a daemon thread; any exception in it ends the process."""

    def run() -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the root of the thread
            _fail("thread", name)

    return threading.Thread(target=run, name=name, daemon=True)


def start_task(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Starts a task; an exception in it ends the process, a cancellation does not."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_require_no_error)
    return task


def _require_no_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        try:
            raise error
        except BaseException:  # noqa: BLE001 - re-raised so that the log has its stack
            _fail("task", task.get_name())


def _fail(kind: str, name: str) -> None:
    log.exception(f"a {kind} failed: the process ends", name=name, exit_code=EXIT_CODE)
    end_process(EXIT_CODE)
