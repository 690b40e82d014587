"""One worker: the legal calls of each state, and the effect of each call. All torch work runs in the device thread.

Lives in the event loop and never computes in it. Knows no messages.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from blockyard.capacity.adapters import wrong_limits
from blockyard.capacity.limits import wrong_profile_request
from blockyard.clock import SYSTEM, Clock
from blockyard.contract.models import Task
from blockyard.contract.parallel import ALONE, Parallel
from blockyard.contract.workers import NO_LORAS, WorkerState
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.model_config.parallel_sizes import wrong_parallel
from blockyard.telemetry import EventLogger
from worker_service.device import memory
from worker_service.device.device import ANY_DEVICE, AllowedDevice, describe_device
from worker_service.device.thread import DeviceThread
from worker_service.groups.membership import Membership, wrong_members, wrong_request
from worker_service.lora.store import LoraStore, make_loras
from worker_service.observe.metrics import WorkerMetrics
from worker_service.observe.profiler import Profile, ProfileDetail, ProfileOptions, Profiler, choose_options
from worker_service.set_up import (
    AUTO,
    STAGES,
    LoaderOptions,
    LoadOptions,
    ModelSource,
    SetUp,
    Stages,
    check_memory,
    wrong_block_ids,
    wrong_cache_request,
)
from worker_service.steps.rank_steps import RankSteps
from worker_service.steps.step_stream import StepStream, StepStreams
from worker_service.weights.residency import Owner, Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from pathlib import Path

    import torch

    from blockyard.contract.workers import (
        AvailableBlocks,
        CacheInfo,
        CachePlan,
        GroupRequest,
        LoraLimits,
        ProfileRequest,
    )
    from worker_service.lora.adapter import AdapterWeights, LoraRequest
    from worker_service.models.loader import RunnableModel
    from worker_service.set_up import DeviceChoice
    from worker_service.steps.step_executor import StepExecutor


log = EventLogger(__name__)

T = TypeVar("T")


class Adapters:
    """The adapters of one worker. Methods raise BlockyardError WRONG_STATE, or FEATURE_DISABLED without adapters."""

    def __init__(self, owner: Owner, root: Path | None) -> None:
        """`root`: the folder below which adapters must lie; None: no adapter is read."""
        self._owner = owner
        self.root = root

    def store(self) -> LoraStore:
        self._owner.require(WorkerState.LOADED, WorkerState.CACHE_READY, WorkerState.RUNNING)
        store = self._owner.set_up.loras
        if store is None:
            raise BlockyardError(
                Reason.FEATURE_DISABLED,
                "this worker has no room for LoRA adapters: start the scheduler with --max-loras",
            )
        return store

    async def add(self, request: LoraRequest) -> AdapterWeights:
        """Reads an adapter; see `LoraStore.add`."""
        return await self.store().add(request)

    async def remove(self, lora_id: int) -> None:
        """Removes an adapter that is not pinned and that no sequence uses, and empties its slot, between two steps.

        The load of an adapter that is being read is cancelled.
        """
        store, executor = self.store(), self._owner.set_up.executor
        store.stop_reading(lora_id)

        def remove() -> None:
            if executor is not None and lora_id not in store.pinned:
                # Launched steps may still read the adapter.
                executor.wait()
                executor.runner.slots.release(lora_id, executor.batch.lora_ids())
            store.remove(lora_id)

        await self._owner.run(remove)

    def pin(self, lora_id: int, *, pinned: bool) -> None:
        self.store().pin(lora_id, pinned=pinned)


# The states in which a group can be formed.
_GROUPED = WorkerState.DEVICE_READY, WorkerState.LOADED, WorkerState.CACHE_READY, WorkerState.RUNNING


class Worker:
    """One device, one model, one cache, one epoch at a time."""

    def __init__(
        self,
        *,
        allowed_device: AllowedDevice = ANY_DEVICE,
        num_threads: int = 0,
        load_options: LoaderOptions = AUTO,
        debug: bool = False,
        model_root: Path | None = None,
        lora_root: Path | None = None,
        make_membership: Callable[[DeviceThread, str], Membership] = Membership,
        clock: Clock = SYSTEM,
        make_thread: Callable[[int], DeviceThread] = DeviceThread,
        stages: Stages = STAGES,
    ) -> None:
        """`model_root`, `lora_root`: see `Residency`, `Adapters`.

        `make_membership` is given the device thread and the incarnation, `make_thread` the number of threads with which
        to compute.
        """
        self.incarnation = clock.token_hex(8)
        self.set_up = SetUp()
        self.is_draining = False
        self.metrics = WorkerMetrics()
        self._allowed_device = allowed_device
        self._load_options = load_options
        self._debug = debug
        self._clock = clock
        self._stages = stages
        self.residency = Residency(self, model_root)
        self.adapters = Adapters(self, lora_root)
        self._may_choose_threads = num_threads == 0
        self._thread = make_thread(memory.compute_threads(num_threads))
        self.membership = make_membership(self._thread, self.incarnation)
        self._streams = StepStreams(self._thread, self.metrics.on_step, self.membership.on_epoch, clock.perf_counter)
        self._profiler = Profiler(self._thread)
        self._operation = ""
        self.metrics.watch(
            is_draining=lambda: self.is_draining,
            state=lambda: self.state,
            epoch=lambda: self.epoch,
            set_up=lambda: self.set_up,
        )

    def start(self) -> None:
        self._thread.start()

    async def drain(self, seconds: float) -> bool:
        """Refuses new work, finishes the running step, and reports on the open streams that the worker drains.

        Drops waiting steps. Also waits for other work, such as a load. Returns whether all of it ended in time.
        """
        self.is_draining = True
        self._streams.drain()
        is_idle = False
        with suppress(TimeoutError):
            await asyncio.wait_for(self._thread.run(lambda: None), seconds)
            is_idle = True
        await self.membership.leave(self.epoch, "this worker is stopping")
        return is_idle

    async def end_streams(self, seconds: float) -> bool:
        """Waits for the scheduler to close its streams, ends those that are left, and returns whether any was left."""
        return await self._streams.end(_draining(), seconds)

    async def stop(self, seconds: float) -> bool:
        """Ends the device thread, and returns whether it ended in time: running work cannot be interrupted."""
        return await asyncio.to_thread(self._thread.stop, seconds)

    @property
    def state(self) -> WorkerState:
        return WorkerState.RUNNING if self._streams.is_running else self.set_up.state

    @property
    def epoch(self) -> int:
        return max(self._streams.epoch, self.membership.epoch)

    @property
    def device_name(self) -> str:
        """The device in words; empty before it is chosen."""
        choice = self.set_up.choice
        return describe_device(choice.device) if choice is not None else ""

    def require(self, *states: WorkerState) -> None:
        """Raises BlockyardError: WRONG_STATE in other states, DRAINING while the process stops."""
        if self.is_draining:
            raise _draining()
        if self.state not in states:
            legal = " or ".join(state.value for state in states)
            raise BlockyardError(Reason.WRONG_STATE, f"the worker is {self.state.value}; this needs {legal}")

    @contextmanager
    def lifecycle(self, operation: str, *states: WorkerState) -> Generator[None]:
        """Allows one change of state at a time."""
        self.require(*states)
        if self._operation:
            raise BlockyardError(Reason.WRONG_STATE, f"{self._operation} is running")
        self._operation = operation
        try:
            yield
        finally:
            self._operation = ""

    async def init_device(
        self, device_type: str, dtype: torch.dtype | None, configuration_digest: str, parallel: Parallel = ALONE
    ) -> None:
        """Chooses the device; raises BlockyardError where it is missing or cannot compute in `dtype`."""
        with self.lifecycle("InitDevice", WorkerState.CREATED):
            _refuse(wrong_parallel(parallel))
            choice = await self._thread.run(
                lambda: self._stages.choose(device_type, dtype, self._allowed_device, parallel)
            )
            self.set_up = SetUp(configuration_digest, choice)
            log.info("device chosen", device=self.device_name)

    def open_rendezvous(self, epoch: int, members: tuple[str, ...]) -> bytes:
        """Opens the meeting point of a group for an epoch, and returns its secret; raises BlockyardError."""
        self._prepare_epoch(epoch, members)
        return self.membership.open_rendezvous(self._choice().parallel, epoch)

    async def form_group(self, request: GroupRequest) -> str:
        """Joins a group for an epoch, and returns its kind; raises BlockyardError."""
        with self.lifecycle("FormGroup", *_GROUPED):
            choice = self._prepare_epoch(request.epoch, request.members, wrong_request(request))
            return await self.membership.form(choice.parallel, choice.device, request)

    def _prepare_epoch(
        self, epoch: int, members: tuple[str, ...], violations: Iterable[Violation] = ()
    ) -> DeviceChoice:
        """Refuses a group that is not valid or does not include this worker, and ends the epochs before it."""
        self.require(*_GROUPED)
        choice = self._choice()
        _refuse([*wrong_members(epoch, members, choice.parallel), *violations])
        self.membership.require_place(choice.parallel, members)
        self._streams.prepare(epoch)
        self.membership.suspend()
        return choice

    async def load_model(
        self,
        model: str,
        revision: str,
        on_progress: Callable[[int, int], None],
        quantization: str = "none",
        load_format: str = "auto",
        lora_limits: LoraLimits = NO_LORAS,
        task: Task = Task.UNSPECIFIED,
        kv_cache_dtype: str = "auto",
    ) -> RunnableModel:
        """Loads a model; calls `on_progress` in the device thread. Continues to the end even if its caller leaves."""
        with self.lifecycle("LoadModel", WorkerState.DEVICE_READY):
            choice, source = self._choice(), ModelSource(model, revision)
            how = LoadOptions(quantization, load_format, self._load_options, task, kv_cache_dtype)
            if lora_limits != NO_LORAS:
                _refuse(wrong_limits(lora_limits))
            loaded = await self._thread.run(lambda: self._stages.load(choice, source, how, on_progress))
            loras = await self._thread.run(lambda: make_loras(loaded, lora_limits, self.adapters.root))
            grammars = await asyncio.to_thread(self._stages.make_grammars, loaded)
            self.set_up = replace(self.set_up, loaded=loaded, source=source, loras=loras, grammars=grammars)
            self.metrics.on_load(loras)
            return loaded

    async def determine_num_available_blocks(self, request: ProfileRequest) -> AvailableBlocks:
        """Profiles the worst step and counts the blocks that fit."""
        with self.lifecycle("DetermineNumAvailableBlocks", WorkerState.LOADED):
            _refuse(wrong_profile_request(request))
            loaded, choice = self._loaded(), self._choice()
            plan = await self._thread.run(lambda: self._stages.count_blocks(loaded, choice, request, self.set_up.loras))
            self.set_up = replace(self.set_up, plan=plan)
            log.info(
                "blocks counted",
                device=plan.num_device_blocks,
                host=plan.num_host_blocks,
                bytes=plan.memory.cache_bytes,
            )
            return plan

    async def initialize_cache(self, request: CachePlan) -> CacheInfo:
        """Allocates the pools, tests whether results depend on the batch, and warms up."""
        with self.lifecycle("InitializeCache", WorkerState.LOADED):
            loaded = self._loaded()
            _refuse(wrong_cache_request(request, loaded.config.max_model_len, loaded.model.kv_groups.windows))
            parallel = self._choice().parallel
            ranks = RankSteps(parallel, self.membership.find) if parallel.world_size > 1 else None
            set_up, chooses = self.set_up, self._may_choose_threads
            executor, cache = await self._thread.run(
                lambda: self._stages.build_executor(
                    set_up, request, may_choose_threads=chooses, ranks=ranks, clock=self._clock.perf_counter
                )
            )
            await self._thread.run(lambda: check_memory(executor, self.set_up.plan))
            self.set_up = replace(self.set_up, executor=executor, cache=cache)
            self.membership.fingerprint = bytes.fromhex(executor.fingerprint)
            log.info("cache ready", device_blocks=request.num_device_blocks, host_blocks=request.num_host_blocks)
            return cache

    async def run(self, work: Callable[[], T]) -> T:
        return await self._thread.run(work)

    def run_between_steps(self, work: Callable[[], T]) -> T:
        """Runs work in the device thread and waits for it: for other threads than the event loop's."""
        return self._thread.call(work)

    def _choice(self) -> DeviceChoice:
        assert self.set_up.choice is not None
        return self.set_up.choice

    def _loaded(self) -> RunnableModel:
        assert self.set_up.loaded is not None
        return self.set_up.loaded

    def _require_executor(self) -> StepExecutor:
        self.require(WorkerState.CACHE_READY, WorkerState.RUNNING)
        assert self.set_up.executor is not None
        return self.set_up.executor

    def open_stream(self) -> StepStream:
        return self._streams.open(self._require_executor())

    def close_stream(self, stream: StepStream) -> None:
        if self._streams.close(stream) and stream.epoch is not None:
            self.membership.on_stream_end(stream.epoch)

    async def start_profile(self, detail: ProfileDetail | None, max_steps: int) -> ProfileOptions:
        """Begins a profile; the worker chooses values for None and 0. Raises BlockyardError WRONG_STATE."""
        executor, device = self._require_executor(), self._choice().device
        options = choose_options(detail, max_steps, device)
        await self._profiler.start(executor, options, device)
        return options

    async def stop_profile(self, worker_id: str) -> Profile:
        """Ends the profile, or returns the one that has ended. Raises BlockyardError WRONG_STATE."""
        return await self._profiler.stop(self._require_executor(), f"{worker_id} {self.incarnation}")

    async def checksum_blocks(
        self, device_block_ids: Sequence[int], host_block_ids: Sequence[int]
    ) -> tuple[list[bytes], list[bytes]]:
        """Hashes blocks between two steps. Raises BlockyardError FEATURE_DISABLED, WRONG_STATE or FIELD_INVALID."""
        if not self._debug:
            raise BlockyardError(
                Reason.FEATURE_DISABLED, "this call needs a worker that was started with --enable-debug-rpcs"
            )
        cache = self._require_executor().cache
        _refuse(
            [
                *wrong_block_ids("device_block_ids", device_block_ids, cache.num_device_blocks),
                *wrong_block_ids("host_block_ids", host_block_ids, cache.num_host_blocks),
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
