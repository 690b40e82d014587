"""Several workers, one scheduler and several gateways as processes, each started again at once when it dies.

A supervisor for tests, and what makes its work necessary: kill, freeze, thaw, and faults that a process's next life is
born with. An address is chosen once, so that a process that comes back is found where it was.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import socket
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.service import faults
from blockyard.service.servers import internal_channel
from tests.kit.chaos.fault_proxy import FaultProxy
from tests.kit.chaos.rank_faults import GROUP_HOST
from tests.kit.processes.nursery import Child

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[3]
START_SECONDS = 60.0
POLL_SECONDS = 0.05
# A process that ends sooner than this, by itself, waits as long before it is started again.
SHORT_LIFE_SECONDS = 0.5
# Ports that the kernel gives to nobody by itself: one that is asked for twice must not be another's in between, and a
# client that dials a dead gateway must not be given the gateway's port for its own end.
PORTS = range(20_000, 30_000)
# So many are one process's alone: what one has chosen and not yet bound, another one would find free.
NUM_OWN_PORTS = 400
EXPECTED_EXIT_CODES = (0, -signal.SIGKILL, faults.EXIT_CODE)


class ClusterError(AssertionError):
    """A process of the cluster ended by itself, or the cluster did not get ready."""


@dataclass(slots=True)
class Member:
    """One process after another under one name.

    Attributes:
        next_faults: what its next life, and no later one, gets as BLOCKYARD_FAULTS.
        exit_codes: of its lives so far; negative: a signal.
    """

    name: str
    module: str
    flags: list[str]
    log_path: Path
    next_faults: str = ""
    process: Child | None = None
    exit_codes: list[int] = field(default_factory=list[int])

    async def live(self) -> int:
        """Runs it once, to its end."""
        armed, self.next_faults = self.next_faults, ""
        with self.log_path.open("ab") as log:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), faults.VARIABLE: armed}
            program = "tests.kit.processes.cluster_child"
            self.process = Child(program, [self.module, *self.flags], environment, log.fileno())
        code = await self.process.ended()
        self.exit_codes.append(code)
        return code

    async def live_again_and_again(self) -> None:
        """Runs it until this is cancelled."""
        while True:
            begin = time.monotonic()
            code = await self.live()
            if code >= 0 and time.monotonic() - begin < SHORT_LIFE_SECONDS:
                await asyncio.sleep(SHORT_LIFE_SECONDS)

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self.process is not None and self.process.returncode is None

    @property
    def log(self) -> str:
        """All that its lives have written."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def send(self, number: int) -> None:
        """Sends a signal, if there is a process."""
        if self.process:
            self.process.send_signal(number)


