"""Prepares the services to run on this machine: flags, private sockets, public ports and readiness checks.

Builds the flags from sections of a configuration; services are started by module name and never imported.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.addresses import join_address
from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.configuration import (
    DeviceSettings,
    InternalSecuritySettings,
    PublicSettings,
    SystemConfiguration,
    WorkerProcessSettings,
)
from blockyard.errors import from_rpc_error
from blockyard.local.metrics_ports import FIRST_SCHEDULER_PORT, FIRST_WORKER_PORT, MetricsPorts
from blockyard.local.metrics_ports import HOST as METRICS_HOST
from blockyard.local.model_check import read_model
from blockyard.local.operator import Operator
from blockyard.local.supervisor import ROOT, Service
from blockyard.model_files import resolve_model
from blockyard.security.exposure import check_admin
from blockyard.service.servers import PortTaken, internal_channel
from blockyard.settings import ENVIRONMENT_PREFIX, SettingsError, settings_of, to_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from blockyard.contract.parallel import ParallelSizes
    from blockyard.lora.request import LoRARequest
    from blockyard.model_files import OnProgress

# WorkerProcessSettings or a subclass with more settings.
Settings = TypeVar("Settings", bound=WorkerProcessSettings)
# The kernel's limit for a Unix socket's path, less the longest file name in the folder.
MAX_FOLDER_BYTES = 107 - len("/scheduler")
# Only this user can open the private sockets, so no certificates are used, whatever the environment says.
_PRIVATE = InternalSecuritySettings()
# Whether the package was installed by pip, so that `make setup` has not built the kernels.
IS_INSTALLED = bool({"site-packages", "dist-packages"} & set(ROOT.parts))
DEVICES = Path("/dev")
# The time that a gateway has to stop after it has drained.
GRACE_SECONDS = 10.0
LOAD_LORA_SECONDS = 150.0


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses of a system: its public APIs as host:port; `local`: a private socket with all gRPC APIs.

    `metrics`: the metrics addresses of the scheduler and the workers by name; without services that have no metrics
    port.
    """

    grpc: str
    http: str
    admin: str
    local: str
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])


