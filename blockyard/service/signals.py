"""Handles a service's SIGTERM and SIGINT: the first stops it gracefully, the second ends it at once."""

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
# A process whose event loop is stuck for this long after a signal is ended by a thread.
STUCK_SECONDS = 10.0


def on_stop_signal(stop: Callable[[], None], hurry: Callable[[], None] | None = None) -> None:
    """Makes the running loop call `stop` at the first signal and `hurry` at each later one. Main thread only.

    Without `hurry` the second signal ends the process. If the loop is stuck at the first signal, the process ends after
    STUCK_SECONDS.
    """
    loop = asyncio.get_running_loop()
    is_taken, signals = threading.Event(), SimpleQueue[int]()
    # Start the thread now: starting one takes locks, which a signal handler may find taken.
    make_thread(partial(_watch, signals, is_taken), "stop signals").start()

    def on_turn() -> None:
        is_taken.set()
        stop()

    def on_first(number: int, frame: FrameType | None) -> None:
        for each in STOP_SIGNALS:
            # Not Python's own SIGINT handler: it only raises KeyboardInterrupt when the interpreter gets to it.
            signal.signal(each, signal.SIG_DFL if hurry is None else on_later)
        signals.put(number)
        call(on_turn, number)

    def on_later(number: int, frame: FrameType | None) -> None:
        assert hurry is not None
        call(hurry, number)

    def call(callback: Callable[[], None], number: int) -> None:
        if loop.is_closed():
            # The loop has ended already: end the process by the signal.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        loop.call_soon_threadsafe(callback)

    # Not loop.add_signal_handler: the second signal would wait until the loop runs again.
    for number in STOP_SIGNALS:
        signal.signal(number, on_first)


def _watch(signals: SimpleQueue[int], is_taken: threading.Event) -> None:
    """Waits for a signal, and ends the process if the event loop does not handle it in time."""
    number = signals.get()
    if not is_taken.wait(STUCK_SECONDS):
        os._exit(128 + number)
