"""Gives weights and pools up, takes them again, and fills the weights anew: between epochs, at addresses that stay.

Lives in the event loop; all work is the device thread's. Knows no messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import psutil
import torch

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.telemetry import EventLogger
from worker_service.device import memory
from worker_service.set_up import MemoryTag, State
from worker_service.weights.refill import refill
from worker_service.weights.source import open_source

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from worker_service.models.loader import LoadedModel
    from worker_service.set_up import SetUp, SleepState
    from worker_service.steps.step_executor import StepExecutor
    from worker_service.weights.refill import Source

log = EventLogger(__name__)

ALL = frozenset(MemoryTag)
LEVELS = (1, 2)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of the device that were given up, and those that this process has there still."""

    freed_bytes: int
    used_bytes: int


class Owner(Protocol):
    """The worker, as far as it matters here."""

    set_up: SetUp

    def lifecycle(self, operation: str, *states: State) -> AbstractContextManager[None]:
        """Allows one change of state at a time; raises BlockyardError WRONG_STATE in other states."""
        ...

    async def run(self, work: Callable[[], T]) -> T:
        """Runs work in the device thread."""
        ...


class Residency:
    """The weights and pools of one worker."""

    def __init__(self, owner: Owner, model_root: Path | None = None) -> None:
        """`model_root`: the folder below which other weights may be; None: those of the loaded model alone."""
        self._owner = owner
        self._model_root = model_root

    @property
    def _state(self) -> SleepState:
        return self._owner.set_up.sleep

    def _note(self, **changes: object) -> None:
        set_up = self._owner.set_up
        self._owner.set_up = replace(set_up, sleep=replace(set_up.sleep, **changes))  # type: ignore[arg-type]

    def _parts(self) -> tuple[LoadedModel, StepExecutor]:
        loaded, executor = self._owner.set_up.loaded, self._owner.set_up.executor
        assert loaded is not None
        assert executor is not None
        return loaded, executor

    async def sleep(self, level: int, tags: frozenset[MemoryTag]) -> MemoryUse:
        """Gives memory up; asleep already, it gives up what a higher level does.

        Raises BlockyardError WRONG_STATE, FIELD_INVALID or FEATURE_DISABLED.
        """
        with self._owner.lifecycle("Sleep", State.CACHE_READY, State.SLEEPING):
            if level not in LEVELS:
                raise invalid([Violation("level", "must be 1 or 2")])
            loaded, executor = self._parts()
            if not loaded.can_sleep:
                raise BlockyardError(Reason.FEATURE_DISABLED, "start the worker with --enable-sleep for this")
            state, tags = self._state, tags or ALL
            due = tags if level > state.level else tags - state.asleep

            def give_up() -> MemoryUse:
                before = _used_bytes(loaded)
                if MemoryTag.KV_CACHE in due:
                    executor.cache.arena.give_up(keeps=False)
                if MemoryTag.WEIGHTS in due:
                    if level > 1 and not loaded.backend.packs_into_arenas:
                        loaded.model.replace_weights(None)
                    loaded.arena.give_up(keeps=level == 1)
                used = _used_bytes(loaded)
                return MemoryUse(max(0, before - used), used)

            use = await self._owner.run(give_up)
            is_stale = state.weights_are_stale or (level > 1 and MemoryTag.WEIGHTS in due)
            self._note(level=max(level, state.level), asleep=state.asleep | tags, weights_are_stale=is_stale)
            log.info("asleep", level=self._state.level, freed_bytes=use.freed_bytes, used_bytes=use.used_bytes)
            return use

    async def wake_up(self, tags: frozenset[MemoryTag]) -> SleepState:
        """Takes memory again: all that is asleep, if no tags are named. Returns what is asleep still.

        Raises BlockyardError WRONG_STATE, FIELD_INVALID for a tag that is awake, or NEVER_FITS.
        """
        with self._owner.lifecycle("WakeUp", State.SLEEPING, State.STALE):
            state = self._state
            if awake := sorted(tag.value for tag in tags - state.asleep):
                raise invalid([Violation("tags", f"{', '.join(awake)} is awake")])
            due = tags or state.asleep
            loaded, executor = self._parts()

            def restore() -> None:
                if MemoryTag.WEIGHTS in due:
                    loaded.arena.restore()
                if MemoryTag.KV_CACHE in due:
                    executor.cache.arena.restore()

            try:
                await self._owner.run(restore)
            except (MemoryError, RuntimeError) as error:
                if not memory.is_exhausted(error):
                    raise
                raise BlockyardError(Reason.NEVER_FITS, "others have the memory that is to be taken again") from None
            asleep = state.asleep - due
            self._note(level=state.level if asleep else 0, asleep=asleep)
            log.info("awake", tags=sorted(tag.value for tag in due), asleep=sorted(tag.value for tag in asleep))
            return self._state

    async def reload(self, model: str, revision: str, version: str, on_progress: Callable[[int, int], None]) -> SetUp:
        """Loads the weights anew; calls `on_progress` in the device thread. Goes on to the end if its caller leaves.

        Raises BlockyardError MODEL_NOT_LOADED, before anything is changed where the folder shows it; later the worker
        is STALE, as it is meanwhile.
        """
        with self._owner.lifecycle("ReloadWeights", State.SLEEPING, State.STALE, State.CACHE_READY):
            self.require_weights("ReloadWeights")
            loaded, source = self._parts()[0], self._owner.set_up.source

            def open_files() -> Source:
                return open_source(loaded, source, (model, revision), self._model_root, on_progress)

            files = await self._owner.run(open_files)
            self._note(weights_are_stale=True)
            await self.fill(files, version)
            log.info("weights loaded anew", model=model or "as before", version=version)
            return self._owner.set_up

    def require_weights(self, operation: str) -> None:
        """Raises BlockyardError WRONG_STATE if the weights are asleep."""
        if MemoryTag.WEIGHTS in self._state.asleep:
            raise BlockyardError(
                Reason.WRONG_STATE, f"the worker is SLEEPING, its weights too: wake them before {operation}"
            )

    async def fill(self, source: Source, version: str) -> None:
        """Fills the weights from a source, within a change of state; they are stale if that fails."""
        loaded, executor = self._parts()
        cache = self._owner.set_up.cache
        assert cache is not None
        renewed, facts = await self._owner.run(lambda: refill(executor, loaded, cache, source, version))
        self._owner.set_up = replace(self._owner.set_up, loaded=renewed, cache=facts)
        self._note(weights_are_stale=False)


def _used_bytes(loaded: LoadedModel) -> int:
    """Bytes of the device that this process has: on a processor, all that it has in memory."""
    device = loaded.backend.device
    if device.type == "cpu":
        return psutil.Process().memory_info().rss
    free, total = torch.cuda.mem_get_info(device)
    return total - free
