"""The services as `blockyard serve` starts them, and a client that costs as little as one can, on the same processors.

The client is this process. It sends token ids and wants no more than it is made to take: either whole answers, as
programs do that want none of it earlier, or streams.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

import grpc.aio

from benchmarks.kit.processes import cpu_seconds, peak_memory_bytes
from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.client.targets import client_channel_options
from blockyard.common.v1 import sampling_pb2
from blockyard.configuration import SystemConfiguration
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from blockyard.local.local_system import LocalSystem
from blockyard.local.supervisor import Supervisor
from blockyard.settings import resolve

if TYPE_CHECKING:
    from benchmarks.kit.worker_alone import Settings
    from benchmarks.kit.workload import Workload

SERVICES = ("worker", "scheduler", "gateway")
POLL_SECONDS = 0.02


class Api(StrEnum):
    """How answers are read."""

    GENERATE = "generate"
    STREAM = "stream"


@dataclass(frozen=True, slots=True)
class Run:
    """One batch: seconds from the first request to the last answer, and CPU seconds of each process."""

    seconds: float
    cpu_seconds: dict[str, float]


def make_requests(workload: Workload) -> list[inference_pb2.GenerationSpec]:
    """The requests of a batch."""
    return [make_request(prompt, workload.num_output_tokens) for prompt in workload.prompts()]


def make_request(prompt: list[int], num_output_tokens: int) -> inference_pb2.GenerationSpec:
    """A request: greedy, blind to ends, ids in and ids out."""
    return inference_pb2.GenerationSpec(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling_pb2.SamplingParams(temperature=0.0),
        stop=sampling_pb2.StopCriteria(max_tokens=num_output_tokens, ignore_eos=True),
        return_token_ids=True,
    )


class WholeSystem:
    """A running system. `first_token_seconds`: from the start of the first process to the first token of an answer.

    `async with WholeSystem(settings) as system`; raises StartError when a service does not start.
    """

    def __init__(self, settings: Settings, answers: str = "", **more: Any) -> None:
        """`more`: settings of `blockyard serve` beside these. `answers`: a file that the worker replays, or none."""
        values: dict[str, Any] = {
            **dict.fromkeys(("grpc_port", "http_port", "admin_port"), 0),
            **{name: getattr(settings, name) for name in ("model", "dtype", "num_threads", "block_size")},
            **{name: getattr(settings, name) for name in ("cpu_kernels", "num_device_blocks", "max_num_seqs")},
            **{name: getattr(settings, name) for name in ("max_num_batched_tokens", "max_model_len", "packed_cache")},
            **({"quantization": settings.quantization} if settings.quantization else {}),
            "device": "cpu",
            "num_host_blocks": 0,
            "log_level": "warning",
            **more,
        }
        self._local = LocalSystem(resolve(SystemConfiguration, values))
        worker, *others = self._local.make_services()
        if answers:
            worker = replace(worker, module="benchmarks.kit.replaying_worker", flags=(answers, *worker.flags))
        self._supervisor = Supervisor(
            [worker, *others],
            self._local.is_ready,
            write_line=lambda line: print(line, file=sys.stderr, flush=True),
            environment=self._local.make_environment(),
            poll_seconds=POLL_SECONDS,
        )
        self.first_token_seconds = 0.0
        self._peak_bytes = 0

    async def __aenter__(self) -> Self:
        watch = asyncio.create_task(self._watch_memory())
        try:
            begin = time.perf_counter()
            await self._supervisor.start()
            await self._read_first_token()
            self.first_token_seconds = time.perf_counter() - begin
        except BaseException:
            await self._stop()
            raise
        finally:
            watch.cancel()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)
        await self._stop()

    async def _stop(self) -> None:
        await self._supervisor.stop()
        await self._local.close()

    async def _read_first_token(self) -> None:
        target = self._local.endpoints.grpc
        self._channel = grpc.aio.insecure_channel(target, client_channel_options(target))
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        async for event in self._stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=_hello())):
            if event.event.HasField("delta"):
                return

    async def _watch_memory(self) -> None:
        """Follows the worker's peak while it starts: the worker itself begins its peak anew after loading."""
        while True:
            self.peak_memory_bytes()
            await asyncio.sleep(POLL_SECONDS)

    def peak_memory_bytes(self) -> int:
        """The most memory that the first worker has had resident since its start."""
        pid = self._supervisor.children[0].pid
        self._peak_bytes = max(self._peak_bytes, peak_memory_bytes(pid) if pid else 0)
        return self._peak_bytes

    @property
    def grpc_address(self) -> str:
        """Where clients reach the gateway."""
        return self._local.endpoints.grpc

    @property
    def admin_address(self) -> str:
        """Where operators reach the gateway."""
        return self._local.endpoints.admin

    @property
    def worker_pid(self) -> int:
        """The first worker's process."""
        pid = self._supervisor.children[0].pid
        assert pid is not None
        return pid

    async def run(self, workload: Workload, api: Api = Api.GENERATE) -> Run:
        """Runs a batch."""
        specs = make_requests(workload)
        read = {Api.GENERATE: self._generate, Api.STREAM: self._stream}[api]
        before = self.cpu_seconds()
        begin = time.perf_counter()
        counts = await asyncio.gather(*map(read, specs))
        seconds = time.perf_counter() - begin
        after = self.cpu_seconds()
        assert sum(counts) == workload.num_tokens, (counts, workload)
        return Run(seconds, {name: after[name] - before[name] for name in after})

    async def run_prompts(
        self, prompts: list[list[int]], lengths: list[int], temperature: float = 0.0
    ) -> tuple[float, list[list[int]]]:
        """Runs a batch of requests for so many tokens.

        Returns the seconds from the first request to the last answer, and the answers' ids.
        """
        specs = list(map(make_request, prompts, lengths))
        for number, spec in enumerate(specs):
            spec.sampling.temperature, spec.sampling.seed = temperature, number
        requests = [inference_pb2.GenerateRequest(spec=spec) for spec in specs]
        begin = time.perf_counter()
        answers = await asyncio.gather(*map(self._stub.Generate, requests))
        seconds = time.perf_counter() - begin
        token_ids = [list(answer.choices[0].token_ids) for answer in answers]
        assert list(map(len, token_ids)) == lengths
        return seconds, token_ids

    async def _generate(self, spec: inference_pb2.GenerationSpec) -> int:
        answer = await self._stub.Generate(inference_pb2.GenerateRequest(spec=spec))
        return len(answer.choices[0].token_ids)

    async def _stream(self, spec: inference_pb2.GenerationSpec) -> int:
        num_tokens = 0
        async for response in self._stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec)):
            if response.event.HasField("delta"):
                num_tokens = response.event.delta.num_tokens
        return num_tokens

    def cpu_seconds(self) -> dict[str, float]:
        """What each service has cost so far, all workers together, and this process as the client."""
        *workers, scheduler, gateway = (child.pid for child in self._supervisor.children)
        pids = zip((*SERVICES, "client"), (workers, [scheduler], [gateway], [os.getpid()]), strict=True)
        return {name: sum(map(cpu_seconds, of_service)) for name, of_service in pids}

    async def weights_bytes(self) -> list[int]:
        """Asks what each worker holds of the model."""
        async with grpc.aio.insecure_channel(self._local.endpoints.admin) as channel:
            stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
            status = await stub.GetStatus(admin_pb2.GetStatusRequest())
        return [worker.weights_bytes for replica in status.scheduler.replicas for worker in replica.workers]


def _hello() -> inference_pb2.GenerationSpec:
    """A request of one token."""
    return inference_pb2.GenerationSpec(
        text="hello", stop=sampling_pb2.StopCriteria(max_tokens=1, ignore_eos=True), return_token_ids=True
    )
