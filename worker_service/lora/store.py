"""The host's cache of adapters: loaded adapters, adapters that are being read, and pinned adapters.

Lives in the event loop; reads in a thread of its own, with a lower priority than the threads of steps. The scheduler
decides which adapters are dropped, since only it knows which adapters its next steps will use.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from blockyard.capacity.adapters import check_adapters
from blockyard.contract.workers import NO_LORAS, LoraLimits
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.model_config.fields import unusable
from blockyard.paths import find_below, wrong_name, wrong_path
from blockyard.service import faults
from blockyard.telemetry import EventLogger
from blockyard_kernels.select import make_arena
from worker_service.lora.reader import AdapterReader
from worker_service.lora.slots import AdapterSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from blockyard_kernels.arena import Arena
    from worker_service.lora.adapter import AdapterWeights, LoraRequest
    from worker_service.models.loader import RunnableModel

log = EventLogger(__name__)

NICENESS = 5


class LoraStore:
    """The adapters of one worker.

    Attributes:
        adapters: the loaded adapters, by lora_id.
        on_loaded: called with the seconds of a load.
        on_removed: called when an adapter was removed.
    """

    def __init__(self, reader: AdapterReader, limits: LoraLimits, root: Path | None) -> None:
        """`root`: the folder below which adapters must lie; None: no adapter is read."""
        self.limits = limits
        self.adapters: dict[int, AdapterWeights] = {}
        self.pinned: set[int] = set()
        self.on_loaded: Callable[[float], None] = lambda seconds: None
        self.on_removed: Callable[[], None] = lambda: None
        self._slots = AdapterSlots()
        self._reader = reader
        self._root = root
        self._reading: dict[int, tuple[LoraRequest, asyncio.Task[AdapterWeights]]] = {}
        self._thread = ThreadPoolExecutor(1, "adapter loader", initializer=be_modest)

    async def add(self, request: LoraRequest) -> AdapterWeights:
        """Reads an adapter, unless it is loaded. The load continues if the caller leaves, but not if it is cancelled.

        Raises BlockyardError.
        """
        violations = list(wrong_request(request))
        if violations:
            raise invalid(violations)
        known = self.adapters.get(request.lora_id)
        if known is not None:
            _require_same(known.request, request)
            return known
        if request.lora_id not in self._reading:
            self._begin(request)
        asked, task = self._reading[request.lora_id]
        _require_same(asked, request)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            message = f"adapter {request.lora_id} was removed while it was read"
            raise BlockyardError(Reason.WRONG_STATE, message) from None

    def _begin(self, request: LoraRequest) -> None:
        num_loras, most = len(self.adapters) + len(self._reading), self.limits.max_cpu_loras
        if num_loras >= most:
            message = f"the cache has {num_loras} adapters, as many as max_cpu_loras allows: remove one first"
            raise BlockyardError(Reason.WRONG_STATE, message)
        task = asyncio.create_task(self._read(request))
        self._reading[request.lora_id] = (request, task)
        # Reads the exception, which asyncio would otherwise report as lost if the caller has left.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _read_folder(self, request: LoraRequest) -> AdapterWeights:
        """Finds and reads an adapter, in the loader's thread: a file system may take its time for either."""
        if self._root is None:
            raise BlockyardError(
                Reason.FEATURE_DISABLED, "adapters need a worker that was started with --worker-lora-root"
            )
        folder = find_below(self._root, request.path, "path", "--worker-lora-root")
        return self._reader.read(request, folder, self._root)

    async def _read(self, request: LoraRequest) -> AdapterWeights:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            faults.reach(faults.BEFORE_LORA)
            adapter = await loop.run_in_executor(self._thread, self._read_folder, request)
        except Exception as error:
            log.error("an adapter was not loaded", lora_id=request.lora_id, name=request.name, reason=str(error))
            raise
        finally:
            # The adapter may have been removed while it was read.
            if self._reading.get(request.lora_id, (None, None))[1] is asyncio.current_task():
                del self._reading[request.lora_id]
        self.adapters[request.lora_id] = adapter
        seconds = loop.time() - begin
        self.on_loaded(seconds)
        log.info(
            "adapter loaded",
            lora_id=request.lora_id,
            lora_name=request.name,
            rank=adapter.rank,
            virtual_tokens=adapter.num_virtual_tokens,
            bytes=adapter.num_bytes,
            seconds=round(seconds, 3),
        )
        return adapter

    @property
    def arena(self) -> Arena | None:
        return self._reader.arena

    @property
    def free_bytes(self) -> int:
        """Bytes of device memory that further adapters may take outside of the slots."""
        return (self.limits.max_cpu_loras - len(self.adapters)) * self._reader.max_adapter_bytes

    def make_slots(self) -> AdapterSlots:
        limits = self.limits
        self._slots = AdapterSlots(
            limits.max_loras, self.adapters, self._reader.write, limits.max_prompt_adapter_tokens
        )
        return self._slots

    @property
    def num_resident(self) -> int:
        return int(np.count_nonzero(self._slots.lora_ids))

    def pin(self, lora_id: int, *, pinned: bool) -> None:
        """Sets whether an adapter may be removed; raises BlockyardError WRONG_STATE."""
        if lora_id not in self.adapters:
            raise BlockyardError(Reason.WRONG_STATE, f"adapter {lora_id} is not in the cache")
        (self.pinned.add if pinned else self.pinned.discard)(lora_id)

    @property
    def reading(self) -> list[int]:
        return sorted(self._reading)

    def stop_reading(self, lora_id: int) -> None:
        """Cancels the load of an adapter; does nothing if it is loaded already.

        The thread still reads the adapter to its end before it reads the next one.
        """
        _, task = self._reading.pop(lora_id, (None, None))
        if task is not None:
            task.cancel()
            log.info("reading an adapter was cancelled", lora_id=lora_id)

    def remove(self, lora_id: int) -> None:
        """Forgets an adapter that no slot holds; raises BlockyardError WRONG_STATE."""
        if lora_id in self.pinned:
            raise BlockyardError(Reason.WRONG_STATE, f"adapter {lora_id} is pinned")
        adapter = self.adapters.pop(lora_id, None)
        if adapter is not None:
            self.on_removed()
            log.info("adapter removed", lora_id=lora_id, lora_name=adapter.request.name)


