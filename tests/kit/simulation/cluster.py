"""The services as simulated processes: gateways, a scheduler and workers, each on a node of its own.

A node's process is started again some time after it was killed, as a supervisor does.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from fastapi import FastAPI

from blockyard.clock import Clock
from blockyard.configuration import ModelSettings, PublicSettings
from blockyard.contract.models import Task
from blockyard.lora.settings import LoraSettings
from blockyard.speculation import SpeculationSettings
from gateway.config import GatewayConfiguration
from gateway.config import ServiceSettings as GatewayServiceSettings
from gateway.fronts.http.server import make_http_app
from gateway.server import Parts
from gateway.server import Server as GatewayServer
from gateway.text.tokenizer_files import load_tokenizer
from scheduler_service.config import SchedulerConfiguration
from scheduler_service.server import Server as SchedulerServer
from tests.kit.fakes.fake_worker import FakeWorker, FakeWorkerOptions
from tests.kit.simulation.asks import ADAPTERS, MAX_MODEL_LEN, MODEL, VOCAB_SIZE, model_folder
from tests.kit.simulation.device import SimDevice
from tests.kit.simulation.http import SimHttpFront
from tests.kit.simulation.network import Network
from tests.kit.simulation.points import Points
from tests.kit.simulation.transport import SimTransport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.kit.simulation.loop import Owner, SimLoop

GRPC_PORT, ADMIN_PORT, SCHEDULER_PORT, WORKER_PORT, HTTP_PORT = 50051, 50052, 50060, 50070, 8000
# 2026 in seconds since 1970: the wall clock's time at the start.
WALL_SECONDS = 1.78e9
# Faults may last so long.
FELT_SECONDS = 20.0
# How long a supervisor takes to start a process again.
RESTART_SECONDS = (0.05, 2.0)
STEP_SECONDS, LONG_STEP_SECONDS = (0.01, 0.2), (0.5, 8.0)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a simulated cluster.

    `ranks`: the workers of each replica; `stages`: those of its pipeline; `is_slow`: its steps are as long as
    those of a large model with long prompts.
    """

    num_gateways: int = 2
    ranks: tuple[int, ...] = (1, 1)
    stages: int = 1
    num_device_blocks: int = 60
    num_host_blocks: int = 20
    block_size: int = 4
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    policy: Literal["fcfs", "priority"] = "fcfs"
    max_waiting_requests: int = 0
    speculation: Literal["none", "ngram", "auto"] = "none"
    max_loras: int = 0
    task: Task = Task.GENERATE
    has_http: bool = False
    is_slow: bool = False

    @property
    def replicas(self) -> list[list[str]]:
        """The names of each replica's workers."""
        numbers = count()
        return [[f"worker-{next(numbers)}" for _ in range(size)] for size in self.ranks]

    @property
    def workers(self) -> list[str]:
        return [name for names in self.replicas for name in names]


class Struck(NamedTuple):
    """A fault that struck: its kind, and the role of what it struck."""

    at: float
    kind: str
    role: str


class Process:
    """One life of a node: what the real parts take their time, chance and connections from."""

    def __init__(self, cluster: Cluster, name: str, number: int) -> None:
        loop = cluster.loop
        self.name = name
        self.network = cluster.network
        self.owner: Owner = loop.owner(name)
        self.transport: Any = SimTransport(cluster.network, name, self.owner)
        self.random = loop.random_for(f"{name}/{number}")
        self.wall_offset = 0.0
        self.clock = Clock(loop.time, loop.time, lambda: WALL_SECONDS + self.wall_offset + loop.time(), self.random)


