"""All parts of a worker have the clock and the transport that it was given; its device needs no thread."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.clock import SYSTEM
from blockyard.service.servers import internal_channel
from tests.kit.surroundings import NotedTransport, find_strays, make_clock
from tests.unit.worker_service.driver import WorkerDriver, new_sequence
from worker_service.config import WorkerConfiguration, WorkerSettings
from worker_service.device.thread import DeviceThread
from worker_service.server import Server
from worker_service.set_up import STAGES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from blockyard_kernels.launching import Launched
    from worker_service.models.loader import RunnableModel


class NoThread(DeviceThread):
    """Runs each job where it is given."""

    def start(self) -> None: ...

    def stop(self, seconds: float) -> bool:
        return True

    def post(self, job: Callable[[], None]) -> None:
        job()

    def when_ready(self, launched: Launched, job: Callable[[], None]) -> None:
        launched.wait()
        job()


def no_grammars(loaded: RunnableModel) -> None:
    """For a worker whose requests have none: they have threads of their own."""


async def test_no_part_has_the_systems(socket_folder: Path, model: Path) -> None:
    threads = {*threading.enumerate()}
    transport, stages = NotedTransport(), replace(STAGES, make_grammars=no_grammars)
    settings = WorkerSettings(
        worker_device="cpu",
        worker_address=f"unix:{socket_folder}/w",
        num_threads=1,
        worker_health_port=-1,
        worker_metrics_port=-1,
    )
    server = Server(WorkerConfiguration(worker=settings), make_clock(), transport, NoThread, stages)
    await server.start()
    try:
        async with internal_channel(server.address) as channel:
            driver = WorkerDriver(server, channel)
            await driver.prepare(model)
            steps = driver.open(1)
            new = new_sequence(1, [5, 6, 7], [1])
            await steps.step(new_sequences=[new], sequence_ids=[1], num_new_tokens=[3])
            assert len(await steps.decode(1, 3)) == 3
            assert not find_strays(server, transport)
            assert len(transport.servers) == 1
            assert not [each for each in {*threading.enumerate()} - threads if each.name.startswith("device")]
            # The search sees what a part has.
            server.worker.membership._clock = SYSTEM
            assert any("Membership > Clock" in way for way in find_strays(server, transport))
    finally:
        await server.stop()