class Cluster:
    """Workers, the `scheduler` and gateways `gateway-0`…: `async with Cluster(model, folder) as cluster`.

    A worker that is a replica by itself is `worker-N`; `rank-N` is one of a replica of several. N counts all workers.

    Attributes:
        members: by name.
        links: a fault proxy before each worker and before the scheduler, by its name, where asked for.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        replica_sizes: Sequence[int] = (1, 1),
        pipeline_parallel_size: int = 1,
        num_gateways: int = 2,
        scheduler_flags: Sequence[str] = (),
        worker_flags: Sequence[str] = ("--num-threads", "1"),
        gateway_flags: Sequence[str] = (),
        with_links: bool = False,
    ) -> None:
        """Says what to start.

        Args:
            model: a folder.
            folder: made if need be; gets the logs.
            replica_sizes: the workers of each replica.
            pipeline_parallel_size: the stages of each.
            num_gateways: all before the one scheduler.
            scheduler_flags: beside addresses, model and device.
            worker_flags: beside the address.
            gateway_flags: beside addresses and model.
            with_links: put fault proxies between the services.
        """
        self.members: dict[str, Member] = {}
        self.links: dict[str, FaultProxy] = {}
        self._model = model
        self._folder = folder
        self._replicas = name_workers(replica_sizes)
        self._flags = {
            "worker": worker_flags,
            "rank": [*worker_flags, "--worker-group-host", GROUP_HOST],
            "scheduler": [
                *("--tensor-parallel-size", str(max(replica_sizes) // pipeline_parallel_size)),
                *("--pipeline-parallel-size", str(pipeline_parallel_size)),
                *scheduler_flags,
            ],
            "gateway": gateway_flags,
        }
        self._with_links = with_links
        self._ports = choose_ports(3 * num_gateways)
        self._stack = AsyncExitStack()
        self._supervising: dict[str, asyncio.Task[None]] = {}
        self._channels: list[grpc.aio.Channel] = []
        self._sockets = ""

    # Addresses.

    @property
    def targets(self) -> list[str]:
        """The gateways' public gRPC addresses."""
        return [f"127.0.0.1:{port}" for port in self._ports[0::3]]

    @property
    def http_urls(self) -> list[str]:
        """The gateways' OpenAI APIs."""
        return [f"http://127.0.0.1:{port}" for port in self._ports[1::3]]

    @property
    def admin_addresses(self) -> list[str]:
        """The gateways' admin APIs."""
        return [f"127.0.0.1:{port}" for port in self._ports[2::3]]

    def _own_address(self, name: str) -> str:
        return f"unix:{self._sockets}/{name}"

    def _address(self, name: str) -> str:
        """Where others reach a worker or the scheduler."""
        return self.links[name].address if name in self.links else self._own_address(name)

    # Life.

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # A Unix socket's path must stay below 108 bytes, which a test's own folder may not.
        self._sockets = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="by"))
        workers = [name for names in self._replicas for name in names]
        if self._with_links:
            await self._start_links([*workers, "scheduler"])
        for name in workers:
            self._add(name, "worker_service", ["--worker-address", self._own_address(name)])
        model = ["--model", str(self._model)]
        replicas = ["+".join(map(self._address, names)) for names in self._replicas]
        addresses = ["--worker-address", ",".join(replicas)]
        listen = ["--scheduler-address", self._own_address("scheduler")]
        self._add("scheduler", "scheduler_service", [*model, *addresses, *listen, "--device", "cpu"])
        dial = ["--scheduler-address", self._address("scheduler")]
        for number in range(len(self.targets)):
            self._add(f"gateway-{number}", "gateway", [*model, *dial, *self._port_flags(number)])
        self._channels = [internal_channel(address) for address in self.admin_addresses]
        self._supervising = {
            name: asyncio.create_task(member.live_again_and_again()) for name, member in self.members.items()
        }

    async def _start_links(self, names: list[str]) -> None:
        for name in names:
            proxy = FaultProxy(self._own_address(name), self._own_address(f"{name}-link"))
            self.links[name] = await self._stack.enter_async_context(proxy)

    def _port_flags(self, number: int) -> list[str]:
        ports = zip(("--grpc-port", "--http-port", "--admin-port"), self._ports[3 * number :], strict=False)
        return [part for flag, port in ports for part in (flag, str(port))]

    def _add(self, name: str, module: str, flags: list[str]) -> None:
        extra = self._flags[name.partition("-")[0]]
        self.members[name] = Member(name, module, [*flags, *extra], self._folder / f"{name}.log")

    async def stop(self) -> None:
        """Kills everything and waits for it."""
        for task in self._supervising.values():
            task.cancel()
        await asyncio.gather(*self._supervising.values(), return_exceptions=True)
        for member in self.members.values():
            member.send(signal.SIGKILL)
        for member in self.members.values():
            if member.process is not None:
                await member.process.ended()
        for channel in self._channels:
            await channel.close(None)
        await self._stack.aclose()

    # Faults.

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a process; where that ends it, it is started again at once."""
        self.members[name].send(number)

    def end(self, name: str) -> None:
        """Kills a process for good."""
        self._supervising[name].cancel()
        self.kill(name)

    def freeze(self, name: str) -> None:
        """Stops a process (SIGSTOP): it hangs, and its connections stay open."""
        self.members[name].send(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Lets a frozen process go on."""
        self.members[name].send(signal.SIGCONT)

    def arm(self, name: str, text: str) -> None:
        """Gives the next life of a process faults, as BLOCKYARD_FAULTS has them."""
        faults.parse(text)
        self.members[name].next_faults = text

    # What is seen.

    def admin(self, gateway: int = 0) -> admin_pb2_grpc.AdminServiceAsyncStub:
        """A gateway's admin API."""
        return admin_pb2_grpc.AdminServiceStub(self._channels[gateway])

    async def status(self, gateway: int = 0, seconds: float = 5.0) -> admin_pb2.GetStatusResponse:
        """Asks a gateway's admin API how things are. Raises grpc.aio.AioRpcError."""
        return await self.admin(gateway).GetStatus(admin_pb2.GetStatusRequest(), timeout=seconds, wait_for_ready=True)

    async def wait_until_ready(self, seconds: float = START_SECONDS, num_replicas: int = 0) -> None:
        """Waits until every gateway takes requests and so many replicas (0: all) take steps. Raises ClusterError."""
        num_replicas = num_replicas or len(self._replicas)
        deadline = time.monotonic() + seconds
        told = "nothing answered"
        while time.monotonic() < deadline:
            try:
                statuses = [await self.status(number, 1.0) for number in range(len(self._channels))]
            except grpc.aio.AioRpcError as error:
                told = str(error.details())
            else:
                if all(_is_ready(status, num_replicas) for status in statuses):
                    return
                told = "\n".join(map(str, statuses))
            self.check()
            await asyncio.sleep(POLL_SECONDS)
        raise ClusterError(f"not ready after {seconds:g} s: {told}")

    def check(self) -> None:
        """Raises ClusterError where a process has ended by itself, with the end of its log."""
        for member in self.members.values():
            if wrong := [code for code in member.exit_codes if code not in EXPECTED_EXIT_CODES]:
                raise ClusterError(f"{member.name} ended with {wrong}:\n{member.log[-4000:]}")

    def num_deaths(self, name: str) -> int:
        """Lives of a process that have ended."""
        return len(self.members[name].exit_codes)

    def num_open_files(self, name: str) -> int:
        """File descriptors of a running process."""
        process = self.members[name].process
        assert process is not None
        return len(os.listdir(f"/proc/{process.pid}/fd"))

    def log(self, name: str) -> str:
        """All that a member's lives have written."""
        return self.members[name].log