class Node:
    """A machine with one service, which lives again and again.

    Attributes:
        process: its present or last life.
        service: the server object of that life, once it has been made.
    """

    def __init__(self, cluster: Cluster, name: str, live: Callable[[Node, Process], Awaitable[None]]) -> None:
        self.cluster = cluster
        self.name = name
        self.num_lives = 0
        self.process: Process
        self.service: Any = None
        self.stopping: asyncio.Event
        self._live = live
        self._random = cluster.loop.random_for(f"{name}/lives")

    def start(self) -> None:
        self.num_lives += 1
        self.process = Process(self.cluster, self.name, self.num_lives)
        self.service, self.stopping = None, asyncio.Event()
        self.cluster.loop.spawn(self.process.owner, self._run(), f"{self.name}-{self.num_lives}")

    async def _run(self) -> None:
        await self._live(self, self.process)
        # It ended by itself, because it was told to stop.
        self.cluster.loop.call_soon(self.kill)

    def stop(self) -> None:
        """Tells the process to stop, as SIGTERM does; it is started again when it has ended."""
        self.stopping.set()

    def call(self, work: Callable[[], object]) -> None:
        """Calls something in the process, if it lives."""
        if self.process.owner.alive:
            self.cluster.loop.call_soon(work, context=self.cluster.loop.context_of(self.process.owner))

    def kill(self, silently: bool = False) -> None:
        """Kills the process; it is started again after some time."""
        if not self.process.owner.alive:
            return
        self.cluster.deaths.append((self.cluster.loop.time(), self.name))
        self.cluster.network.kill(self.process.owner, silently)
        loop = self.cluster.loop
        loop.call_later(self._random.uniform(*RESTART_SECONDS), self.start, context=loop.context_of(loop.main))


class NoFront:
    """Instead of the servers of HTTP: a port on which nobody listens."""

    def __init__(self, app: Any, *_: Any, **__: Any) -> None:
        self.app = app

    def bind(self, host: str, port: int) -> int:
        return port

    def start(self) -> None: ...

    async def stop(self) -> None: ...


# Made once, since it is slow and the same for each gateway.
APP = FastAPI(openapi_url=None)
MAKE_FRONT: Any = NoFront
PARTS = Parts(make_app=lambda _: APP, make_front=MAKE_FRONT, load_tokenizer=cache(load_tokenizer))


@cache
def model_digest() -> str:
    """The SHA-256 of the demo model's config.json, by which services agree on the model."""
    return hashlib.sha256((MODEL / "config.json").read_bytes()).hexdigest()


class Cluster:
    """Starts the nodes `gateway-N`, `scheduler` and `worker-N`.

    Attributes:
        deaths: when which node's process ended, killed or by itself.
        strikes: the faults so far.
        operations: what operators do.
    """

    def __init__(self, loop: SimLoop, sizes: Sizes) -> None:
        self.loop = loop
        self.network = Network(loop)
        self.sizes = sizes
        self.nodes: dict[str, Node] = {}
        self.points = Points(self)
        # The process from which operators call.
        self.operator = Process(self, "operator", 0)
        self.deaths: list[tuple[float, str]] = []
        self.strikes: list[Struck] = []
        self.operations: list[asyncio.Task[None]] = []
        for name in sizes.workers:
            self._add(name, run_worker)
        self._add("scheduler", run_scheduler)
        for number in range(sizes.num_gateways):
            self._add(f"gateway-{number}", run_gateway)

    def _add(self, name: str, live: Callable[[Node, Process], Awaitable[None]]) -> None:
        self.nodes[name] = Node(self, name, live)
        address = f"10.0.0.{len(self.nodes)}"
        self.loop.names[name] = [address]
        self.network.hosts[address] = name

    def start(self) -> None:
        for node in self.nodes.values():
            node.start()

    def num_deaths(self, role: str, since: float) -> int:
        """Counts the ends of processes of a role since a time."""
        return sum(at >= since and name.startswith(role) for at, name in self.deaths)

    def note_strike(self, kind: str, role: str) -> None:
        self.strikes.append(Struck(self.loop.time(), kind, role))

    def num_strikes(self, since: float, *kinds: str) -> int:
        """Counts the faults of some kinds, or of all, since a time, and those that may still be felt then."""
        felt = self.felt_strikes(since)
        return sum(not kinds or strike.kind in kinds for strike in felt)

    def felt_strikes(self, since: float) -> list[Struck]:
        """Returns the faults since a time, and those that may still be felt then."""
        return [strike for strike in self.strikes if strike.at >= since - FELT_SECONDS]

    def num_losses(self, since: float) -> float:
        """Counts how often the scheduler lost a worker since a time: any number if there was another scheduler then."""
        scheduler = self.nodes["scheduler"]
        if scheduler.service is None or self.num_deaths("scheduler", since):
            return inf
        return sum(record.at >= since for record in scheduler.service.service.dispatcher.recovery_log.latest)

    @property
    def targets(self) -> list[str]:
        """The gateways' public gRPC addresses."""
        return [f"{name}:{GRPC_PORT}" for name in self.nodes if name.startswith("gateway")]


