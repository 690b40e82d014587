"""Loads, unloads and pins adapters at all replicas, and reports them to the gateways. Owns the adapter registry."""

from __future__ import annotations

import asyncio
import os
import posixpath
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.contract.scheduling import Adapter
from blockyard.errors import BlockyardError, Reason, Violation, invalid, quote
from blockyard.lora.settings import LoraSettings, split_modules
from blockyard.paths import wrong_path
from blockyard.settings import SettingsError
from blockyard.telemetry import EventLogger
from scheduler_service.requests.lora_registry import LoraRegistry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.clock import Clock
    from scheduler_service.replicas.engine import Engine
    from scheduler_service.requests.dispatcher import Dispatcher
    from scheduler_service.requests.registry import RequestRegistry

log = EventLogger(__name__)

NAME_RULE = "must be 1 to 256 characters of A-Z a-z 0-9 . _ : / -"
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,256}")
MODULE_RETRY_SECONDS = 10.0
POLL_SECONDS = 1.0
DISABLED = "adapters are not enabled: start the scheduler with --max-loras"


class Loras:
    """The adapters of the scheduler. One object for its process. Raises SettingsError for contradictory settings."""

    def __init__(self, settings: LoraSettings, requests: RequestRegistry, dispatcher: Dispatcher, clock: Clock) -> None:
        if not settings.max_loras:
            for flag in ("lora_modules", "max_prompt_adapter_tokens"):
                if getattr(settings, flag):
                    raise SettingsError(f"--{flag.replace('_', '-')} needs --max-loras")
        elif not (settings.max_lora_rank or settings.max_prompt_adapter_tokens):
            raise SettingsError("--max-lora-rank 0 needs --max-prompt-adapter-tokens")
        self._settings = settings
        # Relative paths start at the working directory, as in other settings.
        self._root = os.path.abspath(settings.lora_root) if settings.lora_root else ""
        self._requests = requests
        self._dispatcher = dispatcher
        self.registry = LoraRegistry(clock.time())
        # One operation at a time: a name has one adapter.
        self._lock = asyncio.Lock()
        # Adapters that are being loaded and are not in the registry yet.
        self._loading: list[Adapter] = []

    @property
    def max_loras(self) -> int:
        """The most adapters in one step of a replica; 0: adapters are not enabled."""
        return self._settings.max_loras

    @property
    def is_enabled(self) -> bool:
        return self.max_loras > 0

    def find_in_use(self) -> tuple[list[str], list[str]]:
        """Returns the names of the adapters of requests that a replica has taken, and of requests that wait for one."""
        if not self.is_enabled:
            return [], []
        names = {adapter.lora_id: adapter.name for adapter in self.registry.all}
        running, waiting = set[str](), set[str]()
        for request in self._requests.live.values():
            if lora_id := request.group.spec.lora_id:
                (waiting if request.engine is None else running).add(names[lora_id])
        return sorted(running), sorted(waiting)

    def attach(self, engine: Engine) -> None:
        engine.loras.find_wanted = lambda: [*self.registry.all, *self._loading]
        engine.loras.on_changed = self._on_changed

    # Operators' calls.

    async def load(self, name: str, path: str, *, load_inplace: bool = False) -> Adapter:
        """Loads an adapter at all ready replicas; others follow. Returns the present one if name and path are the same.

        `load_inplace`: replaces the adapter of this name; its running requests keep the old one.

        Raises BlockyardError: FEATURE_DISABLED; FIELD_INVALID for a wrong name or path; WRONG_STATE for a name that
        another adapter has; NO_READY_WORKER; or a worker's error.
        """
        self._demand_enabled()
        path = self._resolve(name, path)
        async with self._lock:
            known = self.registry.find(name)
            if known and not load_inplace:
                if known.path == path:
                    return known
                message = f"{name!r} is loaded from {known.path}: unload it first, or load in place"
                raise BlockyardError(Reason.WRONG_STATE, message)
            wanted = Adapter(self.registry.take_id(), name, path, pinned=known.pinned if known else False)
            adapter = replace(await self._load_everywhere(wanted), name=name, path=path, pinned=wanted.pinned)
            self.registry.put(adapter)
            log.info("an adapter can be used", name=name, lora_id=adapter.lora_id, digest=adapter.digest[:16])
            self._tell_gateways()
            return adapter

    async def _load_everywhere(self, wanted: Adapter) -> Adapter:
        engines = self._dispatcher.ready_engines
        if not engines:
            message = f"no worker can load the adapter: {self._dispatcher.readiness.message}"
            raise BlockyardError(Reason.NO_READY_WORKER, message, retry_after_seconds=1.0)
        self._loading.append(wanted)
        try:
            found = await asyncio.gather(*(engine.loras.load(wanted) for engine in engines))
            if len({each.digest for each in found}) > 1:
                message = (
                    f"the files of {wanted.name!r} differ among the replicas: "
                    "copy the same files to every worker, and load the adapter again"
                )
                raise BlockyardError(Reason.MODEL_NOT_LOADED, message)
            self._demand_room(found[0])
        finally:
            self._loading.remove(wanted)
            # An adapter that only some replicas could load is removed there.
            for engine in engines:
                engine.loras.reconsider()
        return found[0]

    def _demand_room(self, adapter: Adapter) -> None:
        facts = self._dispatcher.facts
        # A token of a prompt and one of an answer must fit behind the virtual tokens.
        if facts and adapter.num_virtual_tokens + 2 > facts.max_model_len:
            message = (
                f"the adapter's {adapter.num_virtual_tokens} virtual tokens leave no room "
                f"in a context of {facts.max_model_len} tokens"
            )
            raise BlockyardError(Reason.MODEL_NOT_LOADED, message)

    def unload(self, name: str) -> None:
        """Withdraws an adapter from new requests; workers forget it once its last request has ended. Idempotent.

        Raises BlockyardError: FEATURE_DISABLED; WRONG_STATE for one that is pinned.
        """
        self._demand_enabled()
        known = self.registry.find(name)
        if known is None:
            return
        if known.pinned:
            raise BlockyardError(Reason.WRONG_STATE, f"{name!r} is pinned: unpin it first")
        self.registry.withdraw(name)
        log.info("an adapter is unloaded", name=name, lora_id=known.lora_id)
        self._tell_gateways()
        self.collect()

    async def pin(self, name: str, *, pinned: bool) -> Adapter:
        """Keeps an adapter in the workers' caches, or no longer. Raises BlockyardError: MODEL_NOT_FOUND."""
        self._demand_enabled()
        async with self._lock:
            known = self.registry.find(name)
            if known is None:
                raise BlockyardError(Reason.MODEL_NOT_FOUND, f"there is no adapter {quote(name)}")
            adapter = self.registry.change(known, pinned=pinned)
            await asyncio.gather(*(engine.loras.pin(adapter) for engine in self._dispatcher.ready_engines))
            self._tell_gateways()
            return adapter

    def _demand_enabled(self) -> None:
        if not self.is_enabled:
            raise BlockyardError(Reason.FEATURE_DISABLED, DISABLED)

    def _resolve(self, name: str, path: str) -> str:
        """Returns the folder on the workers' machines, which check themselves that links stay below their root."""
        violations: list[Violation] = []
        if _NAME.fullmatch(name) is None:
            violations.append(Violation("name", NAME_RULE))
        if wrong := wrong_path(path):
            violations.append(Violation("path", wrong))
        if violations:
            raise invalid(violations)
        root = self._root
        if not root:
            return path
        full = posixpath.normpath(posixpath.join(root, path))
        if posixpath.commonpath([root, full]) != root:
            raise invalid([Violation("path", f"must be below {root}, which --lora-root says")])
        return full

    # Gateways' reports.

    def take_over(self, adapters: Iterable[Adapter]) -> None:
        """Takes over the adapters that a gateway knows from an earlier scheduler."""
        if self.is_enabled and self.registry.take_over(adapters):
            self._tell_gateways()
            self._on_changed()

    def keep(self, adapter: Adapter) -> None:
        """Keeps the adapter of a request for as long as it runs. Raises BlockyardError."""
        self._demand_enabled()
        self.registry.keep(adapter)

    def _tell_gateways(self) -> None:
        for outbox in self._requests.outboxes:
            outbox.put_state(loras=self.registry.named)

    # Time.

    def collect(self) -> None:
        """Forgets adapters that were replaced or unloaded, once no request has them."""
        if self.is_enabled:
            self.registry.drop_unused({request.group.spec.lora_id for request in self._requests.live.values()})

    async def keep_time(self) -> None:
        """Forgets unused adapters, for ever. Returns at once if adapters are disabled."""
        while self.is_enabled:
            self.collect()
            await asyncio.sleep(POLL_SECONDS)

    async def load_modules(self) -> None:
        """Loads the adapters of --lora-modules once a worker is ready, and retries those that fail."""
        modules = split_modules(self._settings.lora_modules)
        while modules:
            for module in modules.copy():
                try:
                    await self.load(*module)
                except BlockyardError as error:
                    if error.reason is not Reason.NO_READY_WORKER:
                        log.warning("--lora-modules names an adapter that is not loaded", reason=error.message)
                        await asyncio.sleep(MODULE_RETRY_SECONDS)
                else:
                    modules.remove(module)
            await asyncio.sleep(POLL_SECONDS if modules else 0)

    def _on_changed(self) -> None:
        """Wakes requests whose adapter was loaded, and fails those whose adapter no replica can load."""
        engines = self._dispatcher.ready_engines
        for adapter in self.registry.all:
            problems = [engine.loras.problems.get(adapter.lora_id) for engine in engines]
            if problems and all(problems):
                waiting = [
                    request_id
                    for request_id, request in self._requests.live.items()
                    if request.engine is None and request.group.spec.lora_id == adapter.lora_id
                ]
                message = f"the adapter {adapter.name!r} cannot be loaded: {problems[0]}"
                self._dispatcher.fail_all(waiting, BlockyardError(Reason.MODEL_NOT_LOADED, message))
        for engine in engines:
            engine.loras.reconsider()
        self._dispatcher.wake()
