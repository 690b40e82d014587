"""Loads and unloads the models of a system that has several: starts and ends their processes as the policy says.

What it knows comes from the gateway's status and from the processes that run; a gateway that dies is asked again.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError
from blockyard.switching.policy import Act, Limits, ModelState, Phase, decide
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from blockyard.admin.v1 import admin_pb2
    from blockyard.local.local_system import LocalSystem
    from blockyard.local.model_services import ModelServices
    from blockyard.local.supervisor import Child, Supervisor

log = EventLogger(__name__)

POLL_SECONDS = 0.1
# Longer than the gateway waits for a scheduler that does not answer.
STATUS_SECONDS = 4.0


@dataclass(slots=True)
class _Model:
    """A model, its processes, and its times; see ModelState."""

    services: ModelServices
    used_at: float
    phase: Phase = Phase.UNLOADED
    since: float = inf
    started_at: float = inf
    num_requests: int = 0
    num_started_requests: int = 0
    is_drained: bool = False
    children: list[Child] = field(default_factory=list["Child"])

    @property
    def name(self) -> str:
        return self.services.name

    def enter(self, phase: Phase, since: float = inf) -> None:
        self.phase, self.since, self.is_drained = phase, since, False


class ModelManager:
    """Applies the policy to a system's models again and again.

    Args:
        system: the system.
        supervisor: runs the system's gateway, and the models' processes.
    """

    def __init__(self, system: LocalSystem, supervisor: Supervisor) -> None:
        switching = system.configuration.switching
        self._system = system
        self._supervisor = supervisor
        self._limits = Limits(system.num_places, switching.idle_unload_seconds, switching.model_turn_seconds)
        # By then the requests that waited for a load at its beginning have failed.
        self._load_seconds = system.configuration.gateway_process.max_scheduler_wait_seconds
        now = asyncio.get_running_loop().time()
        self._models = {services.name: _Model(services, used_at=now) for services in system.models}
        self._endings: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        try:
            while True:
                try:
                    await self._look()
                except Exception:  # otherwise requests would wait for models that nobody loads
                    log.exception("the models cannot be switched now")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for ending in self._endings:
                ending.cancel()
            await asyncio.gather(*self._endings, return_exceptions=True)

    async def _look(self) -> None:
        status = await self._system.ask_status(STATUS_SECONDS)
        if status is None:
            return
        now = asyncio.get_running_loop().time()
        for told in status.models:
            await self._update(self._models[told.name], told, now)
        states = [
            ModelState(model.name, model.phase, model.num_requests, model.used_at, model.since, model.is_drained)
            for model in self._models.values()
        ]
        for act, name in decide(states, now, self._limits):
            self._apply(act, self._models[name], now)

    async def _update(self, model: _Model, told: admin_pb2.ModelStatus, now: float) -> None:
        model.num_requests = told.num_requests
        if told.num_requests or told.num_started_requests != model.num_started_requests:
            model.used_at = now
        model.num_started_requests = told.num_started_requests
        match model.phase:
            case Phase.UNLOADED:
                model.since = min(model.since, now) if told.num_requests else inf
            case Phase.LOADED if model.since == inf:
                if told.ready:
                    model.since = now
                    log.info("loaded a model", model=model.name, seconds=round(now - model.started_at, 2))
                elif now - model.started_at >= self._load_seconds:
                    # A model that cannot be loaded does not keep its place for ever.
                    model.since = model.started_at
            case Phase.HELD:
                model.is_drained = await self._drain(model)
            case _:
                pass

    async def _drain(self, model: _Model) -> bool:
        """Drains the model's replicas, so that its new requests wait; returns whether none is running any more.

        Called again and again, because a scheduler that restarts forgets it.
        """
        try:
            return await self._system.make_operator().drain(model.name)
        except BlockyardError:
            # The scheduler is being restarted.
            return False

    def _apply(self, act: Act, model: _Model, now: float) -> None:
        match act:
            case Act.LOAD:
                log.info("loading a model", model=model.name, num_requests=model.num_requests)
                model.enter(Phase.LOADED)
                model.started_at = now
                model.children = self._supervisor.add(model.services.make_services())
            case Act.HOLD:
                log.info("a model makes room: its new requests wait", model=model.name)
                model.enter(Phase.HELD, now)
            case Act.UNLOAD:
                log.info("unloading a model", model=model.name, num_requests=model.num_requests)
                model.enter(Phase.ENDING)
                ending = asyncio.create_task(self._end(model))
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)

    async def _end(self, model: _Model) -> None:
        await self._supervisor.remove(model.children)
        model.enter(Phase.UNLOADED)


@asynccontextmanager
async def managed_models(system: LocalSystem, supervisor: Supervisor) -> AsyncGenerator[None]:
    """Switches the models of a system inside the block, if it has models to switch."""
    if not system.is_switched:
        yield
        return
    managing = asyncio.create_task(ModelManager(system, supervisor).run())
    try:
        yield
    finally:
        managing.cancel()
        await asyncio.gather(managing, return_exceptions=True)