async def run_worker(node: Node, process: Process) -> None:
    sizes = node.cluster.sizes
    options = FakeWorkerOptions(
        block_size=sizes.block_size,
        num_device_blocks=sizes.num_device_blocks,
        num_host_blocks=sizes.num_host_blocks,
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        model_digest=model_digest(),
        task=sizes.task,
        names_weights=True,
    )

    seconds = LONG_STEP_SECONDS if sizes.is_slow else STEP_SECONDS

    def make_device(execute: Any, answer: Any, _: float) -> Any:
        return SimDevice(execute, answer, partial(process.random.uniform, *seconds))

    address = f"{node.name}:{WORKER_PORT}"
    node.service = FakeWorker(options, address, process.clock, process.transport, make_device)
    async with node.service:
        await node.stopping.wait()
        node.service.drain()
        # The scheduler closes its streams when it has learned of the drain.
        await asyncio.sleep(1.0)


async def run_scheduler(node: Node, process: Process) -> None:
    sizes, base = node.cluster.sizes, SchedulerConfiguration()
    replicas = ["+".join(f"{name}:{WORKER_PORT}" for name in names) for names in sizes.replicas]
    configuration = replace(
        base,
        model=ModelSettings(model="fake"),
        service=replace(
            base.service,
            scheduler_address=f"{node.name}:{SCHEDULER_PORT}",
            worker_address=",".join(replicas),
            debug_integrity=True,
            wait_while_asleep=True,
            max_waiting_requests=sizes.max_waiting_requests,
        ),
        scheduler=replace(
            base.scheduler,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            policy=sizes.policy,
        ),
        parallel=replace(
            base.parallel,
            tensor_parallel_size=max(sizes.ranks) // sizes.stages,
            pipeline_parallel_size=sizes.stages,
        ),
        speculation=SpeculationSettings(sizes.speculation, max_draft_tokens=5, max_draft_rows=12),
        lora=LoraSettings(
            max_loras=sizes.max_loras,
            lora_modules=",".join(f"{name}={name}" for name in ADAPTERS) if sizes.max_loras else "",
            lora_patience_seconds=0.5,
        ),
    )
    node.service = SchedulerServer(configuration, process.clock, process.transport)
    await node.service.start()
    await node.service.run_until(node.stopping)
    await node.service.stop()


async def run_gateway(node: Node, process: Process) -> None:
    configuration = GatewayConfiguration(
        model=ModelSettings(model=str(model_folder(node.cluster.sizes.task))),
        public=replace(PublicSettings(), grpc_port=GRPC_PORT, http_port=HTTP_PORT, admin_port=ADMIN_PORT),
        service=GatewayServiceSettings(scheduler_address=f"scheduler:{SCHEDULER_PORT}"),
    )
    parts = PARTS
    if node.cluster.sizes.has_http:
        parts = replace(PARTS, make_app=make_http_app, make_front=partial(SimHttpFront, process))
    node.service = GatewayServer(configuration, clock=process.clock, transport=process.transport, parts=parts)
    await node.service.start()
    await node.stopping.wait()
    with suppress(TimeoutError):
        await asyncio.wait_for(node.service.drain(), 0.5)
    await node.service.stop()
