"""Plays a scenario, and checks what the clients were told and what is left at the end."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.kit.simulation.asks import SECONDS
from tests.kit.simulation.clients import Client, Report, Strike
from tests.kit.simulation.cluster import Cluster, Process
from tests.kit.simulation.faults import FAULTS, OF_NO_TARGET, PAIRS
from tests.kit.simulation.health import Health
from tests.kit.simulation.leftovers import find_leftovers
from tests.kit.simulation.loop import SimLoop

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

    from tests.kit.simulation.asks import Ask
    from tests.kit.simulation.scenario import Fault, Scenario

# Every request ends within this time after the last fault, with long steps within a longer one.
LIVE_SECONDS, SLOW_LIVE_SECONDS = 250.0, 2000.0
# How often the number of waiting requests is looked at.
WATCH_SECONDS = 0.1


def _role_of(fault: Fault) -> str:
    """Names what a fault strikes: the roles of its targets."""
    if fault.kind in OF_NO_TARGET:
        return "any"
    roles = [name.partition("-")[0] for name in fault.targets]
    return " and ".join(sorted(roles)) if fault.kind in PAIRS else roles[0]


class Play:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, loop: SimLoop) -> None:
        self._scenario = scenario
        self._live_seconds = SLOW_LIVE_SECONDS if scenario.sizes.is_slow else LIVE_SECONDS
        self._loop = loop
        self._cluster = Cluster(loop, scenario.sizes)
        self.points = self._cluster.points
        self.report = Report(scenario.seed)

    async def run(self) -> None:
        self._cluster.start()
        loop, scenario = self._loop, self._scenario
        begin = loop.time()
        for fault in scenario.faults:
            loop.call_at(begin + fault.at, self._strike, fault)
        clients: dict[int, Client] = {}
        tasks: dict[asyncio.Task[Any], Ask] = {}
        for ask in scenario.asks:
            if ask.client not in clients:
                clients[ask.client] = Client(self._cluster, ask.client, self.report)
            client = clients[ask.client]
            task = loop.spawn(client.process.owner, client.ask(ask, begin), f"ask-{ask.number}")
            tasks[task] = ask
        last = max((fault.at + fault.seconds for fault in scenario.faults), default=0.0)
        health = Health(self._cluster, begin + max(SECONDS, last), self.report.health)
        health.start()
        if scenario.sizes.max_waiting_requests:
            self._watch_backlog()
        _, late = await asyncio.wait(tasks, timeout=max(SECONDS, last) + self._live_seconds)
        for task in late:
            self.report.violations.append(f"request {tasks[task].number} did not end: {task.get_stack(limit=1)}")
        for task, ask in tasks.items():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self.report.violations.append(f"request {ask.number}: {error!r}")
        if self._cluster.operations:
            _, late = await asyncio.wait(self._cluster.operations, timeout=self._live_seconds)
            self.report.violations += [f"{task.get_name()} did not end" for task in late]
        await health.has_ended.wait()
        self.report.violations += health.violations[:1]
        for client in clients.values():
            await self._as(client.process, client.close())
        if not self.report.violations:
            await self._check_the_end()
        for node in self._cluster.nodes.values():
            self._cluster.network.kill(node.process.owner)

    def _watch_backlog(self) -> None:
        """Checks that no more requests wait than may, until something goes wrong: interrupted requests always wait."""
        if self._cluster.strikes or self.report.violations:
            return
        scheduler, limit = self._cluster.nodes["scheduler"], self._scenario.sizes.max_waiting_requests
        # Tenants that wait with less than their share of the places may exceed the limit together.
        if scheduler.service is not None and (waiting := len(scheduler.service.service.backlog)) > 2 * limit:
            self.report.violations.append(f"{waiting} requests wait, and {limit} may")
        self._loop.call_later(WATCH_SECONDS, self._watch_backlog)

    def _strike(self, fault: Fault) -> None:
        strike = Strike(fault.kind, _role_of(fault), self._phase())
        self.report.strikes[strike] += 1
        self._cluster.note_strike(strike.kind, strike.role)
        self._loop.note(f"fault {strike}")
        FAULTS[fault.kind](self._cluster, fault)

    def _phase(self) -> str:
        """Names what the system is doing now."""
        scheduler = self._cluster.nodes["scheduler"]
        if not scheduler.process.owner.alive or scheduler.service is None:
            return "no scheduler"
        stats = scheduler.service.service.stats()
        if not scheduler.service.service.is_ready:
            return "no worker"
        if any(each.num_swapped for each in stats):
            return "swapped"
        if len(scheduler.service.service.backlog) or any(each.num_waiting for each in stats):
            return "waiting"
        return "running" if any(each.num_running for each in stats) else "idle"

    async def _as(self, process: Process, work: Coroutine[Any, Any, Any]) -> None:
        await self._loop.spawn(process.owner, work)

    async def _check_the_end(self) -> None:
        """Waits until nothing runs, and checks that nothing is held."""
        try:
            async with asyncio.timeout(LIVE_SECONDS):
                while left := find_leftovers(self._cluster):  # noqa: ASYNC110
                    await asyncio.sleep(1.0)
        except TimeoutError:
            self.report.violations.append(f"left at the end: {left}")


class _Failures(logging.Handler):
    """Takes each error with a trace that a service logs for a violation: nothing was to fail in this way."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.ERROR)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            error = record.exc_info[1]
            self._report.violations.append(f"{record.name} logged {record.getMessage()!r}: {error!r}")


@contextmanager
def _noted_failures(report: Report) -> Generator[None]:
    handler, disabled = _Failures(report), logging.root.manager.disable
    logging.disable(min(disabled, logging.WARNING))
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
        logging.disable(disabled)


def play(scenario: Scenario, max_callbacks: int = 3_000_000) -> Report:
    """Runs a scenario, and returns its report. Errors that nobody retrieved are violations too."""
    loop = SimLoop(scenario.seed, max_callbacks)
    run = Play(scenario, loop)
    begin = loop.time()
    try:
        with run.points.reached(), _noted_failures(run.report):
            loop.run(run.run())
    except BaseExceptionGroup as group:
        run.report.violations += [f"nobody retrieved {error!r}" for error in group.exceptions]
    except Exception as error:  # noqa: BLE001 - whatever ends the loop is told with its seed
        run.report.violations.append(f"the run broke: {error!r} {getattr(error, '__notes__', '')}")
    run.report.trace_hash = loop.trace.hexdigest()
    run.report.virtual_seconds = loop.time() - begin
    run.report.num_callbacks = loop.num_callbacks
    return run.report
