"""Cancels requests in a thread of its own, so that no caller waits."""

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
    """Cancels requests in a thread. When this object or the process ends, the thread first sends what is queued.

    Args:
        send: cancels a list of request ids, within the given number of seconds.
    """

    def __init__(self, send: Callable[[list[str], float], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        # SimpleQueue.put is reentrant: it may be called from a `__del__` during garbage collection.
        self._queue: Queue = SimpleQueue()
        self._finalizer: weakref.finalize[[Queue, threading.Thread], Canceller] | None = None

    def start(self) -> None:
        """Starts the thread unless it runs. Call it before `cancel`."""
        with self._lock:
            if self._finalizer is None:
                thread = threading.Thread(
                    target=_run, args=(self._queue, self._send), name="blockyard-cancel", daemon=True
                )
                thread.start()
                self._finalizer = weakref.finalize(self, _stop, self._queue, thread)

    def cancel(self, request_id: str) -> None:
        """Queues a request to be cancelled and returns at once. May be called from any thread or from `__del__`."""
        self._queue.put(request_id)

    def stop(self) -> None:
        """Ends the thread within a second. May be called more than once."""
        with self._lock:
            finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer()


def _run(queue: Queue, send: Callable[[list[str], float], None]) -> None:
    while (request_id := queue.get()) is not None:
        try:
            send([request_id], CANCEL_SECONDS)
        except Exception:  # a failure must not keep the other requests from being cancelled
            log.exception("a request was not cancelled", request_id=request_id)


def _stop(queue: Queue, thread: threading.Thread) -> None:
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(CANCEL_SECONDS)
