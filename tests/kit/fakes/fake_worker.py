"""A worker without a model: speaks WorkerService over a real socket, checks the step stream, answers hashes.

As a program (`python -m tests.kit.fakes.fake_worker --worker-address unix:/…`) or as a server inside a test
(`FakeWorker`). Strict, every step is executed by the symbolic `ModelWorker` first, which knows what each slot of each
block holds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Self

from blockyard.channels import INTERNAL_MESSAGE_BYTES
from blockyard.clock import SYSTEM, Clock
from blockyard.common.v1 import sampling_pb2, status_pb2
from blockyard.contract.codec.models import TASKS
from blockyard.contract.models import Task
from blockyard.contract.scheduling import SequenceError
from blockyard.errors import BlockyardError, Reason, Violation, invalid, to_status
from blockyard.service import faults
from blockyard.service.health import add_health
from blockyard.service.servers import bind, make_server
from blockyard.transport import GRPC, Transport
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.kit.fakes.fake_device import Answer, Device
from tests.kit.fakes.fake_group import Digests, FakeGroup
from tests.kit.fakes.fake_loras import FakeLoras
from tests.kit.fakes.fake_memory import FakeMemory
from tests.kit.fakes.fake_operations import FakeOperations
from tests.kit.fakes.worker_codec import decode_step, encode_result
from tests.kit.oracles.hostile_drafter import HostileDrafter
from tests.kit.oracles.model_worker import ModelWorker
from tests.kit.oracles.token_rows import TokenRows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import grpc.aio

    from scheduler_service.core.values import GroupSpec, SchedulerOutput, StepResult


@dataclass(frozen=True)
class FakeWorkerOptions:
    """What a fake worker says of itself, how long its steps take, and whether it checks what blocks hold."""

    block_size: int = 16
    num_device_blocks: int = 1000
    num_host_blocks: int = 100
    vocab_size: int = 100
    max_model_len: int = 4096
    step_seconds: float = 0.0
    strict: bool = True
    determinism_id: str = "hash"
    batch_invariant: bool = True
    weights_digest: str = "hash"
    model_digest: str = "0" * 64
    worker_group: str = ""
    worker_index: int = 0
    # What it serves where it is not told, by its number, and whether a prompt is computed in one step.
    task: Task = Task.GENERATE
    whole_prompts: bool = False
    # Whether tokens depend on the name of the weights.
    names_weights: bool = False
    # The fixed blocks of a sequence, which hold a state that it checks.
    num_state_blocks: int = 0


FAILURE = SequenceError("NOT_FINITE", "failed on request")


def seed_of_payload(spec: GroupSpec) -> int:
    """The seed among the sampling parameters, the only part of a request that names it to a worker."""
    return sampling_pb2.SamplingParams.FromString(spec.payload or b"").seed


class FakeWorker(FakeOperations, FakeMemory, FakeLoras, FakeGroup, worker_pb2_grpc.WorkerServiceServicer):
    """A worker process, or what looks like one: `async with FakeWorker(options, address) as worker`."""

    def __init__(
        self,
        options: FakeWorkerOptions,
        address: str,
        clock: Clock = SYSTEM,
        transport: Transport = GRPC,
        make_device: Callable[..., Device] = Device,
    ) -> None:
        super().__init__()
        self.options = options
        self.address = address
        self.state = status_pb2.WORKER_STATE_CREATED
        self.epoch = 0
        self.configuration_digest = ""
        self.incarnation = clock.uuid_hex()
        self.make_device = make_device
        self.transport = transport
        self.api_version = "v1"
        self.task = Task.UNSPECIFIED
        # It stops loading at so many bytes until it may go on.
        self.pause_at: int | None = None
        self.may_load = asyncio.Event()
        self.num_infos = self.num_loads = self.num_profiles = 0
        self.cache: worker_pb2.CacheInfo | None = None
        self.plans: list[worker_pb2.InitializeCacheRequest] = []
        self.refusals: list[str] = []
        # Faults that a test asks for: refuse a step, or each with this prompt, answer with the wrong sequences, fail
        # sequences alone.
        self.refuse_next = ""
        self.refuse_prompt: tuple[int, ...] = ()
        # Whether the refusal of such a prompt names its sequence.
        self.names_refused = False
        # A prompt at the sight of which its stream breaks, and how often that was.
        self.die_of_prompt: tuple[int, ...] | None = None
        self.num_deaths = 0
        self.skew_next = False
        # A prompt whose first step is answered so, each time.
        self.skew_prompt: tuple[int, ...] | None = None
        self.fail_sequences: set[int] = set()
        self.stopping = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self.devices: list[Device] = []
        # What executes the latest stream's steps, if the worker is strict.
        self.model: ModelWorker | None = None
        self.is_draining = False
        self._streams: list[_Stream] = []
        self._reader: asyncio.Task[Any] | None = None
        self._server = make_server(INTERNAL_MESSAGE_BYTES, ["blockyard.worker.v1.WorkerService"], transport=transport)
        self.add_to(self._server)
        add_health(self._server, lambda: True, lambda: True)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Answers the service there."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def __aenter__(self) -> Self:
        port = bind(self._server, self.address)
        if not self.address.startswith("unix:"):
            self.address = f"{self.address.rpartition(':')[0]}:{port}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def kill(self) -> None:
        """Ends at once, as a killed process does."""
        await self._server.stop(0)
        for device in self.devices:
            device.close()
            await device.join()

    def hang(self) -> None:
        """Begins no step and answers nobody until `go_on`, as a stopped process does."""
        self._awake.clear()
        for device in self.devices:
            device.gate.clear()

    def go_on(self) -> None:
        """Does what it was asked for meanwhile."""
        self._awake.set()
        for device in self.devices:
            device.gate.set()

    def drain(self) -> None:
        """Runs no further step and says so, as a worker that was told to stop."""
        self.is_draining = True
        for stream in self._streams:
            stream.drain()

    def _require(self, *states: int) -> None:
        if self.is_draining:
            raise BlockyardError(Reason.DRAINING, "the worker is stopping")
        if self.state not in states:
            name = status_pb2.WorkerState.Name(self.state)
            raise BlockyardError(Reason.WRONG_STATE, f"not in state {name}")

    def _model(self) -> worker_pb2.LoadedModel:
        return worker_pb2.LoadedModel(
            architecture="Hash",
            vocab_size=self.options.vocab_size,
            max_model_len=self.options.max_model_len,
            model_digest=self.options.model_digest,
            weights_digest=self.options.weights_digest,
            parameter_bytes=1000,
            dtype=worker_pb2.DTYPE_FLOAT32,
            weights_version=self.weights_version,
            task=TASKS.encode(self.options.task if self.task is Task.UNSPECIFIED else self.task),
            whole_prompts=self.options.whole_prompts,
        )

    async def GetWorkerInfo(self, request: worker_pb2.GetWorkerInfoRequest, context: Any) -> Any:
        await self._awake.wait()
        self.num_infos += 1
        loaded = self.state >= status_pb2.WORKER_STATE_LOADED
        return worker_pb2.GetWorkerInfoResponse(
            worker_id="fake",
            incarnation=self.incarnation,
            api_version=self.api_version,
            state=self.state,
            epoch=self.epoch,
            configuration_digest=self.configuration_digest,
            device="none",
            model=self._model() if loaded else None,
            cache=self.cache,
            lora=self.lora_info(),
            draining=self.is_draining,
            group=self.group,
            placement=worker_pb2.Placement(group=self.options.worker_group, index=self.options.worker_index),
            sleep=self.sleep if loaded else None,
        )

    async def InitDevice(self, request: worker_pb2.InitDeviceRequest, context: Any) -> Any:
        self._require(status_pb2.WORKER_STATE_CREATED)
        self.configuration_digest = request.configuration_digest
        self.parallel = request.parallel if request.HasField("parallel") else None
        self.state = status_pb2.WORKER_STATE_DEVICE_READY
        return worker_pb2.InitDeviceResponse(device="none")

    async def LoadModel(self, request: worker_pb2.LoadModelRequest, context: Any) -> AsyncIterator[Any]:
        self._require(status_pb2.WORKER_STATE_DEVICE_READY)
        faults.reach(faults.BEFORE_LOAD)
        self.num_loads += 1
        self.task = TASKS.decode(request.task)
        self.lora_limits = request.lora if request.HasField("lora") else None
        for done in (0, 500, 1000):
            progress = worker_pb2.LoadProgress(done_bytes=done, total_bytes=1000)
            yield worker_pb2.LoadModelResponse(progress=progress)
            if done == self.pause_at:
                await self.may_load.wait()
        self.state = status_pb2.WORKER_STATE_LOADED
        yield worker_pb2.LoadModelResponse(loaded=self._model())

    async def DetermineNumAvailableBlocks(self, request: Any, context: Any) -> Any:
        self._require(status_pb2.WORKER_STATE_LOADED)
        self.num_profiles += 1
        return worker_pb2.DetermineNumAvailableBlocksResponse(
            block_size=request.block_size or self.options.block_size,
            num_device_blocks=self.options.num_device_blocks,
            num_host_blocks=self.options.num_host_blocks,
            cache_block_bytes=1024,
            kv_windows=[0],
            num_state_blocks=self.options.num_state_blocks,
        )

    async def InitializeCache(self, request: worker_pb2.InitializeCacheRequest, context: Any) -> Any:
        self._require(status_pb2.WORKER_STATE_LOADED)
        self.plans.append(request)
        self.cache = worker_pb2.CacheInfo(
            block_size=request.block_size,
            num_device_blocks=request.num_device_blocks,
            num_host_blocks=request.num_host_blocks,
            cache_block_bytes=1024,
            max_model_len=request.max_model_len,
            determinism_id=self.options.determinism_id,
            batch_invariant=self.options.batch_invariant,
            kv_windows=[0],
            num_state_blocks=request.num_state_blocks,
        )
        self.state = status_pb2.WORKER_STATE_CACHE_READY
        return worker_pb2.InitializeCacheResponse(cache=self.cache)

    async def Shutdown(self, request: worker_pb2.ShutdownRequest, context: Any) -> Any:
        self.stopping.set()
        return worker_pb2.ShutdownResponse()

    async def ExecuteModel(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        self._require(status_pb2.WORKER_STATE_CACHE_READY, status_pb2.WORKER_STATE_RUNNING)
        self._end_streams()
        self.state = status_pb2.WORKER_STATE_RUNNING
        stream = _Stream(self, self._executor())
        if not self._awake.is_set():
            stream.device.gate.clear()
        self.devices.append(stream.device)
        self._streams.append(stream)
        reader = self._reader = asyncio.create_task(stream.read(request_iterator))
        try:
            while (message := await stream.answers.get()) is not None:
                faults.reach(faults.BEFORE_ANSWER)
                yield message
                faults.reach(faults.AFTER_ANSWER)
        finally:
            reader.cancel()
            stream.device.close()
            if stream is self._streams[-1]:
                self.state = status_pb2.WORKER_STATE_CACHE_READY
            if stream.unanswered:
                self.break_group("the step stream ended")

    def _end_streams(self) -> None:
        if self._reader:
            self._reader.cancel()

    def _executor(self) -> Callable[[SchedulerOutput], StepResult]:
        options, cache = self.options, self.cache
        assert cache is not None
        if options.strict:
            sizes = (cache.block_size, cache.num_device_blocks, cache.num_host_blocks)
            # A worker whose cache a test made drafts nothing.
            plan = self.plans[-1] if self.plans else worker_pb2.InitializeCacheRequest()
            model = ModelWorker(
                *sizes,
                vocab_size=options.vocab_size,
                seed_of=seed_of_payload,
                takes_ids=self.has_stages,
                max_loras=self.max_loras,
                weights=self.weights_version if options.names_weights else "",
                max_draft_tokens=plan.max_draft_tokens,
                max_draft_rows=plan.max_draft_rows,
                drafter=HostileDrafter() if plan.max_draft_tokens else None,
                num_state_blocks=plan.num_state_blocks,
            )
            self.model = model
            return lambda step: self._spoil(step, model.execute(step))
        rows = TokenRows(options.vocab_size, seed_of_payload)
        return lambda step: self._spoil(step, rows.execute(step))

    def _spoil(self, step: SchedulerOutput, result: StepResult) -> StepResult:
        """Does what a test asked for, in the device's thread."""
        for index, new in enumerate(step.new_sequences):
            if new.token_ids == self.refuse_prompt and self.names_refused:
                raise invalid([Violation(f"new_sequences[{index}].block_ids", "cannot be")])
            if new.token_ids == self.refuse_prompt:
                raise ValueError("the worker cannot stand this prompt")
        if self.lose_group_next:
            self.lose_group_next = False
            self.break_group("a peer is gone")
            raise BlockyardError(Reason.GROUP_BROKEN, "a peer is gone")
        if self.refuse_next:
            refusal, self.refuse_next = self.refuse_next, ""
            raise ValueError(refusal)
        if self.skew_next or any(new.token_ids == self.skew_prompt for new in step.new_sequences):
            self.skew_next = False
            num_tokens = (*result.num_tokens, 1) if result.num_tokens else ()
            sequence_ids, token_ids = (*result.sequence_ids, 10**6), (*result.token_ids, 1)
            return replace(result, sequence_ids=sequence_ids, token_ids=token_ids, num_tokens=num_tokens)
        pooled_ids = [sequence_id for sequence_id, _ in result.pooled]
        if failed := self.fail_sequences.intersection((*result.sequence_ids, *pooled_ids)):
            self.fail_sequences -= failed
            result = replace(result, pooled=tuple(pair for pair in result.pooled if pair[0] not in failed))
            failures = tuple((sequence_id, FAILURE) for sequence_id in failed)
            return replace(_without(result, failed), failures=failures)
        return result


