"""The real services as processes of a test: started with chosen flags, watched through their logs, stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.client.access import ClientAccess
from blockyard.service import faults
from tests.kit.processes.nursery import Child

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[3]
# A laptop under load loads torch in some seconds.
START_SECONDS = 60.0
_MODULES = {"gateway": "gateway", "scheduler": "scheduler_service"}


def _kind_of(name: str) -> str:
    return name.rstrip("0123456789")


class Service:
    """One process: `python -m module flags`, its standard error in a file."""

    def __init__(
        self, module: str, flags: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.module = module
        self.log_path = log
        self._log = log.open("wb")
        self.process = Child(module, flags, {**os.environ, **(environment or {})}, self._log.fileno())

    @property
    def log(self) -> str:
        """All that it has written."""
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, pattern: str, seconds: float = START_SECONDS) -> re.Match[str]:
        """Waits until its log matches; fails when it dies before that."""
        deadline = time.monotonic() + seconds
        while True:
            if match := re.search(pattern, self.log):
                return match
            assert self.process.poll() is None, f"{self.module} ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"{self.module} never wrote {pattern!r}:\n{self.log}"
            # Polling the log of another process: there is no event to wait for.
            time.sleep(0.02)

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Waits until it ends by itself, and returns its exit code."""
        try:
            return self.process.wait(seconds)
        finally:
            self._log.close()

    def stop(self, signal_number: int = signal.SIGTERM, seconds: float = 20.0) -> int:
        """Ends it and returns its exit code; kills it when it does not end in time, which fails the test."""
        self.process.send_signal(signal_number)
        try:
            return self.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"{self.module} did not stop:\n{self.log}") from None


@dataclass
class System:
    """Gateway, scheduler and the workers of one replica on Unix sockets and free loopback ports.

    Use as a context manager. Rank 0 is `worker`, the others are `worker1`, `worker2`, ...; `access`: what the public
    gRPC port asks for. A test may start a second gateway, `gateway1`. `launcher`: a module that runs the module of
    a service; `environments`: variables of a service, by its name. `next_faults`: what a service gets as
    BLOCKYARD_FAULTS when it is started next, and not after.
    """

    model: Path
    folder: Path
    scheduler_flags: Sequence[str] = ()
    worker_flags: Sequence[str] = ("--num-threads", "1")
    gateway_flags: Sequence[str] = ()
    access: ClientAccess = field(default_factory=ClientAccess)
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    worker_module: str = "worker_service"
    launcher: str = ""
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    services: dict[str, Service] = field(default_factory=dict)
    next_faults: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A Unix socket's path must stay below 108 bytes, which a test's own folder may not.
        self._sockets = tempfile.TemporaryDirectory(prefix="by")
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def workers(self) -> list[str]:
        """The workers' names, by rank."""
        world = self.tensor_parallel_size * self.pipeline_parallel_size
        return ["worker", *(f"worker{rank}" for rank in range(1, world))]

    @property
    def worker_address(self) -> str:
        """Where the workers listen."""
        return "+".join(map(self._address, self.workers))

    @property
    def scheduler_address(self) -> str:
        """Where the scheduler listens."""
        return self._address("scheduler")

    def _address(self, name: str) -> str:
        return f"unix:{self._sockets.name}/{name}"

    def _flags(self, *names: str) -> list[str]:
        return [part for name in names for part in ("--" + name.replace("_", "-"), str(getattr(self, name)))]

    def start_service(self, name: str) -> Service:
        """Starts the gateway, the scheduler or a worker, again if it has died."""
        restarts = len(list(self.folder.glob(f"{name}-*.log")))
        flags = [*self._flags_of(name), "--log-level", "debug"]
        environment = {**self.environments.get(name, {}), faults.VARIABLE: self.next_faults.pop(name, "")}
        log = self.folder / f"{name}-{restarts}.log"
        module = _MODULES.get(_kind_of(name), self.worker_module)
        module, flags = (self.launcher, [module, *flags]) if self.launcher else (module, flags)
        service = Service(module, flags, log, environment)
        self.services[name] = service
        return service

    def _flags_of(self, name: str) -> list[str]:
        match _kind_of(name):
            case "gateway":
                ports = ("--grpc-port", "0", "--http-port", "0", "--admin-port", "0")
                return [*self._flags("model", "scheduler_address"), *ports, *self.gateway_flags]
            case "scheduler":
                own = self._flags("model", "worker_address", "scheduler_address")
                sizes = self._flags("tensor_parallel_size", "pipeline_parallel_size")
                return [*own, *sizes, "--device", "cpu", *self.scheduler_flags]
            case _:
                return ["--worker-address", self._address(name), *self.worker_flags]

    def __enter__(self) -> System:
        with ExitStack() as undo:
            undo.push(self)
            for name in (*self.workers, "scheduler", "gateway"):
                self.start_service(name)
            self.wait_until_ready()
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            stack.callback(self._sockets.cleanup)
            gateways = [name for name in self.services if _kind_of(name) == "gateway"]
            # Called from the last to the first, each whatever the others do.
            for name in (*self.workers, "scheduler", *gateways):
                if name in self.services:
                    stack.callback(self.services[name].stop)

    def port(self, kind: str, gateway: str = "gateway") -> int:
        """The port that a gateway tells in its log: grpc, http or admin."""
        return int(self.services[gateway].wait_for_log(rf"listening.* {kind}=\S*?:(\d+)").group(1))

    @property
    def grpc_target(self) -> str:
        """The public gRPC API."""
        return f"127.0.0.1:{self.port('grpc')}"

    @property
    def http_url(self) -> str:
        """The OpenAI API."""
        return f"http://127.0.0.1:{self.port('http')}"

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        """Waits until the gateway says that it is ready."""
        deadline = time.monotonic() + seconds
        with self.access.make_channel(self.grpc_target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for response in stub.Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=seconds):
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                for service in self.services.values():
                    assert service.process.poll() is None, f"{service.module} died:\n{service.log}"
                assert time.monotonic() < deadline

    def log(self, name: str) -> str:
        """The log of a service, of all its processes."""
        return "".join(file.read_text(errors="replace") for file in sorted(self.folder.glob(f"{name}-*.log")))
