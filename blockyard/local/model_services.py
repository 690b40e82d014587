"""The scheduler and the workers of one model on this machine: their flags, sockets and metrics ports."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from blockyard.configuration import InternalSecuritySettings, WorkerProcessSettings
from blockyard.local.gpus import count_gpus, uses_gpu
from blockyard.local.metrics_ports import FIRST_SCHEDULER_PORT, FIRST_WORKER_PORT
from blockyard.local.supervisor import Service
from blockyard.settings import to_flags

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.configuration import DeviceSettings, SystemConfiguration
    from blockyard.local.metrics_ports import MetricsPorts

# WorkerProcessSettings or a subclass with more settings.
Settings = TypeVar("Settings", bound=WorkerProcessSettings)
# Only this user can open the private sockets, so no certificates are used, whatever the environment says.
_PRIVATE = InternalSecuritySettings()


@dataclass(frozen=True, slots=True)
class ModelServices:
    """One model's scheduler and workers.

    Attributes:
        name: the model's name in requests.
        sockets: the beginning of the paths of its sockets.
        metrics_ports: of `scheduler` and each `worker-N`; -1: none.
        num_places: the number of models that are loaded at a time, which share the memory.
        is_switched: whether the services start at a request: then nobody watches the start, and a scheduler that cannot
            load the model waits for its repair, so that it can answer requests with the reason.
    """

    name: str
    configuration: SystemConfiguration
    sockets: str
    metrics_ports: Mapping[str, int]
    num_places: int = 1
    is_switched: bool = False

    @property
    def scheduler_address(self) -> str:
        return f"unix:{self.sockets}scheduler"

    @property
    def prefix(self) -> str:
        """The prefix of the names of the model's services, in a system with several models."""
        return f"{self._label}/" if self._label else ""

    @property
    def _label(self) -> str:
        return self.name if self.is_switched else ""

    @property
    def _num_devices(self) -> int:
        return max(1, count_gpus(os.environ)) if uses_gpu(self.configuration.device) else 1

    def make_services(self) -> list[Service]:
        """Returns the workers, then the scheduler."""
        configuration = self.configuration
        workers = [f"unix:{self.sockets}worker-{number}" for number in range(count_workers(configuration))]
        world_size = configuration.parallel.world_size
        replicas = ["+".join(workers[first : first + world_size]) for first in range(0, len(workers), world_size)]
        flags = [f"--scheduler-address={self.scheduler_address}", f"--worker-address={','.join(replicas)}"]
        if not self.is_switched:
            # The user waits for the start: end it at once if an error needs repair, instead of waiting for the repair.
            flags.append("--no-wait-for-repair")
        # Workers on one GPU share its memory; workers on the CPU share the machine's.
        device = divide_memory(configuration.device, self.num_places * -(-len(workers) // self._num_devices))
        for section in (
            configuration.model,
            configuration.load,
            device,
            configuration.parallel,
            configuration.cache,
            configuration.lora,
            configuration.scheduler,
            configuration.speculation,
            configuration.scheduler_process,
            *shared_sections(configuration),
            configuration.resume,
        ):
            flags += to_flags(section)
        flags.append(f"--scheduler-metrics-port={self.metrics_ports['scheduler']}")
        return [
            *(self._worker(number, address) for number, address in enumerate(workers)),
            Service(f"{self.prefix}scheduler", "scheduler_service", tuple(flags), model=self._label),
        ]

    def _worker(self, number: int, address: str) -> Service:
        configuration = self.configuration
        # On one machine the workers read the same folders as the scheduler.
        root = configuration.worker.worker_lora_root or configuration.lora.lora_root
        worker = dataclasses.replace(configuration.worker, worker_lora_root=root)
        settings = divide_processors(worker, count_workers(configuration))
        flags = [f"--worker-address={address}", f"--worker-device-index={number % self._num_devices}"]
        flags += to_flags(settings)
        for section in shared_sections(configuration):
            flags += to_flags(section)
        flags.append(f"--worker-metrics-port={self.metrics_ports[f'worker-{number}']}")
        return Service(f"{self.prefix}worker-{number}", "worker_service", tuple(flags), model=self._label)


def shared_sections(configuration: SystemConfiguration) -> tuple[object, ...]:
    """Returns the sections that every service reads."""
    return (configuration.log, configuration.tracing, _PRIVATE)


def count_workers(configuration: SystemConfiguration) -> int:
    """Returns the number of all workers of a model's replicas."""
    return configuration.replicas.data_parallel_size * configuration.parallel.world_size


def choose_metrics_ports(configuration: SystemConfiguration, ports: MetricsPorts) -> dict[str, int]:
    """Chooses the metrics port of a model's scheduler and of each worker; -1: none. Raises PortTaken."""
    metrics = configuration.metrics
    chosen = {"scheduler": ports.choose(metrics.scheduler_metrics_port, FIRST_SCHEDULER_PORT)}
    first = metrics.worker_metrics_port
    for number in range(count_workers(configuration)):
        wanted = first + number if first > 0 else first
        chosen[f"worker-{number}"] = ports.choose(wanted, FIRST_WORKER_PORT)
    return chosen


def divide_memory(device: DeviceSettings, num_workers: int) -> DeviceSettings:
    """Returns the settings with an equal part of the device's memory for each worker."""
    return dataclasses.replace(device, device_memory_utilization=device.device_memory_utilization / num_workers)


def divide_processors(worker: Settings, num_workers: int) -> Settings:
    """Gives each of several workers an equal part of the processors. A single worker measures how many help."""
    if worker.num_threads or num_workers == 1:
        return worker
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return dataclasses.replace(worker, num_threads=max(1, usable // num_workers))
