"""The one thread in which all torch work runs, fed in order. The event loop stays free to answer.

Knows nothing about its jobs. An exit or a panic in this thread ends the process, which cannot work without it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from blockyard.panics import panics_as_errors
from blockyard.service.roots import make_thread
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard_kernels.launching import Launched

log = EventLogger(__name__)
T = TypeVar("T")


class StepJob:
    """A job that executes a step: callbacks may be held until it computes."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __call__(self) -> None:
        self._work()


class DeviceThread:
    """A thread that runs jobs one after another."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        # Unlike queue.Queue it wakes its reader without a lock written in Python.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_jobs = 0
        # Work that a job left for the moment at which the next one computes, with the number of the job.
        self._held: deque[tuple[int, Callable[[], None]]] = deque()
        self._thread = make_thread(self._run, "device")
        # A second thread that waits for asynchronous work on the device.
        self._launched: queue.SimpleQueue[tuple[Launched, Callable[[], None]]] = queue.SimpleQueue()
        self._waiter = make_thread(self._wait, "device waiter")
        self._gpu: int | None = None
        self.interrupt: Callable[[], None] = _nothing
        """Called after each job that is posted, in the thread that posts it: a job that waits for more ends then."""

    @property
    def may_wait(self) -> bool:
        """Whether the running job may wait for more work: no other job waits, and it runs in this thread."""
        return self._jobs.empty() and threading.current_thread() is self._thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Ends the thread after the waiting jobs, and returns whether it ended within `seconds`."""
        self._jobs.put(None)
        self.interrupt()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def when_ready(self, launched: Launched, job: Callable[[], None]) -> None:
        """Queues a job as soon as some asynchronous work on the device is ready. Called in the device thread."""
        if not self._waiter.is_alive():
            # Each thread has a current GPU of its own, which is the first one until it is set.
            if torch.cuda.is_initialized():
                self._gpu = torch.cuda.current_device()
            self._waiter.start()
        self._launched.put((launched, job))

    def _wait(self) -> None:
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        while True:
            launched, job = self._launched.get()
            # An error is reported when the job is finished.
            with suppress(Exception):
                launched.wait()
            self.post(job)

    def hold(self, callback: Callable[[], None]) -> None:
        """Calls back when the next step computes, at its end at the latest; at once if no step is the next job.

        Called by a job. A thread that is woken takes Python's lock, which the next step needs until it computes.
        """
        self._held.append((self._num_jobs, callback))
        if self._jobs.empty():
            self.let_go()

    def let_go(self, before_job: float = inf) -> None:
        """Calls back what jobs held, or what those before a job did. Called by a step that computes next."""
        while self._held and self._held[0][0] < before_job:
            try:
                self._held.popleft()[1]()
            except Exception:
                log.exception("a callback of the device thread failed")

    def post(self, job: Callable[[], None]) -> None:
        """Queues a job that reports its result itself."""
        self._jobs.put(job)
        self.interrupt()

    async def run(self, work: Callable[[], T]) -> T:
        """Queues work and waits for its result or exception. Cancelling the wait does not cancel the work."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def job() -> None:
            try:
                with panics_as_errors():
                    result = work()
            except Exception as error:  # noqa: BLE001 - the waiting coroutine gets it
                call_soon(loop, settle, None, error)
            else:
                call_soon(loop, settle, result, None)

        self.post(job)
        return await answer

    def call(self, work: Callable[[], T]) -> T:
        """Queues work and waits for its result or exception, from a thread without an event loop.

        In the device thread itself it calls the work directly.
        """
        if threading.current_thread() is self._thread:
            return work()
        answer: Future[T] = Future()

        def job() -> None:
            try:
                with panics_as_errors():
                    result = work()
            except Exception as error:  # noqa: BLE001 - the waiting thread gets it
                answer.set_exception(error)
            else:
                answer.set_result(result)

        self.post(job)
        return answer.result()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (job := self._jobs.get()) is not None:
            if not isinstance(job, StepJob):
                self.let_go()
            self._num_jobs += 1
            try:
                job()
            except Exception:
                log.exception("a job of the device thread failed")
            self.let_go(self._num_jobs)


def _nothing() -> None: ...


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *arguments: Any) -> None:
    """Calls back in the loop's thread, unless the process has stopped listening."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback, *arguments)
