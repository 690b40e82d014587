"""Calls the operations of extensions, between two steps.

Lives in the event loop; all work is the device thread's. Knows no messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from blockyard.contract.diagnostics import DEFAULT_SECONDS, MAX_SECONDS
from blockyard.contract.workers import WorkerState
from blockyard.errors import BlockyardError, Reason, Violation, invalid, quote
from blockyard.panics import panics_as_errors
from blockyard.telemetry import EventLogger
from worker_service.operations.diagnostics import Diagnostics

if TYPE_CHECKING:
    from worker_service.operations.extensions import Operation, WorkerExtension
    from worker_service.worker import Worker

log = EventLogger(__name__)

T = TypeVar("T")
_WITH_DEVICE = tuple(state for state in WorkerState if state is not WorkerState.CREATED)


class WorkerOperations:
    def __init__(self, worker: Worker, extensions: Mapping[str, WorkerExtension]) -> None:
        """`extensions`: by their names; `Diagnostics` joins them."""
        self._worker = worker
        diagnostics = Diagnostics(worker)
        self.extensions: Mapping[str, WorkerExtension] = {diagnostics.name: diagnostics, **extensions}

    async def call(self, name: str, operation: str, payload: bytes) -> bytes:
        """Runs an operation of an extension between two steps; see `WorkerService.CallExtension` for its errors."""
        self._worker.require(*_WITH_DEVICE)
        function, title = self._find(name, operation), f"{name}.{operation}"
        result = await self._do(title, lambda: function(payload))
        if isinstance(result, Generator):
            result = await self._finish(title, result)
        if isinstance(result, bytes):
            return result
        raise BlockyardError(Reason.EXTENSION_FAILED, f"{title} returned {type(result).__name__}, not bytes")

    async def _finish(self, title: str, pieces: Generator[None, None, object]) -> object:
        """Runs an operation piece by piece, and returns its result."""

        def do_piece() -> tuple[object, ...]:
            try:
                next(pieces)
            except StopIteration as end:
                return (end.value,)
            return ()

        while not (result := await self._do(title, do_piece)):
            pass
        return result[0]

    async def _do(self, title: str, work: Callable[[], T]) -> T:
        """Runs a piece of an operation; raises BlockyardError EXTENSION_FAILED for an error of the extension's code."""

        def guarded() -> T:
            try:
                with panics_as_errors():
                    return work()
            except BlockyardError:
                raise
            except Exception as error:
                log.exception("an extension failed", operation=title)
                problem = f"{title} raised {type(error).__name__}: {error}"
                raise BlockyardError(Reason.EXTENSION_FAILED, problem) from None

        return await self._between_steps(guarded)

    def _find(self, name: str, operation: str) -> Operation:
        extension = self.extensions.get(name)
        if extension is None:
            known = ", ".join(sorted(self.extensions))
            raise invalid([Violation("extension", f"{quote(name)} is unknown; the extensions are: {known}")])
        if operation not in extension.operations:
            known = ", ".join(sorted(extension.operations)) or "none"
            raise invalid([Violation("operation", f"{quote(operation)} is unknown to {name}; it has: {known}")])
        return extension.operations[operation]

    async def _between_steps(self, work: Callable[[], T]) -> T:
        """Runs a piece of work in the device thread, unless its caller has left before it begins."""
        is_wanted = True

        def piece() -> T | None:
            return work() if is_wanted else None

        try:
            result = await self._worker.run(piece)
        finally:
            is_wanted = False
        return result  # type: ignore[return-value]


@asynccontextmanager
async def deadline(seconds: float | None) -> AsyncGenerator[None]:
    """Gives an operation its time, None: the default. Raises BlockyardError OPERATION_DEADLINE or FIELD_INVALID."""
    seconds = DEFAULT_SECONDS if seconds is None else seconds
    if not 0 < seconds <= MAX_SECONDS:
        raise invalid([Violation("timeout", f"must be above 0 and at most {MAX_SECONDS:g} s")])
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise BlockyardError(Reason.OPERATION_DEADLINE, f"the operation took longer than {seconds:g} s") from None