def _is_ready(status: admin_pb2.GetStatusResponse, num_replicas: int) -> bool:
    replicas = status.scheduler.replicas
    return status.gateway.ready and sum(replica.ready for replica in replicas) == num_replicas


def name_workers(replica_sizes: Sequence[int]) -> list[list[str]]:
    """Names the workers of each replica by their ranks."""
    numbers = itertools.count()
    return [[f"{'rank' if size > 1 else 'worker'}-{next(numbers)}" for _ in range(size)] for size in replica_sizes]


@cache
def _own_ports() -> range:
    """Claims ports for this process, by a name that no other one can have before this one has ended."""
    for first in random.SystemRandom().sample(PORTS[::NUM_OWN_PORTS], len(PORTS[::NUM_OWN_PORTS])):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0blockyard-test-ports-{first}")
        except OSError:
            claim.close()
        else:
            claim.detach()
            return range(first, first + NUM_OWN_PORTS)
    raise ClusterError("as many processes choose ports as there are ports for")


def choose_ports(number: int) -> list[int]:
    """Finds free ports that neither the kernel nor another process like this one gives away."""
    own = _own_ports()
    with ExitStack() as held:
        chosen: list[int] = []
        for port in random.SystemRandom().sample(own, len(own)):
            probe = held.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                chosen.append(port)
            if len(chosen) == number:
                break
        return chosen
