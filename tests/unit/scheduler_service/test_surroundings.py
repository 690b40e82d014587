"""All parts of a scheduler have the clock and the transport that it was given."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from blockyard.clock import SYSTEM
from scheduler_service.server import Server
from tests.kit.surroundings import NotedTransport, find_strays, make_clock
from tests.unit.scheduler_service.conftest import running

if TYPE_CHECKING:
    from scheduler_service.config import SchedulerConfiguration
    from tests.unit.scheduler_service.conftest import Harness


async def test_no_part_has_the_systems(harness: Harness, configuration: SchedulerConfiguration) -> None:
    clock, transport = make_clock(), NotedTransport()
    await harness.worker()
    threads = {*threading.enumerate()}
    async with running(Server(configuration, clock, transport)) as server:
        client = await harness.client()
        await client.add("r", [5, 6])
        assert not find_strays(server, transport)
        assert len(transport.servers) == 1
        assert transport.channels
        # The test's own worker has a device's thread, which begins after it registered. Earlier tests' threads may end.
        assert {thread.name for thread in {*threading.enumerate()} - threads} <= {"device"}
        # The search sees what a part has.
        server.service.operations.clock = SYSTEM
        assert any(way.startswith("Server > SchedulerService > Operations") for way in find_strays(server, transport))
