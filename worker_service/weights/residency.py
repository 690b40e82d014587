"""Sleep, wake-up, reload and update: releases, restores and refills weights and pools between epochs, in place.

Lives in the event loop; all work is the device thread's. Knows no messages.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import psutil
import torch

from blockyard.contract.workers import CacheInfo, MemoryTag, MemoryUse, SleepInfo, WeightsSource, WorkerState
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.paths import wrong_name
from blockyard.telemetry import EventLogger
from worker_service.device import memory
from worker_service.weights.source import Source, open_source, refill
from worker_service.weights.update import MIN_TICKET_BYTES, WeightUpdate, order_heads, tensor_names, wrong_heads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from blockyard_kernels.arena import Arena
    from worker_service.models.loader import RunnableModel
    from worker_service.set_up import SetUp
    from worker_service.steps.step_executor import StepExecutor
    from worker_service.weights.update import TensorHead

log = EventLogger(__name__)

ALL = frozenset(MemoryTag)
LEVELS = (1, 2)
T = TypeVar("T")


class Owner(Protocol):
    """The part of the worker that this module uses."""

    set_up: SetUp

    @property
    def state(self) -> WorkerState: ...

    def lifecycle(self, operation: str, *states: WorkerState) -> AbstractContextManager[None]:
        """Allows one change of state at a time; raises BlockyardError WRONG_STATE in other states."""
        ...

    def require(self, *states: WorkerState) -> None:
        """Raises BlockyardError WRONG_STATE in other states, and while the worker stops."""

    async def run(self, work: Callable[[], T]) -> T:
        """Runs work in the device thread."""
        ...


class Residency:
    def __init__(self, owner: Owner, model_root: Path | None = None) -> None:
        """`model_root`: the folder below which other weights may lie; None: only the loaded model's weights."""
        self._owner = owner
        self._model_root = model_root
        self.update: WeightUpdate | None = None
        """The update in progress: begun, and neither finished nor aborted."""

    @property
    def _state(self) -> SleepInfo:
        return self._owner.set_up.sleep

    def _note(self, **changes: object) -> None:
        set_up = self._owner.set_up
        self._owner.set_up = replace(set_up, sleep=replace(set_up.sleep, **changes))  # type: ignore[arg-type]

    def _parts(self) -> tuple[RunnableModel, StepExecutor]:
        loaded, executor = self._owner.set_up.loaded, self._owner.set_up.executor
        assert loaded is not None
        assert executor is not None
        return loaded, executor

    def _slots(self) -> Arena | None:
        """Returns the arena of the LoRA slots; None without slots."""
        loras = self._owner.set_up.loras
        return None if loras is None else loras.arena

    async def sleep(self, level: int, tags: frozenset[MemoryTag]) -> MemoryUse:
        """Releases memory. A sleeping worker releases the further memory of a higher level.

        Raises BlockyardError WRONG_STATE, FIELD_INVALID or FEATURE_DISABLED.
        """
        with self._owner.lifecycle("Sleep", WorkerState.CACHE_READY, WorkerState.SLEEPING):
            if level not in LEVELS:
                raise invalid([Violation("level", "must be 1 or 2")])
            loaded, executor = self._parts()
            loaded.require_own_code("Sleep")
            if not loaded.can_sleep:
                raise BlockyardError(
                    Reason.FEATURE_DISABLED, "sleep needs a worker that was started with --enable-sleep"
                )
            state, tags, slots = self._state, tags or ALL, self._slots()
            due = tags if level > state.level else tags - state.asleep

            def give_up() -> MemoryUse:
                before = _used_bytes(loaded)
                if MemoryTag.KV_CACHE in due:
                    executor.cache.arena.give_up(keeps=False)
                if MemoryTag.WEIGHTS in due:
                    if level > 1 and not loaded.backend.packs_into_arenas:
                        loaded.model.replace_weights(None)
                        # Otherwise the allocator would keep about half of the dropped weights' memory.
                        memory.give_back(loaded.backend.device)
                    loaded.arena.give_up(keeps=level == 1)
                    if slots is not None:
                        # The next epoch begins with empty slots.
                        slots.give_up(keeps=False)
                used = _used_bytes(loaded)
                return MemoryUse(max(0, before - used), used)

            use = await self._owner.run(give_up)
            is_stale = state.weights_are_stale or (level > 1 and MemoryTag.WEIGHTS in due)
            self._note(level=max(level, state.level), asleep=state.asleep | tags, weights_are_stale=is_stale)
            log.info("asleep", level=self._state.level, freed_bytes=use.freed_bytes, used_bytes=use.used_bytes)
            return use

    async def wake_up(self, tags: frozenset[MemoryTag]) -> SleepInfo:
        """Restores the memory of the named tags, or of all tags. Returns the tags that still sleep.

        Raises BlockyardError WRONG_STATE, FIELD_INVALID for a tag that is awake, or NEVER_FITS.
        """
        with self._owner.lifecycle("WakeUp", WorkerState.SLEEPING, WorkerState.STALE):
            state = self._state
            if awake := sorted(tag.value for tag in tags - state.asleep):
                raise invalid([Violation("tags", f"{', '.join(awake)} is awake")])
            due = tags or state.asleep
            (loaded, executor), slots = self._parts(), self._slots()

            def restore() -> None:
                if MemoryTag.WEIGHTS in due:
                    loaded.arena.restore()
                    if slots is not None:
                        slots.restore()
                if MemoryTag.KV_CACHE in due:
                    executor.cache.arena.restore()

            try:
                await self._owner.run(restore)
            except (MemoryError, RuntimeError) as error:
                if not memory.is_exhausted(error):
                    raise
                raise BlockyardError(
                    Reason.NEVER_FITS,
                    "other processes use the memory that this worker gave up: wake it when they have left",
                ) from None
            asleep = state.asleep - due
            self._note(level=state.level if asleep else 0, asleep=asleep)
            log.info("awake", tags=sorted(tag.value for tag in due), asleep=sorted(tag.value for tag in asleep))
            return self._state

    async def reload(self, wanted: WeightsSource, on_progress: Callable[[int, int], None]) -> SetUp:
        """Reloads the weights; calls `on_progress` in the device thread. Continues to the end if its caller leaves.

        Raises BlockyardError FIELD_INVALID for a wrong name, or MODEL_NOT_LOADED. A fault that the folder already shows
        is raised before any change. During the reload, and after a later fault, the worker is STALE.
        """
        if wanted.version and (wrong := wrong_name(wanted.version)):
            raise invalid([Violation("version", wrong)])
        with self._owner.lifecycle("ReloadWeights", WorkerState.SLEEPING, WorkerState.STALE, WorkerState.CACHE_READY):
            self._require_weights("ReloadWeights")
            loaded, source = self._parts()[0], self._owner.set_up.source
            loaded.require_own_code("ReloadWeights")

            def open_files() -> Source:
                return open_source(loaded, source, (wanted.model, wanted.revision), self._model_root, on_progress)

            files = await self._owner.run(open_files)
            self._forget_update()
            self._note(weights_are_stale=True)
            self._take(*await self._build(files, wanted.version))
            log.info("weights reloaded", model=wanted.model or "as before", version=wanted.version)
            return self._owner.set_up

    def _require_weights(self, operation: str) -> None:
        """Raises BlockyardError WRONG_STATE if the weights are asleep."""
        if MemoryTag.WEIGHTS in self._state.asleep:
            raise BlockyardError(
                Reason.WRONG_STATE, f"the worker is SLEEPING, its weights too: wake them before {operation}"
            )

    # Live updates.

    def begin_update(self, version: str, ticket: bytes, heads: Sequence[TensorHead]) -> list[int]:
        """Begins an update, and returns the indices of the heads in the order in which their bytes must be sent.

        Raises BlockyardError FIELD_INVALID with all faults, or WRONG_STATE; both before any change.
        """
        with self._owner.lifecycle("BeginWeightUpdate", WorkerState.CACHE_READY, WorkerState.STALE):
            loaded = self._parts()[0]
            loaded.require_own_code("BeginWeightUpdate")
            wrong = wrong_heads(loaded, heads)
            wrong += [Violation("version", problem)] if (problem := wrong_name(version)) else []
            wrong += (
                []
                if len(ticket) >= MIN_TICKET_BYTES
                else [Violation("ticket", f"must have at least {MIN_TICKET_BYTES} bytes")]
            )
            if wrong:
                raise invalid(wrong)
            order = order_heads(loaded, heads)
            self._forget_update()
            self.update = WeightUpdate(version, ticket, heads, order, tensor_names(loaded))
            self._note(weights_are_stale=True)
            log.info("an update begins", version=version, num_tensors=len(order))
            return order

    async def receive_update(self, ticket: bytes, pieces: AsyncIterator[tuple[int, bytes]]) -> WeightUpdate:
        """Receives all bytes of the current update as (index of the tensor, bytes), and returns the update.

        Raises BlockyardError PERMISSION_DENIED, WRONG_STATE, or FIELD_INVALID if the bytes do not match the heads.
        """
        with self._owner.lifecycle("UpdateWeights", WorkerState.STALE):
            update = self._require_update()
            update.use(ticket)
            building = asyncio.create_task(self._build(update, update.version))
            feeding = asyncio.create_task(update.feed(pieces))
            try:
                await asyncio.wait({building, feeding}, return_when=asyncio.FIRST_EXCEPTION)
                if not building.done() or building.exception() is None:
                    feeding.result()
                update.renewed = building.result()
                return update
            except BaseException as error:
                feeding.cancel()
                update.fail(error)
                await asyncio.gather(building, feeding, return_exceptions=True)
                log.warning("an update was interrupted", version=update.version, reason=str(error))
                raise
            finally:
                update.is_over.set()

    async def finish_update(self, version: str) -> SetUp:
        """Waits until all bytes of the update are received, and makes them the weights.

        Raises BlockyardError WRONG_STATE if the update was interrupted, or there is no update.
        """
        loaded = self._owner.set_up.loaded
        if not self._state.weights_are_stale and loaded is not None and version and loaded.version == version:
            return self._owner.set_up
        update = self._require_update()
        if update.version != version:
            raise invalid([Violation("version", f"does not match the update's version {update.version}")])
        await update.is_over.wait()
        with self._owner.lifecycle("FinishWeightUpdate", WorkerState.STALE):
            update.require_whole()
            assert update.renewed is not None
            self._take(*update.renewed)
            self.update = None
            log.info("the weights are updated", version=version, num_bytes=update.num_bytes)
            return self._owner.set_up

    def _require_update(self) -> WeightUpdate:
        if self.update is None:
            raise BlockyardError(Reason.WRONG_STATE, f"the worker is {self._owner.state.value}: no update was begun")
        return self.update

    def _forget_update(self) -> None:
        if self.update is not None:
            self.update.is_over.set()
            self.update = None

    async def _build(self, source: Source, version: str) -> tuple[RunnableModel, CacheInfo]:
        loaded, executor = self._parts()
        cache = self._owner.set_up.cache
        assert cache is not None
        return await self._owner.run(lambda: refill(executor, loaded, cache, source, version))

    def _take(self, loaded: RunnableModel, cache: CacheInfo) -> None:
        self._owner.set_up = replace(self._owner.set_up, loaded=loaded, cache=cache)
        self._note(weights_are_stale=False)


def _used_bytes(loaded: RunnableModel) -> int:
    """Returns the device memory that this process uses, in bytes; on a CPU all of its memory."""
    device = loaded.backend.device
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    free, total = torch.cuda.mem_get_info(device)
    return total - free
