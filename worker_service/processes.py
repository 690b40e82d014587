"""Runs several workers as child processes, one for each device, and restarts one that ends.

Knows workers by their flags alone, and imports no torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from typing import TYPE_CHECKING

from blockyard.addresses import host_of, join_address, with_port
from blockyard.local.local_system import reachable_host
from blockyard.local.model_services import divide_processors
from blockyard.local.supervisor import Service, StartError, Supervisor
from blockyard.service.health import HealthServer
from blockyard.service.healthcheck import check
from blockyard.service.process import run_process
from blockyard.service.signals import on_stop_signal
from blockyard.settings import SettingsError, to_flags
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from worker_service.config import WorkerConfiguration, WorkerSettings

log = EventLogger(__name__)

# The longest time that a worker takes to stop.
GRACE_SECONDS = 10.0
# The interval between two probes of the workers' health.
PROBE_SECONDS = 2.0


def run(configuration: WorkerConfiguration) -> None:
    """Runs the workers until SIGTERM or SIGINT, and exits; a second signal hurries them."""
    sys.exit(run_process("worker", configuration, _supervise, (SettingsError, StartError)))


def divide(settings: WorkerSettings) -> list[WorkerSettings]:
    """Makes the settings of each worker: its place, its device, its part of the processors, ports and sockets.

    The given health port belongs to this process, which answers for all workers; theirs follow it. Raises SettingsError
    for ports that the system would choose.
    """
    if settings.worker_address.endswith(":0") or 0 in (settings.worker_health_port, settings.worker_metrics_port):
        raise SettingsError("--num-workers needs fixed ports: those of the other workers follow the first one's")
    own = dataclasses.replace(divide_processors(settings, settings.num_workers), num_workers=1)
    return [
        dataclasses.replace(
            own,
            worker_address=_following_address(settings.worker_address, number),
            worker_health_port=_following(settings.worker_health_port, number + 1),
            worker_metrics_port=_following(settings.worker_metrics_port, number),
            worker_index=settings.worker_index + number,
            worker_device_index=settings.worker_device_index + number,
        )
        for number in range(settings.num_workers)
    ]


def _following(port: int, number: int) -> int:
    return port if port < 0 else port + number


def _following_address(address: str, number: int) -> str:
    if address.startswith("unix:"):
        return f"{address}-{number}"
    return with_port(address, _following(int(address.rpartition(":")[2]), number))


async def _supervise(configuration: WorkerConfiguration) -> int:
    settings = configuration.worker
    workers = divide(settings)
    shared = [flag for section in _shared_sections(configuration) for flag in to_flags(section)]
    supervisor = Supervisor(
        [
            Service(f"worker-{number}", "worker_service", (*to_flags(worker), *shared), GRACE_SECONDS)
            for number, worker in enumerate(workers)
        ],
        lambda: _all_listen(worker.worker_address for worker in workers),
        write_line=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
    )
    on_stop_signal(supervisor.request_stop, supervisor.request_stop)
    health = make_health(workers)
    if settings.worker_health_port > 0:
        health.start(join_address(host_of(settings.worker_address), settings.worker_health_port))
    try:
        if await supervisor.start():
            log.info("all workers listen", num_workers=len(workers), health_port=settings.worker_health_port)
        return await supervisor.wait()
    finally:
        await supervisor.stop()
        health.stop()


def _shared_sections(configuration: WorkerConfiguration) -> tuple[object, ...]:
    return (configuration.internal, configuration.log, configuration.tracing)


def make_health(workers: Sequence[WorkerSettings]) -> HealthServer:
    """Makes the health server of all workers: a status holds if it holds for each of them."""
    hosts = [reachable_host(host_of(worker.worker_address)) for worker in workers]
    addresses = [join_address(host, worker.worker_health_port) for host, worker in zip(hosts, workers, strict=True)]

    def probe(service: str) -> Callable[[], bool]:
        return lambda: not any(check(address, service) for address in addresses)

    return HealthServer(probe("liveness"), probe("readiness"), {"loaded": probe("loaded")}, PROBE_SECONDS)


async def _all_listen(addresses: Iterable[str]) -> bool:
    return all(await asyncio.gather(*map(_listens, addresses)))


async def _listens(address: str) -> bool:
    try:
        if address.startswith("unix:"):
            _, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(reachable_host(host.strip("[]")), int(port))
    except OSError:
        return False
    writer.close()
    return True
