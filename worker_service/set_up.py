"""Sets a worker up, one stage after another: its device, its model, its cache. Runs in the device thread.

    CREATED -> DEVICE_READY -> LOADED -> CACHE_READY <-> RUNNING
                                         CACHE_READY <-> SLEEPING -> STALE -> CACHE_READY

Defines the limits of requests to set up. Knows neither the event loop nor messages.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from blockyard.capacity.limits import DEFAULT_BLOCK_SIZE, max_useful_blocks
from blockyard.capacity.memory import (
    cpu_usage,
    fitting_utilization,
    fixed_plan,
    plan_cache,
    read_host_memory,
    set_aside,
    tighter,
)
from blockyard.contract.models import Task
from blockyard.contract.parallel import ALONE, Parallel
from blockyard.contract.workers import AvailableBlocks, CacheInfo, CachePlan, ProfileRequest, SleepInfo, WorkerState
from blockyard.errors import BlockyardError, Reason, invalid
from blockyard.model_files import resolve_model
from blockyard.service import faults
from blockyard.telemetry import EventLogger
from blockyard_kernels.capture import CaptureSizes
from blockyard_kernels.select import KernelChoice
from worker_service.batch.input_batch import InputBatch
from worker_service.batch.rows import BatchLimits
from worker_service.cache_engine import BlockFormat, CacheEngine
from worker_service.cache_requests import wrong_state_blocks
from worker_service.collectives.gathering import make_silence
from worker_service.device import memory
from worker_service.device.device import AllowedDevice, check_dtype, choose_device
from worker_service.drafting.drafter import Drafter
from worker_service.grammars.matchers import make_grammars
from worker_service.lora.slots import AdapterSlots
from worker_service.models.determinism import determinism_id
from worker_service.models.loader import RunnableModel, load_model
from worker_service.runner.dry_runs import measure_decodes, profile, settle_threads, warm_up
from worker_service.runner.pooling_runner import make_runner
from worker_service.steps.steady import SteadySteps
from worker_service.steps.step_executor import StepExecutor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from blockyard.capacity.memory import Usage
    from worker_service.grammars.matchers import Grammars
    from worker_service.lora.store import LoraStore
    from worker_service.runner.model_runner import ModelRunner
    from worker_service.steps.rank_steps import RankSteps

log = EventLogger(__name__)

# The time in which the ranks have to exchange fingerprints before the first step.
FINGERPRINT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model that LoadModel names: a folder, a hub id or nothing for the demo model, and a revision."""

    model: str = ""
    revision: str = ""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device, its dtype (None: the model's), the bytes on it that are not this worker's, and the worker's rank.

    `cache_bytes`: of its blocks, if that is fixed.
    """

    device: torch.device
    dtype: torch.dtype | None
    foreign_bytes: int
    parallel: Parallel = ALONE
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SetUp:
    """The stages that are set up so far; each adds to the stage before. `configuration_digest` is the scheduler's."""

    configuration_digest: str = ""
    choice: DeviceChoice | None = None
    loaded: RunnableModel | None = None
    loras: LoraStore | None = None
    grammars: Grammars | None = None
    plan: AvailableBlocks | None = None
    cache: CacheInfo | None = None
    executor: StepExecutor | None = None
    sleep: SleepInfo = SleepInfo()
    source: ModelSource = ModelSource()

    @property
    def state(self) -> WorkerState:
        """The state without an open step stream."""
        if self.sleep.asleep:
            return WorkerState.SLEEPING
        if self.sleep.weights_are_stale:
            return WorkerState.STALE
        if self.cache is not None:
            return WorkerState.CACHE_READY
        if self.loaded is not None:
            return WorkerState.LOADED
        return WorkerState.CREATED if self.choice is None else WorkerState.DEVICE_READY


def make_choice(
    device_type: str, dtype: torch.dtype | None, allowed: AllowedDevice, parallel: Parallel = ALONE
) -> DeviceChoice:
    """Chooses the device; raises BlockyardError FIELD_INVALID where it is missing or cannot compute in `dtype`."""
    device = choose_device(device_type, allowed)
    check_dtype(dtype, device)
    foreign_bytes = memory.gpu_foreign_bytes(device) if device.type == "cuda" else 0
    return DeviceChoice(device, dtype, foreign_bytes, parallel, allowed.cache_bytes)


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The options with which a worker was started that concern loads: see `load_model`."""

    kernels: KernelChoice = field(default_factory=KernelChoice)
    can_sleep: bool = False
    packed_cache: Path | None = None
    model_code: str = "auto"


AUTO = LoaderOptions()


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of one load: the scheduler's, and those of the worker's start; see `load_model`."""

    quantization: str
    load_format: str
    options: LoaderOptions
    task: Task = Task.UNSPECIFIED
    """The task that the model is served for; UNSPECIFIED: the one in its files."""
    kv_cache_dtype: str = "auto"


def load(
    choice: DeviceChoice, source: ModelSource, how: LoadOptions, on_progress: Callable[[int, int], None]
) -> RunnableModel:
    """Loads a model; raises BlockyardError MODEL_NOT_LOADED, or FIELD_INVALID where the device lacks its dtype."""
    faults.reach(faults.BEFORE_LOAD)
    loaded = load_model(
        resolve_model(source.model, source.revision, "config" if how.load_format == "random" else "weights"),
        choice.dtype,
        choice.device,
        on_progress,
        how.options.kernels.name_for(choice.device),
        how.quantization,
        how.load_format,
        choice.parallel,
        batch_invariant=how.options.kernels.batch_invariant,
        can_sleep=how.options.can_sleep,
        packed_cache=how.options.packed_cache,
        task=how.task,
        model_code=how.options.model_code,
        kv_cache_dtype=how.kv_cache_dtype,
    )
    check_dtype(loaded.config.dtype, choice.device)
    # Otherwise the scratch memory of the load would count as memory that the process needs.
    memory.give_back(choice.device)
    return loaded


def count_blocks(
    loaded: RunnableModel, choice: DeviceChoice, request: ProfileRequest, loras: LoraStore | None = None
) -> AvailableBlocks:
    """Profiles the worst step and counts the blocks that fit beside it; raises BlockyardError NEVER_FITS."""
    device = choice.device
    block_size = request.block_size or DEFAULT_BLOCK_SIZE[device.type]
    block_bytes = BlockFormat.of(loaded.model, block_size).block_bytes
    windows, num_state_blocks = loaded.model.kv_groups.windows, loaded.model.count_state_blocks(block_bytes)
    pool = {"block_size": block_size, "block_bytes": block_bytes, "swap_space_bytes": request.swap_space_bytes}
    if choice.cache_bytes:
        fixed = fixed_plan(memory.total_bytes(device), **pool, cache_bytes=choice.cache_bytes)
        return replace(fixed, kv_windows=windows, num_state_blocks=num_state_blocks)
    plan = plan_cache(
        set_aside(_measure_usage(loaded, choice, block_size, request, loras), loras.free_bytes if loras else 0),
        **pool,
        utilization=request.device_memory_utilization,
        host_shares_device=device.type == "cpu",
        max_useful_blocks=max_useful_blocks(
            request.max_num_seqs, loaded.config.max_model_len, block_size, len(windows), num_state_blocks
        ),
    )
    return replace(plan, kv_windows=windows, num_state_blocks=num_state_blocks)


def _measure_usage(
    loaded: RunnableModel, choice: DeviceChoice, block_size: int, request: ProfileRequest, loras: LoraStore | None
) -> Usage:
    device = choice.device

    def read(activation_bytes: int) -> Usage:
        return memory.gpu_usage(device, choice.foreign_bytes, loaded.parameter_bytes, activation_bytes)

    before = read(0) if device.type == "cuda" else None
    try:
        runner = make_runner(loaded, AdapterSlots(loras.limits.max_loras) if loras else None)
        if choice.parallel.world_size > 1:
            # A rank that fails here must not leave the others waiting in a collective.
            runner.join(make_silence(choice.parallel))
        # A draft has logits like a sequence.
        most_rows = request.max_num_seqs + request.max_draft_rows
        activation = profile(runner, block_size, request.max_num_batched_tokens, most_rows)
    except (MemoryError, RuntimeError) as error:
        if not memory.is_exhausted(error):
            raise
        message = f"a step of {request.max_num_batched_tokens} tokens does not fit in memory"
        raise BlockyardError(Reason.NEVER_FITS, message) from None
    if before is not None:
        return tighter(before, read(activation))
    return cpu_usage(read_host_memory(), loaded.parameter_bytes, activation)


def check_memory(executor: StepExecutor, plan: AvailableBlocks | None) -> None:
    """Compares a GPU's free memory with the plan, and logs what to change if it is too little.

    `plan`: None, if no blocks were counted.
    """
    device = executor.cache.device_pool.device
    if device.type != "cuda" or plan is None:
        return
    free_bytes = memory.gpu_free_bytes(device)
    if (utilization := fitting_utilization(plan, free_bytes, executor.num_captured_bytes)) is not None:
        log.warning(
            "the largest step may not fit beside the blocks: reserve less memory for blocks",
            free_bytes=free_bytes,
            step_bytes=plan.memory.activation_bytes,
            hint=f"--device-memory-utilization {utilization}",
        )


def make_executor(
    set_up: SetUp,
    request: CachePlan,
    *,
    may_choose_threads: bool,
    ranks: RankSteps | None = None,
    clock: Callable[[], float] = time.perf_counter,
    has_steady_loop: bool = True,
) -> tuple[StepExecutor, CacheInfo]:
    """Allocates the pools, tests whether results depend on the batch, and warms up; raises BlockyardError NEVER_FITS.

    `ranks`: the steps of this rank; None for a replica with one worker. `clock`: times the steps.
    `has_steady_loop`: whether steady steps run without Python where that is possible.
    """
    assert set_up.loaded is not None
    loaded, loras = set_up.loaded, set_up.loras
    cache = _make_cache(loaded, request)
    loaded.model.serve_length(request.max_model_len)
    runner = make_runner(loaded, loras.make_slots() if loras else None)
    if ranks is not None:
        runner.join(ranks.silence)
    batch_invariant = runner.prove_batch_invariance()
    if not batch_invariant:
        log.warning("results depend on what runs beside them: see --batch-invariant", kernels=loaded.backend.name)
    fingerprint = _fingerprint(runner, ranks)
    sizes = request.max_num_batched_tokens, request.max_num_seqs, request.block_size
    runner.capture(cache.device_pool, CaptureSizes(*sizes, loaded.config.sliding_window, request.max_model_len))
    warm_up(runner, cache.device_pool, request.block_size, request.max_num_seqs)
    device = cache.device_pool.device.type
    if may_choose_threads and device == "cpu":
        num_threads = settle_threads(runner, cache.device_pool, request.block_size, request.max_num_seqs)
        log.info("threads chosen", num_threads=num_threads)
    decodes = measure_decodes(runner, cache.device_pool, request) if request.max_draft_tokens else {}
    batch = _make_batch(loaded, request, set_up.grammars, is_alone=ranks is None)
    may_loop = has_steady_loop and ranks is None and runner.depth == 1
    loop = runner.captured.decode_loop() if may_loop and runner.captured is not None else None
    steady = SteadySteps(loop) if loop is not None else None
    executor = StepExecutor(batch, cache, runner, ranks, fingerprint, clock, steady)
    # The objects that exist now live as long as the process: the collector need not visit them again.
    gc.collect()
    gc.freeze()
    if any(loaded.config.windows) and not any(loaded.model.kv_groups.windows):
        log.info("sliding-window layers keep the blocks of all tokens on this device", device=device)
    info = CacheInfo(
        request.block_size,
        request.num_device_blocks,
        request.num_host_blocks,
        cache.block_format.block_bytes,
        request.max_model_len,
        determinism_id(loaded, fingerprint),
        batch_invariant,
        loaded.model.kv_groups.windows,
        tuple(decodes),
        tuple(decodes.values()),
        request.num_state_blocks,
    )
    return executor, info


def _make_batch(loaded: RunnableModel, request: CachePlan, grammars: Grammars | None, *, is_alone: bool) -> InputBatch:
    """Makes the rows of sequences. `is_alone`: whether there are no other ranks."""
    lengths = request.max_model_len, request.max_num_seqs, request.block_size, request.max_num_batched_tokens
    drafts = request.max_draft_tokens, request.max_draft_rows
    limits = BatchLimits.of(loaded.config, loaded.model.kv_groups.windows, *lengths, drafts, request.num_state_blocks)
    # Only the sampling rank of a group has grammars, and all ranks must draft the same.
    drafter = Drafter(loaded.backend.drafting, follows_grammars=is_alone) if request.max_draft_tokens else None
    return InputBatch(limits, grammars, drafter)


def _fingerprint(runner: ModelRunner, ranks: RankSteps | None) -> str:
    """Returns the fingerprint of the network, the one thing that all ranks compute together before an epoch."""
    if ranks is None:
        return runner.fingerprint()
    group = ranks.require_group()
    if group.fingerprint:
        # This rank joined later: the others have computed the fingerprint already.
        return group.fingerprint.hex()
    runner.join(group)
    with group.lifetime.work(FINGERPRINT_SECONDS):
        fingerprint = runner.fingerprint()
    runner.join(ranks.silence)
    return fingerprint


def _make_cache(loaded: RunnableModel, request: CachePlan) -> CacheEngine:
    block_format = BlockFormat.of(loaded.model, request.block_size)
    if wrong := list(wrong_state_blocks(request, loaded.model.count_state_blocks(block_format.block_bytes))):
        raise invalid(wrong)
    try:
        num_blocks = request.num_device_blocks, request.num_host_blocks
        return CacheEngine(block_format, *num_blocks, loaded.backend, can_sleep=loaded.can_sleep)
    except (OSError, MemoryError, RuntimeError) as error:
        if not (isinstance(error, OSError) or memory.is_exhausted(error)):
            raise
        needed = block_format.block_bytes * (request.num_device_blocks + request.num_host_blocks)
        raise BlockyardError(
            Reason.NEVER_FITS,
            f"the KV cache needs {needed} bytes, more than the memory that is free: "
            "lower --device-memory-utilization or --swap-space-gib",
        ) from None


@dataclass(frozen=True, slots=True)
class Stages:
    """The functions that set a worker up. All but `make_grammars` run in the device thread."""

    choose: Callable[..., DeviceChoice] = make_choice
    load: Callable[[DeviceChoice, ModelSource, LoadOptions, Callable[[int, int], None]], RunnableModel] = load
    make_grammars: Callable[[RunnableModel], Grammars | None] = make_grammars
    count_blocks: Callable[..., AvailableBlocks] = count_blocks
    build_executor: Callable[..., tuple[StepExecutor, CacheInfo]] = make_executor


STAGES = Stages()
