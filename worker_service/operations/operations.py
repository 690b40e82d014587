"""Inspects the model, does the operations of the closed list, and calls extensions: in pieces between two steps.

Lives in the event loop; all work is the device thread's. Knows no messages.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from blockyard.contract.parallel import ALONE
from blockyard.contract.workers import WorkerState
from blockyard.errors import BlockyardError, Reason, Violation, invalid, quote
from blockyard.panics import panics_as_errors
from blockyard.telemetry import EventLogger
from worker_service.device import memory
from worker_service.operations import measurements
from worker_service.operations.reports import (
    BandwidthReport,
    GarbageReport,
    GroupReport,
    MemoryReport,
    NumericsReport,
    StrangeTensor,
    WeightNorm,
    WeightNormsReport,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    import torch

    from worker_service.models.loader import RunnableModel
    from worker_service.operations.extensions import WorkerExtension
    from worker_service.worker import Worker

log = EventLogger(__name__)

T = TypeVar("T")
# States with a model whose weights can be read.
_READABLE = WorkerState.LOADED, WorkerState.CACHE_READY, WorkerState.RUNNING
_WITH_DEVICE = tuple(state for state in WorkerState if state is not WorkerState.CREATED)
DEFAULT_SECONDS, MAX_SECONDS = 30.0, 120.0
DEFAULT_BUFFER_BYTES, MAX_BUFFER_BYTES = 1 << 26, 1 << 30
# Blocks of one piece: few, so that a step that waits for the piece is not late by much.
BLOCKS_OF_A_PIECE = 64


class WorkerOperations:
    """The operations of one worker that operators call."""

    def __init__(self, worker: Worker, extensions: Mapping[str, WorkerExtension]) -> None:
        """`extensions`: by their names."""
        self._worker = worker
        self.extensions = extensions

    async def inspect(self) -> str:
        """Describes the network, in lines; raises BlockyardError WRONG_STATE."""
        loaded = self._require_model()
        return await self._worker.run(lambda: loaded.model.describe(loaded.backend.name))

    async def check_numerics(self) -> NumericsReport:
        """Looks for NaN and infinities in weights and filled blocks."""
        loaded, executor = self._require_model(), self._worker.set_up.executor
        num_tensors, strange, strange_blocks = 0, list[StrangeTensor](), list[int]()
        for module in loaded.model.modules():
            number, found = await self._between_steps(lambda module=module: measurements.find_strange(module))
            num_tensors, strange = num_tensors + number, strange + found
        if executor is None:
            return NumericsReport(num_tensors, 0, tuple(strange), ())
        block_ids = await self._between_steps(executor.batch.filled_blocks)
        for first in range(0, len(block_ids), BLOCKS_OF_A_PIECE):
            piece = block_ids[first : first + BLOCKS_OF_A_PIECE]
            strange_blocks += await self._between_steps(
                lambda piece=piece: measurements.find_strange_blocks(executor.cache, piece)
            )
        return NumericsReport(num_tensors, len(block_ids), tuple(strange), tuple(strange_blocks))

    async def measure_bandwidth(self, num_bytes: int) -> BandwidthReport:
        """Measures copies between buffers of so many bytes; raises BlockyardError FIELD_INVALID or NEVER_FITS."""
        device = self._require_device()
        size = num_bytes or DEFAULT_BUFFER_BYTES
        if size > MAX_BUFFER_BYTES:
            raise invalid([Violation("num_bytes", f"must be at most {MAX_BUFFER_BYTES}")])
        if 3 * size > memory.room_for_weights(device):
            raise BlockyardError(Reason.NEVER_FITS, f"there is no room for buffers of {size} bytes")
        ways = await self._between_steps(lambda: list(measurements.copies(device, size)))
        measured = [await self._between_steps(lambda way=way: measurements.measure_copy(*way)) for way in ways]
        return BandwidthReport(tuple(measured))

    async def weight_norms(self, names: Sequence[str]) -> WeightNormsReport:
        """Computes norms of tensors, by name; none: of all. Raises BlockyardError FIELD_INVALID for unknown ones."""
        loaded, wanted = self._require_model(), frozenset(names)
        if unknown := sorted(wanted.difference(loaded.tensors)):
            raise invalid([Violation("names", f"the model has no tensor {name!r}") for name in unknown])
        norms: list[WeightNorm] = []
        for module in loaded.model.modules():
            if not wanted or wanted & module.tensor_names:
                norms += await self._between_steps(lambda module=module: measurements.measure_norms(module, wanted))
        return WeightNormsReport(tuple(norms))

    async def memory_summary(self) -> MemoryReport:
        """Reads what memory holds."""
        device = self._require_device()
        return await self._between_steps(lambda: measurements.summarize_memory(self._worker.set_up, device))

    async def describe_group(self) -> GroupReport:
        """Returns the worker's place in its replica, and its group."""
        self._require_device()
        set_up, group = self._worker.set_up, self._worker.membership.info
        parallel = set_up.choice.parallel if set_up.choice else ALONE
        layers = set_up.loaded.model.share.layers if set_up.loaded else range(0)
        return GroupReport(
            rank=parallel.rank,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
            epoch=group.epoch if group else 0,
            problem=group.problem if group else "",
            first_layer=layers.start,
            num_layers=len(layers),
        )

    async def collect_garbage(self) -> GarbageReport:
        """Frees what is kept for later."""
        device = self._require_device()
        return await self._between_steps(lambda: measurements.collect_garbage(device))

    async def call_extension(self, name: str, operation: str, payload: bytes) -> bytes:
        """Runs an operation of an extension between two steps; see `WorkerService.CallExtension` for its errors."""
        self._worker.require(*_READABLE)
        function = self._find(name, operation)

        def call() -> bytes:
            try:
                with panics_as_errors():
                    result = function(payload)
                if isinstance(result, bytes):
                    return result
            except BlockyardError:
                raise
            except Exception as error:
                log.exception("an extension failed", extension=name, operation=operation)
                problem = f"{name}.{operation} raised {type(error).__name__}: {error}"
                raise BlockyardError(Reason.EXTENSION_FAILED, problem) from None
            problem = f"{name}.{operation} returned {type(result).__name__}, not bytes"
            raise BlockyardError(Reason.EXTENSION_FAILED, problem)

        return await self._between_steps(call)

    def _find(self, name: str, operation: str) -> Callable[[bytes], bytes]:
        extension = self.extensions.get(name)
        if extension is None:
            there = ", ".join(sorted(self.extensions)) or "none: see --worker-extension"
            raise invalid([Violation("extension", f"{quote(name)} is unknown; known are: {there}")])
        if operation not in extension.operations:
            there = ", ".join(sorted(extension.operations)) or "none"
            raise invalid([Violation("operation", f"{quote(operation)} is unknown to {name}; known are: {there}")])
        return extension.operations[operation]

    def _require_model(self) -> RunnableModel:
        self._worker.require(*_READABLE)
        assert self._worker.set_up.loaded is not None
        return self._worker.set_up.loaded

    def _require_device(self) -> torch.device:
        self._worker.require(*_WITH_DEVICE)
        assert self._worker.set_up.choice is not None
        return self._worker.set_up.choice.device

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