def make_loras(loaded: RunnableModel, limits: LoraLimits, root: Path | None) -> LoraStore | None:
    """Makes the cache and the slots of adapters if adapters are allowed; raises BlockyardError MODEL_NOT_LOADED."""
    if limits == NO_LORAS:
        return None
    loaded.require_own_code("adapters (--max-loras)")
    check_adapters(loaded.config, limits)
    takes_lora = limits.max_lora_rank > 0
    if loaded.backend.lora is None and takes_lora:
        instead = "start without --max-loras, or with --max-lora-rank 0 for soft prompts alone"
        raise unusable(f"the kernels {loaded.backend.name} take no LoRA adapters: {instead}")
    arena = make_arena(loaded.backend.device, can_be_given_up=loaded.can_sleep) if takes_lora else None
    reader = AdapterReader(loaded.model, loaded.backend.lora, limits, arena)
    return LoraStore(reader, limits, root)


def wrong_request(request: LoraRequest) -> Iterable[Violation]:
    """Yields the faults of a scheduler's request for an adapter."""
    if request.lora_id < 1:
        yield Violation("lora_id", "must be at least 1")
    if wrong := wrong_name(request.name):
        yield Violation("name", wrong)
    if wrong := wrong_path(request.path):
        yield Violation("path", wrong)


def _require_same(known: LoraRequest, asked: LoraRequest) -> None:
    if known != asked:
        message = f"{asked.lora_id} belongs to adapter {known.name} in {known.path}, and is never used again"
        raise invalid([Violation("lora_id", message)])


def be_modest() -> None:
    """Lowers the calling thread's scheduling weight to a third of the other threads' weight.

    A lower weight would be harmful: while the thread holds the GIL without running, all other threads wait for it.
    Measured with idle priority and four busy processes on two cores: the worker waited for up to three seconds.
    """
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