class LocalSystem:
    """A configuration that is ready to run: with a private folder for sockets, and with free ports chosen."""

    def __init__(self, configuration: SystemConfiguration) -> None:
        """Raises PortTaken, SettingsError if the admin API is unprotected, and BlockyardError for a bad model.

        A bad model is not found, or cannot be served; the error lists every reason that config.json shows.
        """
        # The services check the same; checking here is quick, and fails before anything has started.
        check_model(configuration)
        check_num_gpus(configuration.device, configuration.parallel)
        check_admin(configuration.public, configuration.security)
        public = choose_ports(configuration.public)
        self.configuration = dataclasses.replace(configuration, public=public)
        host, admin_host = reachable_host(public.host), reachable_host(public.admin_host)
        self._folder = _private_folder()
        self._metrics_ports = MetricsPorts()
        self._ports = self._choose_metrics_ports()
        self.endpoints = Endpoints(
            *(join_address(host, port) for port in (public.grpc_port, public.http_port)),
            admin=join_address(admin_host, public.admin_port),
            local=f"unix:{self._folder}/gateway",
            metrics={name: join_address(METRICS_HOST, port) for name, port in self._ports.items() if port > 0},
        )
        self._channels: dict[str, grpc.aio.Channel] = {}

    @property
    def _num_workers(self) -> int:
        return self.configuration.replicas.data_parallel_size * self.configuration.parallel.world_size

    @property
    def _num_devices(self) -> int:
        return max(1, count_gpus(os.environ)) if uses_gpu(self.configuration.device) else 1

    def _choose_metrics_ports(self) -> dict[str, int]:
        """Chooses the metrics port of the scheduler and of each worker; -1: none. Raises PortTaken."""
        metrics, choose = self.configuration.metrics, self._metrics_ports.choose
        ports = {"scheduler": choose(metrics.scheduler_metrics_port, FIRST_SCHEDULER_PORT)}
        first = metrics.worker_metrics_port
        for number in range(self._num_workers):
            wanted = first + number if first > 0 else first
            ports[f"worker-{number}"] = choose(wanted, FIRST_WORKER_PORT)
        return ports

    def make_services(self) -> list[Service]:
        """Returns the child processes to run, in the order in which they are started."""
        configuration = self.configuration
        workers = [f"unix:{self._folder}/worker-{number}" for number in range(self._num_workers)]
        world_size = configuration.parallel.world_size
        replicas = ["+".join(workers[first : first + world_size]) for first in range(0, len(workers), world_size)]
        scheduler = f"--scheduler-address=unix:{self._folder}/scheduler"
        # The user waits for the start: end it at once if an error needs repair, instead of waiting for the repair.
        scheduling = [scheduler, f"--worker-address={','.join(replicas)}", "--no-wait-for-repair"]
        # Workers on one GPU share its memory; workers on the CPU share the machine's.
        device = divide_memory(configuration.device, -(-len(workers) // self._num_devices))
        own = (
            configuration.model,
            configuration.load,
            device,
            configuration.parallel,
            configuration.cache,
            configuration.lora,
            configuration.scheduler,
            configuration.scheduler_process,
        )
        for section in (*own, *self._shared_sections):
            scheduling += to_flags(section)
        scheduling += to_flags(configuration.resume)
        scheduling.append(f"--scheduler-metrics-port={self._ports['scheduler']}")
        serving = [scheduler, f"--gateway-local-address={self.endpoints.local}"]
        for section in (
            configuration.model,
            configuration.text,
            configuration.public,
            configuration.security,
            configuration.gateway_process,
            *self._shared_sections,
        ):
            serving += to_flags(section)
        serving += to_flags(configuration.resume)
        serving.append(f"--gateway-lora-root={configuration.lora.lora_root}")
        return [
            *(self._worker(number, address) for number, address in enumerate(workers)),
            Service("scheduler", "scheduler_service", tuple(scheduling)),
            Service(
                "gateway",
                "gateway",
                tuple(serving),
                grace_seconds=configuration.gateway_process.drain_seconds + GRACE_SECONDS,
            ),
        ]

    @property
    def _shared_sections(self) -> tuple[object, ...]:
        """The sections that every service reads."""
        return (self.configuration.log, self.configuration.tracing, _PRIVATE)

    def _worker(self, number: int, address: str) -> Service:
        configuration = self.configuration
        # On one machine the workers read the same folders as the scheduler.
        root = configuration.worker.worker_lora_root or configuration.lora.lora_root
        worker = dataclasses.replace(configuration.worker, worker_lora_root=root)
        settings = divide_processors(worker, self._num_workers)
        flags = [f"--worker-address={address}", f"--worker-device-index={number % self._num_devices}"]
        flags += to_flags(settings)
        for section in self._shared_sections:
            flags += to_flags(section)
        flags.append(f"--worker-metrics-port={self._ports[f'worker-{number}']}")
        return Service(f"worker-{number}", "worker_service", tuple(flags))

    async def prepare(self, write_line: Callable[[str], None]) -> None:
        """Compiles the CPU kernels once if the package was installed with their source alone."""
        configuration = self.configuration
        if not IS_INSTALLED or uses_gpu(configuration.device) or configuration.worker.cpu_kernels == "reference":
            return
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(ROOT / "blockyard_kernels" / "cpu" / "build.py")),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.make_environment(),
        )
        assert process.stdout is not None
        async for line in process.stdout:
            write_line(line.decode(errors="replace").rstrip())
        if await process.wait():
            write_line("the CPU kernels cannot be compiled here: torch computes, which is slower")

    def make_environment(self) -> dict[str, str]:
        """Returns the children's environment: this process's without settings, which are passed as flags."""
        return without_settings(os.environ)

    def make_operator(self) -> Operator:
        """Creates an operator of this system, for the running event loop."""
        return Operator(self._channel(self.endpoints.local))

    def _channel(self, address: str) -> grpc.aio.Channel:
        # Created on the event loop that uses it.
        if address not in self._channels:
            self._channels[address] = internal_channel(address)
        return self._channels[address]

    async def is_ready(self) -> bool:
        """Whether the gateway takes requests."""
        stub = health_pb2_grpc.HealthStub(self._channel(self.endpoints.local))
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=1.0)  # type: ignore[misc]
        except grpc.RpcError:
            return False
        return response.status == health_pb2.HealthCheckResponse.SERVING

    async def ask_status(self) -> admin_pb2.GetStatusResponse | None:
        """Asks the gateway for the system's status; None: it does not answer."""
        stub = admin_pb2_grpc.AdminServiceStub(self._channel(self.endpoints.local))
        try:
            return await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=1.0)
        except grpc.RpcError:
            return None

    async def find_missing(self) -> str:
        """Returns a sentence that says why the gateway or a replica is not ready; empty: all are ready."""
        status = await self.ask_status()
        if status is None:
            return "the gateway does not answer"
        replicas, wanted = status.scheduler.replicas, self.configuration.replicas.data_parallel_size
        missing = [replica for replica in replicas if not replica.ready]
        if missing:
            why = missing[0].workers[0].message if missing[0].workers else ""
            return f"replica {missing[0].replica_id} is not ready: {why or 'its workers are set up'}"
        if not status.gateway.ready or len(replicas) < wanted:
            return status.gateway.message or f"the scheduler has {len(replicas)} of {wanted} replicas"
        return ""

    async def are_all_ready(self) -> bool:
        """Returns whether the gateway and all replicas take requests."""
        return not await self.find_missing()

    async def load_lora(self, request: LoRARequest) -> str:
        """Loads an adapter, and returns its name once the gateway knows it. Raises BlockyardError."""
        channel = self._channel(self.endpoints.local)
        load = admin_pb2.LoadLoraRequest(
            name=request.lora_name, path=request.lora_path, load_inplace=request.load_inplace
        )
        try:
            answer = await admin_pb2_grpc.AdminServiceStub(channel).LoadLora(load, timeout=LOAD_LORA_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return answer.lora.name

    async def close(self) -> None:
        """Closes the channels and removes the private folder. May be called more than once."""
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close(None)
        self._metrics_ports.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def check_model(configuration: SystemConfiguration) -> None:
    """Raises BlockyardError if the model is not found, or if its config.json shows that it cannot be served."""
    read_model(resolve_model(configuration.model.model, configuration.model.revision, "config"), configuration)


def download_model(configuration: SystemConfiguration, on_progress: OnProgress | None = None) -> None:
    """Downloads what the services will read of a hub's model. Raises BlockyardError MODEL_NOT_LOADED.

    `on_progress`: as of `resolve_model`.
    """
    kind = "tokenizer" if configuration.load.load_format == "random" else "all"
    resolve_model(configuration.model.model, configuration.model.revision, kind, on_progress)


def uses_gpu(device: DeviceSettings) -> bool:
    """Whether the workers of this machine will compute on a GPU."""
    return device.device == "cuda" or (device.device == "auto" and (DEVICES / "nvidiactl").exists())


def count_gpus(environment: Mapping[str, str]) -> int:
    """Counts the GPUs that CUDA offers to a process with this environment."""
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(list(DEVICES.glob("nvidia[0-9]*")))


def check_num_gpus(device: DeviceSettings, parallel: ParallelSizes) -> None:
    """Raises SettingsError if a replica needs more GPUs than there are: NCCL needs one GPU per worker."""
    if uses_gpu(device) and 1 < parallel.world_size > (num_gpus := count_gpus(os.environ)):
        raise SettingsError(
            f"a replica of {parallel.world_size} workers needs as many GPUs, and there are {num_gpus} here:"
            " choose a smaller --tensor-parallel-size, or --device cpu"
        )


def divide_memory(device: DeviceSettings, num_workers: int) -> DeviceSettings:
    """Returns the settings with an equal part of the device's memory for each worker."""
    return dataclasses.replace(device, device_memory_utilization=device.device_memory_utilization / num_workers)


def divide_processors(worker: Settings, num_workers: int) -> Settings:
    """Gives each of several workers an equal part of the processors. A single worker measures how many help."""
    if worker.num_threads or num_workers == 1:
        return worker
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return dataclasses.replace(worker, num_threads=max(1, usable // num_workers))


def reachable_host(host: str) -> str:
    """Returns the host to connect to for a listening host: the loopback address for a wildcard."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def choose_ports(public: PublicSettings) -> PublicSettings:
    """Replaces each port 0 by a free port. Raises PortTaken if a given port is not free."""
    chosen: dict[str, int] = {}
    # Hold all ports until the last is chosen, so that no two are the same.
    with ExitStack() as held:
        for name in ("grpc_port", "http_port", "admin_port"):
            host = public.admin_host if name == "admin_port" else public.host
            chosen[name] = held.enter_context(_listen(host, getattr(public, name), name)).getsockname()[1]
    return dataclasses.replace(public, **chosen)


def _listen(host: str, port: int, name: str) -> socket.socket:
    flag = "--" + name.replace("_", "-")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise PortTaken(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        # Ignore lingering connections of an earlier run, but not a listener.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        problem = f"cannot listen on {join_address(host, port)}"
        raise PortTaken(f"{problem}: {error.strerror}; choose another {flag}, or 0 for a free one") from None
    return listener


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="blockyard-"))
    if len(os.fsencode(folder)) > MAX_FOLDER_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="blockyard-", dir="/tmp"))
    return folder


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the variables of settings."""
    variables = {setting.variable for setting in settings_of(SystemConfiguration)} | {ENVIRONMENT_PREFIX + "CONFIG"}
    return {name: value for name, value in environment.items() if name not in variables}
