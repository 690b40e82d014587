"""The worker's states: what may be called when, and what each call makes. All torch work goes to the device thread.

    CREATED -> DEVICE_READY -> LOADED -> CACHE_READY <-> RUNNING

Lives in the event loop and never computes in it. Knows no messages.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.model_files import resolve_model
from blockyard.telemetry import EventLogger
from kernels.ops import BLOCK_SIZES, CaptureSizes
from worker_service.batch.input_batch import BatchLimits, InputBatch
from worker_service.cache_engine import BlockFormat, CacheEngine
from worker_service.device import memory
from worker_service.device.device import check_dtype, choose_device, describe_device
from worker_service.device.thread import DeviceThread
from worker_service.model_runner import ModelRunner
from worker_service.models.determinism import determinism_id
from worker_service.models.loader import load_model
from worker_service.observe.metrics import WorkerMetrics
from worker_service.observe.profiler import Profiler, choose_options
from worker_service.steps.step_executor import StepExecutor
from worker_service.steps.step_stream import StepStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    import torch

    from worker_service.models.loader import LoadedModel
    from worker_service.observe.profiler import Detail, Profile, ProfileOptions
    from worker_service.step import Step
    from worker_service.steps.step_stream import StepStream

log = EventLogger(__name__)

DEFAULT_BLOCK_SIZE = {"cpu": 32, "cuda": 16}
# Of a step: what is larger is a mistake, and would be found out only by the memory that it takes.
MAX_TOKENS, MAX_SEQS = 2**20, 2**16
# Numbers of blocks have 31 bits in every kernel.
MAX_BLOCKS = 2**31 - 1
# Beyond twice what all sequences at full length hold, blocks only cost their bookkeeping.
USEFUL_SHARE = 2


class State(Enum):
    """What a worker is ready for."""

    CREATED = "CREATED"
    DEVICE_READY = "DEVICE_READY"
    LOADED = "LOADED"
    CACHE_READY = "CACHE_READY"
    RUNNING = "RUNNING"


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device, what to compute in (None: as the model says), and the device's bytes that are not this worker's."""

    device: torch.device
    dtype: torch.dtype | None
    foreign_bytes: int


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to count blocks for."""

    block_size: int
    device_memory_utilization: float
    swap_space_bytes: int
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """Which pools to make, and what steps they are for."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """The pools that were made, and what can be promised of results."""

    request: CacheRequest
    cache_block_bytes: int
    determinism_id: str
    batch_invariant: bool


class Worker:
    """One device, one model, one cache, one epoch at a time."""

    def __init__(
        self, *, allowed_device: str = "auto", num_threads: int = 0, cpu_kernels: str = "auto", debug: bool = False
    ) -> None:
        self.incarnation = secrets.token_hex(8)
        self.configuration_digest = ""
        self.loaded: LoadedModel | None = None
        self.cache: CacheFacts | None = None
        self.is_draining = False
        self._allowed_device = allowed_device
        self._cpu_kernels = cpu_kernels
        self._debug = debug
        self._may_choose_threads = num_threads == 0
        self._choice: DeviceChoice | None = None
        self._thread = DeviceThread(memory.compute_threads(num_threads))
        self._set_up_as = State.CREATED
        self._executor: StepExecutor | None = None
        self.metrics = WorkerMetrics()
        self._streams = StepStreams(self._thread, self.metrics.on_step)
        self.metrics.watch(self)
        self._profiler = Profiler(self._thread)
        self._operation = ""

    def start(self) -> None:
        """Starts the device thread."""
        self._thread.start()

    async def drain(self, seconds: float) -> bool:
        """Refuses all that is new, finishes the step that runs, and says so on the open streams; tells whether in time.

        What waits behind the step is dropped; other work, a load for one, is waited for like the step.
        """
        self.is_draining = True
        self._streams.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._thread.run(lambda: None), seconds)
            return True
        return False

    async def end_streams(self, seconds: float) -> bool:
        """Waits for the scheduler to close its streams, ends those that are left, and tells whether any was."""
        return await self._streams.end(_draining(), seconds)

    async def stop(self, seconds: float) -> bool:
        """Ends the device thread, and tells whether in time: what runs cannot be interrupted."""
        return await asyncio.to_thread(self._thread.stop, seconds)

    @property
    def state(self) -> State:
        """What it is ready for now."""
        return State.RUNNING if self._streams.is_running else self._set_up_as

    @property
    def epoch(self) -> int:
        """The highest epoch that it has seen."""
        return self._streams.epoch

    @property
    def device_name(self) -> str:
        """The device in words; empty before it is chosen."""
        return describe_device(self._choice.device) if self._choice is not None else ""

    def _require(self, *states: State) -> None:
        if self.is_draining:
            raise _draining()
        if self.state not in states:
            legal = " or ".join(state.value for state in states)
            raise BlockyardError(Reason.WRONG_STATE, f"the worker is {self.state.value}; this needs {legal}")

    @contextmanager
    def _lifecycle(self, operation: str, *states: State) -> Generator[None]:
        """One change of state at a time."""
        self._require(*states)
        if self._operation:
            raise BlockyardError(Reason.WRONG_STATE, f"{self._operation} is running")
        self._operation = operation
        try:
            yield
        finally:
            self._operation = ""

    async def init_device(self, device_type: str, dtype: torch.dtype | None, configuration_digest: str) -> None:
        """Chooses the device; raises BlockyardError where it is not there or cannot compute in `dtype`."""
        with self._lifecycle("InitDevice", State.CREATED):
            self._choice = await self._thread.run(lambda: self._choose(device_type, dtype))
            self.configuration_digest = configuration_digest
            self._set_up_as = State.DEVICE_READY
            log.info("device chosen", device=self.device_name)

    def _choose(self, device_type: str, dtype: torch.dtype | None) -> DeviceChoice:
        device = choose_device(device_type, self._allowed_device)
        check_dtype(dtype, device)
        return DeviceChoice(device, dtype, memory.gpu_foreign_bytes(device) if device.type == "cuda" else 0)

    async def load_model(
        self,
        model: str,
        revision: str,
        on_progress: Callable[[int, int], None],
        quantization: str = "none",
        load_format: str = "auto",
    ) -> LoadedModel:
        """Loads a model; calls `on_progress` in the device thread. Goes on to the end even if its caller leaves."""
        with self._lifecycle("LoadModel", State.DEVICE_READY):
            choice = self._choice
            assert choice is not None

            def load() -> LoadedModel:
                folder = resolve_model(model, revision, "config" if load_format == "random" else "weights")
                loaded = load_model(
                    folder, choice.dtype, choice.device, on_progress, self._cpu_kernels, quantization, load_format
                )
                check_dtype(loaded.config.dtype, choice.device)
                return loaded

            self.loaded = await self._thread.run(load)
            self._set_up_as = State.LOADED
            log.info(
                "model loaded",
                architecture=self.loaded.config.architecture,
                kernels=self.loaded.backend.name,
                bytes=self.loaded.parameter_bytes,
            )
            return self.loaded

    async def determine_num_available_blocks(self, request: ProfileRequest) -> memory.CachePlan:
        """Profiles the worst step and counts the blocks that fit."""
        with self._lifecycle("DetermineNumAvailableBlocks", State.LOADED):
            _refuse(_wrong_profile_request(request))
            plan = await self._thread.run(lambda: self._profile(request))
            log.info("blocks counted", device=plan.num_device_blocks, host=plan.num_host_blocks, bytes=plan.cache_bytes)
            return plan

    def _profile(self, request: ProfileRequest) -> memory.CachePlan:
        loaded, choice = self._model()
        device = choice.device
        block_size = request.block_size or DEFAULT_BLOCK_SIZE[device.type]
        try:
            activation = ModelRunner(loaded).profile(block_size, request.max_num_batched_tokens, request.max_num_seqs)
        except (MemoryError, RuntimeError) as error:
            if not memory.is_exhausted(error):
                raise
            message = f"a step of {request.max_num_batched_tokens} tokens cannot be run: the memory is too small"
            raise BlockyardError(Reason.NEVER_FITS, message) from None
        on_cpu = device.type == "cpu"
        if on_cpu:
            usage = memory.cpu_usage(memory.read_host_memory(), loaded.parameter_bytes, activation)
        else:
            usage = memory.gpu_usage(device, choice.foreign_bytes, loaded.parameter_bytes, activation)
        blocks_of_a_sequence = -(-loaded.config.max_model_len // block_size)
        return memory.plan_cache(
            usage,
            block_size=block_size,
            block_bytes=BlockFormat.of(loaded.config, block_size).block_bytes,
            utilization=request.device_memory_utilization,
            swap_space_bytes=request.swap_space_bytes,
            host_shares_device=on_cpu,
            max_useful_blocks=USEFUL_SHARE * request.max_num_seqs * blocks_of_a_sequence + 1,
        )

    def _model(self) -> tuple[LoadedModel, DeviceChoice]:
        assert self.loaded is not None
        assert self._choice is not None
        return self.loaded, self._choice

    async def initialize_cache(self, request: CacheRequest) -> CacheFacts:
        """Allocates the pools, proves what it can about results, and warms up."""
        with self._lifecycle("InitializeCache", State.LOADED):
            loaded, _ = self._model()
            _refuse(_wrong_cache_request(request, loaded.config.max_model_len))
            self._executor, self.cache = await self._thread.run(lambda: self._make_cache(request))
            self._set_up_as = State.CACHE_READY
            log.info("cache ready", device_blocks=request.num_device_blocks, host_blocks=request.num_host_blocks)
            return self.cache

    def _make_cache(self, request: CacheRequest) -> tuple[StepExecutor, CacheFacts]:
        loaded, choice = self._model()
        block_format = BlockFormat.of(loaded.config, request.block_size)
        try:
            cache = CacheEngine(block_format, request.num_device_blocks, request.num_host_blocks, loaded.backend)
        except (OSError, MemoryError, RuntimeError) as error:
            if not (isinstance(error, OSError) or memory.is_exhausted(error)):
                raise
            needed = block_format.block_bytes * (request.num_device_blocks + request.num_host_blocks)
            raise BlockyardError(Reason.NEVER_FITS, f"the pools need {needed} bytes, more than there is") from None
        loaded.model.reserve_positions(request.max_model_len)
        runner = ModelRunner(loaded)
        batch_invariant = runner.prove_batch_invariance()
        identity = determinism_id(loaded, runner.fingerprint())
        runner.capture(
            cache.device_pool,
            CaptureSizes(
                request.max_num_batched_tokens, request.max_num_seqs, request.block_size, loaded.config.sliding_window
            ),
        )
        runner.warm_up(cache.device_pool, request.block_size, request.max_num_seqs)
        if self._may_choose_threads and choice.device.type == "cpu":
            num_threads = runner.settle_threads(cache.device_pool, request.block_size, request.max_num_seqs)
            log.info("threads chosen", num_threads=num_threads)
        limits = BatchLimits(
            request.max_model_len,
            request.max_num_seqs,
            request.block_size,
            loaded.config.vocab_size,
            request.max_num_batched_tokens,
        )
        executor = StepExecutor(InputBatch(limits), cache, runner)
        # What lives now lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        return executor, CacheFacts(request, block_format.block_bytes, identity, batch_invariant)

    def open_stream(self) -> StepStream:
        """Opens a step stream."""
        self._require(State.CACHE_READY, State.RUNNING)
        assert self._executor is not None
        return self._streams.open(self._executor)

    def submit(self, stream: StepStream, step: Step) -> None:
        """Takes a step of a stream; see StepStreams."""
        self._streams.submit(stream, step)

    def close_stream(self, stream: StepStream) -> None:
        """Closes a stream, however it ended."""
        self._streams.close(stream)

    async def start_profile(self, detail: Detail | None, max_steps: int) -> ProfileOptions:
        """Begins a profile; None and 0 leave the choice to the worker. Raises BlockyardError WRONG_STATE."""
        self._require(State.CACHE_READY, State.RUNNING)
        assert self._executor is not None
        device = self._model()[1].device
        options = choose_options(detail, max_steps, device)
        await self._profiler.start(self._executor, options, device)
        return options

    async def stop_profile(self, worker_id: str) -> Profile:
        """Ends the profile, or gives the one that has ended. Raises BlockyardError WRONG_STATE."""
        self._require(State.CACHE_READY, State.RUNNING)
        assert self._executor is not None
        return await self._profiler.stop(self._executor, f"{worker_id} {self.incarnation}")

    async def checksum_blocks(
        self, device_block_ids: Sequence[int], host_block_ids: Sequence[int]
    ) -> tuple[list[bytes], list[bytes]]:
        """Hashes blocks between two steps."""
        if not self._debug:
            raise BlockyardError(Reason.FEATURE_DISABLED, "start the worker with --enable-debug-rpcs for this")
        self._require(State.CACHE_READY, State.RUNNING)
        assert self._executor is not None
        cache = self._executor.cache
        _refuse(
            [
                *_out_of_range("device_block_ids", device_block_ids, cache.num_device_blocks),
                *_out_of_range("host_block_ids", host_block_ids, cache.num_host_blocks),
            ]
        )
        return await self._thread.run(
            lambda: (cache.device_checksums(device_block_ids), cache.host_checksums(host_block_ids))
        )


def _draining() -> BlockyardError:
    return BlockyardError(Reason.DRAINING, "this worker is stopping")


def _refuse(violations: Iterable[Violation]) -> None:
    found = list(violations)
    if found:
        raise invalid(found)


def _out_of_range(field: str, block_ids: Sequence[int], num_blocks: int) -> Iterable[Violation]:
    if any(block_id >= num_blocks for block_id in block_ids):
        yield Violation(field, f"blocks must be below {num_blocks}")


def _wrong_block_size(block_size: int) -> Iterable[Violation]:
    if block_size not in BLOCK_SIZES:
        yield Violation("block_size", f"{block_size} is none of {', '.join(map(str, BLOCK_SIZES))}")


def _wrong_profile_request(request: ProfileRequest) -> Iterable[Violation]:
    if request.block_size:
        yield from _wrong_block_size(request.block_size)
    if not 0 < request.device_memory_utilization <= 1:
        yield Violation("device_memory_utilization", "must be above 0 and at most 1")
    yield from _wrong_step_size(request)


def _wrong_step_size(request: ProfileRequest | CacheRequest) -> Iterable[Violation]:
    for name, most in (("max_num_batched_tokens", MAX_TOKENS), ("max_num_seqs", MAX_SEQS)):
        if not 1 <= getattr(request, name) <= most:
            yield Violation(name, f"must be from 1 to {most}")


def _wrong_cache_request(request: CacheRequest, model_max_len: int) -> Iterable[Violation]:
    yield from _wrong_block_size(request.block_size)
    yield from _wrong_step_size(request)
    if request.max_model_len < 1:
        yield Violation("max_model_len", "must be at least 1")
    for name in ("num_device_blocks", "num_host_blocks"):
        if getattr(request, name) > MAX_BLOCKS:
            yield Violation(name, f"must be at most {MAX_BLOCKS}")
    if request.num_device_blocks < 2:
        yield Violation("num_device_blocks", "must be at least 2: block 0 is scratch")
        return
    if request.max_model_len > model_max_len:
        yield Violation("max_model_len", f"{request.max_model_len} tokens, and the model takes {model_max_len}")
    capacity = (request.num_device_blocks - 1) * request.block_size
    if request.max_model_len > capacity:
        yield Violation("max_model_len", f"{request.max_model_len} tokens, where the device's blocks hold {capacity}")
