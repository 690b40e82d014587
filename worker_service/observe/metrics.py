"""The worker's metrics: their catalogue, the values measured of each step, and those read from its state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.contract.workers import CacheInfo, WorkerState
from blockyard.service.metrics import READY, Registry, counter, declared_in, gauge, geometric, histogram

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_service.lora.adapter import AdapterWeights
    from worker_service.lora.store import LoraStore
    from worker_service.models.loader import RunnableModel
    from worker_service.set_up import SetUp
    from worker_service.step import Step, StepOutput
    from worker_service.steps.step_executor import StepExecutor

PHASES = ("queue", "cache_operations", "forward", "sample", "stage_wait")

STEP_SECONDS = histogram(
    "blockyard_worker_step_seconds",
    "A step by phase: `queue` is from its arrival to its start, behind the step before it; `cache_operations` are swaps"
    " and copies; `forward` has the preparation of its inputs; `sample` chooses tokens; of a stage"
    " behind another, `stage_wait` waits for its rows.",
    geometric(20e-6, 10),
    "phase",
)
STEPS = counter("blockyard_worker_steps_total", "Steps that were executed.")
REFUSED_STEPS = counter("blockyard_worker_refused_steps_total", "Steps that were refused: each ends its epoch.")
LATE_STEPS = counter(
    "blockyard_worker_late_steps_total",
    "Steps that were launched on a GPU while the one before them ran. The others waited for it: some request in them"
    " wants log probabilities, penalties, bad words or beams, or begins with several sequences. 0 on a CPU.",
)
STEADY_STEPS = counter(
    "blockyard_worker_steady_steps_total",
    "Steps that a CPU worker ran without Python: decodes of the same sequences as the step before. 0 with"
    " `--steady-loop off`, on a GPU and in a group.",
)
COMPUTED_TOKENS = counter("blockyard_worker_computed_tokens_total", "Tokens of prompts and outputs that got their KV.")
SAMPLED_TOKENS = counter("blockyard_worker_sampled_tokens_total", "Tokens that were chosen.")
STATE = gauge("blockyard_worker_state", "1 for the state that the worker is in, 0 for the others.", "state")
EPOCH = gauge("blockyard_worker_epoch", "The highest epoch that it has seen: it grows when a scheduler attaches anew.")
LOADS = counter(
    "blockyard_worker_model_loads_total",
    "Models that were loaded: one in a process's life, whatever becomes of others.",
)
WEIGHTS = gauge("blockyard_worker_weights_bytes", "The weights; 0 before they are loaded.")
LOAD_SECONDS = gauge(
    "blockyard_worker_load_seconds",
    "Seconds that LoadModel took, by where the weights came from: a model's `files`, `sharded` or `packed` ones, or"
    " `random` numbers. `files` where packed ones were expected: they could not be used, and a warning says why.",
    "source",
)
SAVES = counter(
    "blockyard_worker_saves_total",
    "SaveState calls that `saved` the weights, or `failed` or were refused, by format: `sharded` or `packed`.",
    *("format", "result"),
)
SAVE_SECONDS = gauge("blockyard_worker_save_seconds", "Seconds of the last save that succeeded, by format.", "format")
POOLS = gauge(
    "blockyard_worker_pool_bytes", "The KV blocks of a pool, `device` or `host`; 0 before they exist.", "pool"
)
LORAS = gauge(
    "blockyard_worker_lora_adapters",
    "Adapters: `loaded` into the host's cache, or `resident` in a slot of the device too.",
    "state",
)
LORA_BYTES = gauge("blockyard_worker_lora_bytes", "The adapters in the host's cache.")
LORA_LOAD_SECONDS = histogram(
    "blockyard_worker_lora_load_seconds",
    "Loads of an adapter: reading, cutting and packing it, behind those before it.",
    geometric(0.001, 100),
)
LORA_REMOVALS = counter(
    "blockyard_worker_lora_removals_total",
    "Adapters that left the host's cache: for others, or since they were unloaded.",
)

CATALOGUE = declared_in(globals())


class WorkerMetrics:
    """The values of the metrics. Those of steps are written in the device thread."""

    def __init__(self) -> None:
        self.registry = registry = Registry("worker", CATALOGUE)
        phases = (registry.histogram(STEP_SECONDS, phase) for phase in PHASES)
        self._queue, self._cache_operations, self._forward, self._sample, self._stage_wait = phases
        self._steps = registry.counter(STEPS)
        self._refused = registry.counter(REFUSED_STEPS)
        self._computed = registry.counter(COMPUTED_TOKENS)
        self._sampled = registry.counter(SAMPLED_TOKENS)
        self._loads = registry.counter(LOADS)
        self._saves = registry.counter(SAVES)
        self._save_seconds: dict[tuple[str, ...], float] = {}
        registry.read(SAVE_SECONDS, self._save_seconds.copy)
        self._lora_loads = registry.histogram(LORA_LOAD_SECONDS)
        self._lora_removals = registry.counter(LORA_REMOVALS)

    def on_load(self, loras: LoraStore | None = None) -> None:
        """Counts a model that was loaded, and from now on the adapters that come to it and leave."""
        self._loads.add()
        if loras is not None:
            loras.on_loaded, loras.on_removed = self._lora_loads.observe, self._lora_removals.add

    def on_save(self, save_format: str, seconds: float | None) -> None:
        """Counts a save of weights with its seconds, or a failed save (None)."""
        self._saves.add(save_format, "failed" if seconds is None else "saved")
        if seconds is not None:
            self._save_seconds[save_format,] = seconds

    def on_step(self, step: Step, result: StepOutput) -> None:
        if result.refusal is not None:
            self._refused.add()
            return
        times = result.times
        self._queue.observe(times.queue_seconds)
        self._cache_operations.observe(times.cache_operations_seconds)
        self._forward.observe(times.forward_seconds)
        self._sample.observe(times.sample_seconds)
        self._stage_wait.observe(times.stage_wait_seconds)
        self._steps.add()
        self._computed.add(count=int(step.num_new_tokens.sum()))
        self._sampled.add(count=len(result.token_ids))

    def watch(
        self,
        *,
        is_draining: Callable[[], bool],
        state: Callable[[], WorkerState],
        epoch: Callable[[], int],
        set_up: Callable[[], SetUp],
    ) -> None:
        """Reads the values of state from these callables whenever Prometheus asks."""
        read = self.registry.read
        read(READY, lambda: int(not is_draining()))
        read(STATE, lambda: _states(state()))
        read(EPOCH, epoch)
        read(LATE_STEPS, lambda: executor.num_late_steps if (executor := set_up().executor) is not None else 0)
        read(STEADY_STEPS, lambda: _count_steady(set_up().executor))
        read(WEIGHTS, lambda: loaded.parameter_bytes if (loaded := set_up().loaded) is not None else 0)
        read(LOAD_SECONDS, lambda: _load_seconds(set_up().loaded))
        read(POOLS, lambda: _pool_bytes(set_up().cache))
        read(LORAS, lambda: _count_loras(set_up().loras))
        read(LORA_BYTES, lambda: sum(adapter.num_bytes for adapter in _loras_of(set_up().loras)))


def _states(now: WorkerState) -> dict[tuple[str, ...], float]:
    # A worker is never in the other two states itself.
    own = (state for state in WorkerState if state not in (WorkerState.UNSPECIFIED, WorkerState.UNREACHABLE))
    return {(state.value,): state is now for state in own}


def _count_steady(executor: StepExecutor | None) -> int:
    return 0 if executor is None or executor.steady is None else executor.steady.num_steps


def _load_seconds(loaded: RunnableModel | None) -> dict[tuple[str, ...], float]:
    return {} if loaded is None else {(loaded.origin.source,): loaded.origin.seconds}


def _pool_bytes(cache: CacheInfo | None) -> dict[tuple[str, ...], float]:
    if cache is None:
        return {("device",): 0, ("host",): 0}
    num_blocks = {"device": cache.num_device_blocks, "host": cache.num_host_blocks}
    return {(pool,): count * cache.cache_block_bytes for pool, count in num_blocks.items()}


def _loras_of(store: LoraStore | None) -> list[AdapterWeights]:
    # A copy, since this runs in the thread of the metrics request.
    return list(store.adapters.values()) if store is not None else []


def _count_loras(store: LoraStore | None) -> dict[tuple[str, ...], float]:
    num_resident = store.num_resident if store is not None else 0
    return {("loaded",): len(_loras_of(store)), ("resident",): num_resident}
