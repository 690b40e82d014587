"""Runs a system behind a script or a command, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar, cast

from blockyard.client.retry import RetryPolicy
from blockyard.local.model_manager import managed_models
from blockyard.local.supervisor import StartError, Supervisor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from blockyard.local.local_system import LocalSystem

T = TypeVar("T")
# Retries for as long as a service that died takes to come back.
PATIENT = RetryPolicy(max_attempts=30, max_delay_seconds=1.0)
# Enough to read the largest models from a disk.
START_SECONDS = 1800.0
# Settings of a system that serves its starter alone: free ports, and a log of errors.
PRIVATE = {
    "grpc_port": 0,
    "http_port": 0,
    "admin_port": 0,
    "scheduler_metrics_port": -1,
    "worker_metrics_port": -1,
    "log_level": "error",
}


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201


class RunningSystem:
    """A supervised system on an event loop in its own thread, so that a script needs no loop."""

    def __init__(self, local: LocalSystem, write_line: Callable[[str], None] | None = None) -> None:
        """Takes a system to run. `write_line`: called with every line of the services; None: standard error."""
        self.local = local
        self._write_line = write_line or _print
        self._loop = asyncio.new_event_loop()
        # A daemon thread, since the interpreter joins other threads before it calls the finalizer that stops this one.
        # It lives as long as the child processes: they get SIGTERM when the thread that started them ends.
        self._thread = threading.Thread(target=self._loop.run_forever, name="blockyard-system", daemon=True)
        self._supervisor: Supervisor | None = None
        self._managing = AsyncExitStack()

    def start(
        self, timeout_seconds: float = START_SECONDS, on_wait: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Starts the services and waits until all replicas are ready; raises StartError.

        `on_wait` is called on the loop again and again until then.
        """
        self._thread.start()
        try:
            self.run(self._start(timeout_seconds, on_wait))
        except BaseException:
            self.stop()
            raise

    async def _start(self, timeout_seconds: float, on_wait: Callable[[], Awaitable[None]] | None) -> None:
        async def is_ready() -> bool:
            if await self.local.are_all_ready():
                return True
            if on_wait is not None:
                await on_wait()
            return False

        await self.local.prepare(self._write_line)
        self._supervisor = Supervisor(
            self.local.make_services(),
            is_ready,
            write_line=self._write_line,
            environment=self.local.make_environment(),
        )
        try:
            async with asyncio.timeout(timeout_seconds):
                is_started = await self._supervisor.start()
        except TimeoutError:
            missing = await self.local.find_missing()
            raise StartError(f"the system was not ready after {timeout_seconds:g} s: {missing}") from None
        if not is_started:
            raise StartError("the system stopped before it was ready")
        await self._managing.enter_async_context(managed_models(self.local, self._supervisor))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on the loop and returns its result; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Stops the services, the loop and its thread."""
        if not self._thread.is_alive():
            return
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        await self._managing.aclose()
        if self._supervisor is not None:
            await self._supervisor.stop()
        await self.local.close()
        others = asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
