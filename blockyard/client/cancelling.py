"""Cancels requests from a thread of its own, so that nobody waits for it."""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING

from blockyard.client.targets import CANCEL_SECONDS
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable

log = EventLogger(__name__)

Queue = SimpleQueue["str | None"]


class Canceller:
    """Cancels requests in a thread. The thread finishes them before it ends, with this object or with the process.

    Args:
        send: cancels these requests, within so many seconds.
    """

    def __init__(self, send: Callable[[list[str], float], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        # A queue that may be put into anywhere, even where the interpreter collects what was forgotten.
        self._queue: Queue = SimpleQueue()
        self._finalizer: weakref.finalize[[Queue, threading.Thread], Canceller] | None = None

    def start(self) -> None:
        """Starts the thread, unless it runs. To be called before `cancel`."""
        with self._lock:
            if self._finalizer is None:
                thread = threading.Thread(
                    target=_run, args=(self._queue, self._send), name="blockyard-cancel", daemon=True
                )
                thread.start()
                self._finalizer = weakref.finalize(self, _stop, self._queue, thread)

    def cancel(self, request_id: str) -> None:
        """Asks for a request to be cancelled. May be called from anywhere; returns at once."""
        self._queue.put(request_id)

    def stop(self) -> None:
        """Ends the thread, within a second. May be called again."""
        with self._lock:
            finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer()


def _run(queue: Queue, send: Callable[[list[str], float], None]) -> None:
    while (request_id := queue.get()) is not None:
        try:
            send([request_id], CANCEL_SECONDS)
        except Exception:  # of one request: others are cancelled all the same
            log.exception("a request was not cancelled", request_id=request_id)


def _stop(queue: Queue, thread: threading.Thread) -> None:
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(CANCEL_SECONDS)
