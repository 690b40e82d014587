"""Handles SIGTERM and SIGINT of a service: the first lets it end well, the second ends it at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from blockyard.service.roots import make_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A loop that does not turn for so long has to be ended from outside of it.
STUCK_SECONDS = 10.0


def on_stop_signal(stop: Callable[[], None], hurry: Callable[[], None] | None = None) -> None:
    """Has the running loop, in the main thread, call `stop` at the first signal, and `hurry` at each later one.

    Without `hurry` the second signal ends the process. A loop that is stuck at the first one ends it after
    STUCK_SECONDS.
    """
    loop = asyncio.get_running_loop()
    is_taken, signals = threading.Event(), SimpleQueue[int]()
    # Its thread is started now: to start one takes locks, which the handler of a signal may find taken.
    make_thread(partial(_watch, signals, is_taken), "stop signals").start()

    def on_turn() -> None:
        is_taken.set()
        stop()

    def on_first(number: int, frame: FrameType | None) -> None:
        for each in STOP_SIGNALS:
            # Python's own handler of SIGINT would only raise, and wait for the interpreter to do so.
            signal.signal(each, signal.SIG_DFL if hurry is None else on_later)
        signals.put(number)
        call(on_turn, number)

    def on_later(number: int, frame: FrameType | None) -> None:
        assert hurry is not None
        call(hurry, number)

    def call(callback: Callable[[], None], number: int) -> None:
        if loop.is_closed():
            # Nothing is left that could end well.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        loop.call_soon_threadsafe(callback)

    # Not as the loop's own: then the second signal would wait for the loop to turn after the first.
    for number in STOP_SIGNALS:
        signal.signal(number, on_first)


def _watch(signals: SimpleQueue[int], is_taken: threading.Event) -> None:
    """Waits for a signal, and ends the process if its loop does not take it."""
    number = signals.get()
    if not is_taken.wait(STUCK_SECONDS):
        os._exit(128 + number)
