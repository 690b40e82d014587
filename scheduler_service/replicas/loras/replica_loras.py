"""Keeps the host caches of a replica's workers: which adapters they have, and which leaves for another.

All ranks have the same. The workers know what is loaded; `find_wanted` says what should be. Knows no slots.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from scheduler_service.replicas.loras.lora_link import add_lora, list_loras, pin_lora, remove_lora

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from blockyard.contract.scheduling import Adapter
    from scheduler_service.replicas.rank import Rank

log = EventLogger(__name__)

# How often to look for adapters that can be removed.
TICK_SECONDS = 1.0
# How long to wait before a failed adapter is loaded again.
RETRY_SECONDS = 10.0


class ReplicaLoras:
    """The adapters of one replica.

    Attributes:
        loaded: those that all ranks have, the one that was used least recently first.
        problems: why others could not be loaded, by their numbers.
        num_evicted: adapters that left for others.
        find_wanted: the adapters that there are.
        find_used: those of requests that the replica has.
        on_changed: called when an adapter was loaded, or could not be.
        on_loaded: called with the seconds that a load took.
    """

    def __init__(self, ranks: Sequence[Rank], max_cpu_loras: int) -> None:
        self.loaded: dict[int, Adapter] = {}
        self.problems: dict[int, str] = {}
        self.num_evicted = 0
        self.find_wanted: Callable[[], Collection[Adapter]] = tuple
        self.find_used: Callable[[], Collection[int]] = tuple
        self.on_changed: Callable[[], None] = lambda: None
        self.on_loaded: Callable[[float], None] = lambda seconds: None
        self._ranks = ranks
        self._max_cpu_loras = max_cpu_loras
        # Adapters that were wanted here. Workers may have others of an earlier scheduler, which stay while there is
        # room.
        self._known: set[int] = set()
        # Adapters that requests wait for, in order.
        self._asked: dict[int, None] = {}
        self._retry_at: dict[int, float] = {}
        self._lock = asyncio.Lock()
        self._news = asyncio.Event()

    def has(self, lora_id: int) -> bool:
        """Whether an adapter is loaded, so that it can be put into a slot (0: none, which needs no slot)."""
        return not lora_id or lora_id in self.loaded

    def use(self, lora_id: int) -> None:
        """Notes that a request with an adapter was given to this replica."""
        self.loaded[lora_id] = self.loaded.pop(lora_id)

    def want(self, lora_id: int) -> None:
        """Asks to load an adapter, in place of others if need be."""
        if lora_id not in self._asked:
            self._asked[lora_id] = None
            self.reconsider()

    def reconsider(self) -> None:
        """Makes `keep` look again for adapters to load and remove."""
        self._news.set()

    # While the workers are set up.

    def forget(self) -> None:
        """Forgets what the workers have: they may be gone."""
        self.loaded.clear()
        self.problems.clear()
        self._asked.clear()
        self._retry_at.clear()

    def look(self) -> None:
        """Takes over the adapters that the workers reported last."""
        infos = [rank.worker.lora for rank in self._ranks if rank.worker]
        caches = [{adapter.lora_id: adapter for adapter in info.adapters} if info else {} for info in infos]
        first = caches[0]
        self.loaded = {
            lora_id: adapter
            for lora_id, adapter in first.items()
            if all(lora_id in cache and cache[lora_id].digest == adapter.digest for cache in caches)
        }

    # While they run.

    async def keep(self) -> None:
        """Loads wanted adapters and removes unwanted ones. Runs until it is cancelled."""
        with suppress(BlockyardError):
            async with self._lock:
                await self._drop_strays({adapter.lora_id for adapter in self.find_wanted()})
        while True:
            self._news.clear()
            wanted = {adapter.lora_id: adapter for adapter in self.find_wanted()}
            self._known |= wanted.keys()
            for lora_id in self._known & self.loaded.keys() - wanted.keys() - set(self.find_used()):
                with suppress(BlockyardError):
                    await self.remove(lora_id)
            for adapter in self._find_due(wanted):
                with suppress(BlockyardError):
                    await self.load(adapter)
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._news.wait()

    def _find_due(self, wanted: dict[int, Adapter]) -> list[Adapter]:
        """Finds the adapters to load: those that requests wait for, and others as far as there is room."""
        now = asyncio.get_running_loop().time()
        self._asked = {lora_id: None for lora_id in self._asked if lora_id in wanted and lora_id not in self.loaded}
        asked = [wanted[lora_id] for lora_id in self._asked]
        others = [each for lora_id, each in wanted.items() if lora_id not in self._asked and not self.has(lora_id)]
        others.sort(key=lambda adapter: not adapter.pinned)
        num_free = max(self._max_cpu_loras - len(self.loaded.keys() & wanted.keys()) - len(asked), 0)
        return [each for each in [*asked, *others[:num_free]] if self._retry_at.get(each.lora_id, 0.0) <= now]

    async def load(self, adapter: Adapter) -> Adapter:
        """Loads an adapter at all ranks, unless they have it. Returns it as the workers read it.

        Raises BlockyardError that says which worker cannot, or MODEL_NOT_LOADED if it is another one than before.
        """
        async with self._lock:
            if known := self.loaded.get(adapter.lora_id):
                return known
            begin = asyncio.get_running_loop().time()
            try:
                await self._drop_strays({adapter.lora_id})
                await self._make_room()
                found = await self._add(adapter)
            except BlockyardError as error:
                log.warning("an adapter cannot be loaded", name=adapter.name, reason=error.message)
                self.problems[adapter.lora_id] = error.message
                self._retry_at[adapter.lora_id] = asyncio.get_running_loop().time() + RETRY_SECONDS
                self.on_changed()
                raise
            seconds = asyncio.get_running_loop().time() - begin
            self.loaded[adapter.lora_id] = found
            self.problems.pop(adapter.lora_id, None)
            self._asked.pop(adapter.lora_id, None)
        log.info(
            "an adapter is loaded",
            name=adapter.name,
            lora_id=adapter.lora_id,
            worker_address=self._ranks[0].address,
            rank=found.rank,
            num_bytes=found.num_bytes,
            seconds=round(seconds, 3),
        )
        self.on_loaded(seconds)
        self.on_changed()
        return found

    async def _drop_strays(self, kept: Collection[int]) -> None:
        """Removes adapters that are not loaded at all ranks, except those to keep.

        An earlier scheduler may have had them read, or a load that failed or was given up here. The workers are asked
        each time: nobody else knows what they are still reading, and each has its place in their caches.
        """
        await asyncio.gather(*(self._drop_strays_at(rank, kept) for rank in self._ranks))

    async def _drop_strays_at(self, rank: Rank, kept: Collection[int]) -> None:
        for lora_id, pinned in (await list_loras(rank)).items():
            if lora_id not in self.loaded and lora_id not in kept:
                if pinned:
                    await pin_lora(rank, lora_id, pinned=False)
                await remove_lora(rank, lora_id)
                log.info("an adapter of an earlier scheduler is removed", lora_id=lora_id, worker_address=rank.address)

    async def _make_room(self) -> None:
        if len(self.loaded) < self._max_cpu_loras:
            return
        used, wanted = set(self.find_used()), {adapter.lora_id for adapter in self.find_wanted()}
        for lora_id, adapter in sorted(self.loaded.items(), key=lambda item: item[0] in wanted):
            if lora_id not in used and (lora_id not in wanted or not adapter.pinned):
                await self._remove(lora_id)
                self.num_evicted += lora_id in wanted
                return
        message = f"all {self._max_cpu_loras} adapters in the workers' cache are in use or pinned: see --max-cpu-loras"
        raise BlockyardError(Reason.WRONG_STATE, message)

    async def _add(self, adapter: Adapter) -> Adapter:
        calls = (add_lora(rank, adapter) for rank in self._ranks)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        problem = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        if problem is None and len({adapter.digest, *(each.digest for each in found)} - {""}) > 1:
            problem = BlockyardError(
                Reason.MODEL_NOT_LOADED,
                f"the files of {adapter.name!r} differ among the workers, or have changed: "
                "copy the same files to every worker, and load the adapter again",
            )
        if problem is not None:
            await asyncio.gather(*(remove_lora(rank, adapter.lora_id) for rank in self._ranks), return_exceptions=True)
            raise problem
        if adapter.pinned:
            await asyncio.gather(*(pin_lora(rank, adapter.lora_id, pinned=True) for rank in self._ranks))
        return found[0]

    async def remove(self, lora_id: int) -> None:
        """Removes an adapter at all ranks. Raises BlockyardError WRONG_STATE while a sequence has it."""
        async with self._lock:
            if lora_id in self.loaded:
                await self._remove(lora_id)

    async def _remove(self, lora_id: int) -> None:
        adapter = self.loaded.pop(lora_id)
        try:
            if adapter.pinned:
                await asyncio.gather(*(pin_lora(rank, lora_id, pinned=False) for rank in self._ranks))
            await asyncio.gather(*(remove_lora(rank, lora_id) for rank in self._ranks))
        except BlockyardError:
            # Some ranks may still have it: it stays listed, and its removal is tried again.
            self.loaded = {lora_id: adapter, **self.loaded}
            raise
        log.info("an adapter is removed", name=adapter.name, lora_id=lora_id, worker_address=self._ranks[0].address)

    async def pin(self, adapter: Adapter) -> None:
        """Pins or unpins an adapter that is loaded here, by its `pinned`."""
        async with self._lock:
            if known := self.loaded.get(adapter.lora_id):
                calls = (pin_lora(rank, adapter.lora_id, pinned=adapter.pinned) for rank in self._ranks)
                await asyncio.gather(*calls)
                self.loaded[adapter.lora_id] = replace(known, pinned=adapter.pinned)