def _without(result: StepResult, failed: set[int]) -> StepResult:
    """The answer without the tokens of some sequences."""
    tokens = iter(result.token_ids)
    counts = result.num_tokens or (1,) * len(result.sequence_ids)
    runs = {
        sequence_id: tuple(islice(tokens, count))
        for sequence_id, count in zip(result.sequence_ids, counts, strict=True)
    }
    kept = {sequence_id: run for sequence_id, run in runs.items() if sequence_id not in failed}
    token_ids = tuple(chain.from_iterable(kept.values()))
    num_tokens = tuple(map(len, kept.values())) if result.num_tokens else ()
    return replace(result, sequence_ids=tuple(kept), token_ids=token_ids, num_tokens=num_tokens)


class _Stream:
    """One epoch's step stream: checks identities, feeds the device, encodes its answers."""

    def __init__(self, worker: FakeWorker, execute: Callable[[SchedulerOutput], StepResult]) -> None:
        self.answers: asyncio.Queue[worker_pb2.ExecuteModelResponse | None] = asyncio.Queue()
        self.device = worker.make_device(execute, self._answer, worker.options.step_seconds)
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._epoch = 0
        self._last_step_id = 0
        self._is_draining = False
        self._digests = Digests()
        self._is_skewed = False
        # The steps that were not answered, by their ids.
        self.unanswered: dict[int, worker_pb2.ExecuteModelRequest] = {}

    async def read(self, request_iterator: Any) -> None:
        try:
            async for message in request_iterator:
                self._accept(message)
        finally:
            self.end()

    def end(self) -> None:
        """Ends the stream after the answers that wait."""
        self.answers.put_nowait(None)

    def drain(self) -> None:
        """Says that the last answer given was the last."""
        self._is_draining = True
        self.answers.put_nowait(worker_pb2.ExecuteModelResponse(epoch=self._epoch, draining=True))

    def _accept(self, message: worker_pb2.ExecuteModelRequest) -> None:
        if any(tuple(new.token_ids) == self._worker.die_of_prompt for new in message.new_sequences):
            self._worker.num_deaths += 1
            self.end()
            return
        if wrong := self._wrong(message):
            self.device.submit(message.step_id, BlockyardError(Reason.BUG, wrong))
            return
        self._last_step_id = message.step_id
        self.unanswered[message.step_id] = message
        self.device.submit(message.step_id, decode_step(message, self._worker.lora_specs))

    def _wrong(self, message: worker_pb2.ExecuteModelRequest) -> str:
        if not self._epoch and message.epoch > self._worker.epoch:
            self._epoch = self._worker.epoch = message.epoch
        if message.epoch != self._epoch:
            return f"epoch {message.epoch} where {self._epoch} runs and {self._worker.epoch} was seen"
        if message.step_id != self._last_step_id + 1:
            return f"step {message.step_id} after step {self._last_step_id}"
        group = self._worker.group
        if self._worker.world_size > 1 and (group is None or group.problem or group.epoch != message.epoch):
            return f"no group is formed for epoch {message.epoch}"
        if message.ids_from_scheduler != (self._worker.has_stages and message.step_id == 1):
            return "whose the ids are was not said, or not now"
        return ""

    def _answer(self, step_id: int, result: Answer) -> None:
        """In the device's thread."""
        self._loop.call_soon_threadsafe(self._finish, step_id, result)

    def _finish(self, step_id: int, result: Answer) -> None:
        if self._is_draining:
            return
        request = self.unanswered.pop(step_id, None)
        if isinstance(result, BlockyardError):
            self._worker.refusals.append(result.message)
            refusal = to_status(result)
            message = worker_pb2.ExecuteModelResponse(epoch=self._epoch, step_id=step_id, refusal=refusal)
        else:
            message = encode_result(result, self._epoch, self._worker.options.step_seconds)
            if self._worker.world_size > 1 and request is not None:
                message = self._as_rank(request, message)
                if request.quiet and not self._worker.is_sampling:
                    return
        self.answers.put_nowait(message)

    def _as_rank(
        self, request: worker_pb2.ExecuteModelRequest, answer: worker_pb2.ExecuteModelResponse
    ) -> worker_pb2.ExecuteModelResponse:
        """Makes the answer of a rank: with its hashes, and with what was sampled by one rank alone."""
        worker = self._worker
        skew = b""
        if worker.num_epochs_to_skew and not self._is_skewed:
            worker.num_epochs_to_skew -= 1
            self._is_skewed, skew = True, b"?"
        hashes = self._digests.add(request.SerializeToString() + skew, answer)
        if not worker.is_sampling:
            answer = worker_pb2.ExecuteModelResponse(epoch=answer.epoch, step_id=answer.step_id, times=answer.times)
        answer.input_digest, answer.output_digest = hashes[0], hashes[1] * worker.is_in_last_stage
        return answer


def _parse(arguments: list[str]) -> tuple[FakeWorkerOptions, str]:
    parser = argparse.ArgumentParser("fake_worker")
    parser.add_argument("--worker-address", required=True)
    for field in fields(FakeWorkerOptions):
        flag = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            parser.add_argument(flag, type=type(field.default), default=field.default)
    values = vars(parser.parse_args(arguments))
    address = values.pop("worker_address")
    return FakeWorkerOptions(**values), address


async def _serve(options: FakeWorkerOptions, address: str) -> None:
    async with FakeWorker(options, address) as worker:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stopping.set)
        sys.stderr.write(f"fake worker {os.getpid()} listens on {worker.address}\n")
        await worker.stopping.wait()


if __name__ == "__main__":
    sys.setswitchinterval(1e-4)
    asyncio.run(_serve(*_parse(sys.argv[1:])))
