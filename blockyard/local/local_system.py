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
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.addresses import join_address
from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.configuration import PublicSettings, SystemConfiguration
from blockyard.errors import from_rpc_error
from blockyard.local.gpus import check_num_gpus, uses_gpu
from blockyard.local.metrics_ports import HOST as METRICS_HOST
from blockyard.local.metrics_ports import MetricsPorts
from blockyard.local.model_check import read_model
from blockyard.local.model_services import ModelServices, choose_metrics_ports, shared_sections
from blockyard.local.operator import Operator
from blockyard.local.places import count_places
from blockyard.local.supervisor import ROOT, Service
from blockyard.model_files import resolve_model, served_name
from blockyard.security.exposure import check_admin
from blockyard.service.servers import PortTaken, internal_channel
from blockyard.settings import ENVIRONMENT_PREFIX, MODELS, SettingsError, settings_of, to_flags

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from blockyard.lora.request import LoRARequest
    from blockyard.model_files import OnProgress

# The kernel's limit for a Unix socket's path, less the longest file name in the folder.
MAX_FOLDER_BYTES = 107 - len("/999-scheduler")
# Whether the package was installed by pip, so that `make setup` has not built the kernels.
IS_INSTALLED = bool({"site-packages", "dist-packages"} & set(ROOT.parts))
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

    def __init__(self, configuration: SystemConfiguration, *others: SystemConfiguration) -> None:
        """Takes the settings of the first model and of the system, and those of further models.

        Raises PortTaken, SettingsError if the admin API is unprotected or two models have one name, and BlockyardError
        for a bad model: it is not found, or cannot be served; the error lists every reason that config.json shows.
        """
        configurations = [configuration, *others]
        # The services check the same; checking here is quick, and fails before anything has started.
        for each in configurations:
            check_model(each)
            check_num_gpus(each.device, each.parallel)
        check_admin(configuration.public, configuration.security)
        names = [served_name(each.model.model, each.text.served_model_name) for each in configurations]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise SettingsError(
                f"several models have the name {', '.join(twice)}: give each a served_model_name of its own"
            )
        self.is_switched = bool(others or configuration.switching.idle_unload_seconds)
        self.num_places = count_places(configurations) if others else 1
        public = choose_ports(configuration.public)
        self.configuration = dataclasses.replace(configuration, public=public)
        host, admin_host = reachable_host(public.host), reachable_host(public.admin_host)
        self._folder = _private_folder()
        self._metrics_ports = MetricsPorts()
        self.models = [self._make_model(*each) for each in enumerate(zip(names, configurations, strict=True))]
        ports = {f"{model.prefix}{name}": port for model in self.models for name, port in model.metrics_ports.items()}
        self.endpoints = Endpoints(
            *(join_address(host, port) for port in (public.grpc_port, public.http_port)),
            admin=join_address(admin_host, public.admin_port),
            local=f"unix:{self._folder}/gateway",
            metrics={name: join_address(METRICS_HOST, port) for name, port in ports.items() if port > 0},
        )
        self._channels: dict[str, grpc.aio.Channel] = {}

    def _make_model(self, index: int, named: tuple[str, SystemConfiguration]) -> ModelServices:
        """Prepares the services of a model; raises PortTaken."""
        sockets = f"{self._folder}/{index}-" if self.is_switched else f"{self._folder}/"
        ports = choose_metrics_ports(named[1], self._metrics_ports)
        return ModelServices(*named, sockets, ports, self.num_places, self.is_switched)

    def make_services(self) -> list[Service]:
        """Returns the child processes to run from the start, in this order; models that are switched start later."""
        if self.is_switched:
            return [self._make_gateway()]
        return [*self.models[0].make_services(), self._make_gateway()]

    def _make_gateway(self) -> Service:
        configuration = self.configuration
        flags = [f"--gateway-local-address={self.endpoints.local}"]
        sections = [configuration.public, configuration.security, configuration.gateway_process, configuration.resume]
        if self.is_switched:
            flags.append(f"--config={self._write_models()}")
        else:
            sections += [configuration.model, configuration.text]
            flags.append(f"--scheduler-address={self.models[0].scheduler_address}")
            flags.append(f"--gateway-lora-root={configuration.lora.lora_root}")
        for section in (*sections, *shared_sections(configuration)):
            flags += to_flags(section)
        grace_seconds = configuration.gateway_process.drain_seconds + GRACE_SECONDS
        return Service("gateway", "gateway", tuple(flags), grace_seconds=grace_seconds)

    def _write_models(self) -> Path:
        """Writes the gateway's settings file, which lists the models; returns its path."""
        entries = [
            {
                **dataclasses.asdict(model.configuration.model),
                **dataclasses.asdict(model.configuration.text),
                "served_model_name": model.name,
                "scheduler_address": model.scheduler_address,
                "gateway_lora_root": model.configuration.lora.lora_root,
                "starts_on_demand": True,
            }
            for model in self.models
        ]
        path = self._folder / "gateway.yaml"
        path.write_text(yaml.safe_dump({MODELS: entries}), encoding="utf-8")
        return path

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

    async def ask_status(self, timeout_seconds: float = 1.0) -> admin_pb2.GetStatusResponse | None:
        """Asks the gateway for the system's status; None: it does not answer."""
        stub = admin_pb2_grpc.AdminServiceStub(self._channel(self.endpoints.local))
        try:
            return await stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=timeout_seconds)
        except grpc.RpcError:
            return None

    async def find_missing(self) -> str:
        """Returns a sentence that says why the gateway or a replica is not ready; empty: all are ready."""
        status = await self.ask_status()
        if status is None:
            return "the gateway does not answer"
        if self.is_switched:
            return "" if status.gateway.ready else status.gateway.message
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
