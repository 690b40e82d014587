"""The scheduler's metrics: counters that are written as things happen, and gauges that are read at each scrape."""

from __future__ import annotations

from collections import Counter as Tally
from functools import partial
from typing import TYPE_CHECKING

from blockyard.contract.workers import WorkerState
from blockyard.errors import Reason
from blockyard.service.metrics import READY, Metric, Registry
from scheduler_service import catalogue
from scheduler_service.replicas.steps.step_metrics import StepMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from blockyard.contract.scheduling import Recovery
    from scheduler_service.core.queues.backlog import Backlog
    from scheduler_service.core.sequence import Group
    from scheduler_service.core.values import SchedulerStats, Sources
    from scheduler_service.replicas.engine import Engine

# Exported from the start, since an alert sees a first event only as the increase of an existing series.
_REFUSALS = (
    *(Reason.QUEUE_FULL, Reason.TOKEN_BACKLOG, Reason.TENANT_QUOTA, Reason.NEVER_FITS, Reason.NO_READY_WORKER),
    *(Reason.FIELD_INVALID, Reason.REQUEST_ID_CONFLICT, Reason.REQUEST_EXPIRED),
)
_FAILURES = (
    *(Reason.POISON_REQUEST, Reason.BUG, Reason.NO_READY_WORKER, Reason.NEVER_FITS, Reason.CLIENT_CANCELLED),
    *(Reason.QUEUE_DEADLINE, Reason.GENERATION_DEADLINE),
)

Labelled = dict[tuple[str, ...], float]


class SchedulerMetrics:
    """The metrics of the scheduler's process. Written on the event loop."""

    def __init__(self) -> None:
        self.registry = registry = Registry("scheduler", catalogue.CATALOGUE)
        self.steps = StepMetrics(registry)
        self._queue = registry.histogram(catalogue.QUEUE_SECONDS)
        self._refused = registry.counter(catalogue.REFUSED, *((str(reason),) for reason in _REFUSALS))
        self._failed = registry.counter(catalogue.FAILED, *((str(reason),) for reason in _FAILURES))
        causes = (catalogue.DIED, catalogue.DRAINED, catalogue.STEP_REFUSED, catalogue.ANSWERED_WRONG)
        self._losses = registry.counter(catalogue.LOSSES, *((cause,) for cause in causes))
        self._recoveries = registry.counter(catalogue.RECOVERIES, (catalogue.WORKER,), (catalogue.SCHEDULER,))
        self._recomputed = registry.counter(catalogue.RECOMPUTED, (catalogue.WORKER,), (catalogue.SCHEDULER,))
        self._inexact = registry.counter(catalogue.INEXACT)
        self._lora_loads = registry.histogram(catalogue.LORA_LOAD_SECONDS)

    # Written as events happen.

    def on_refused(self, reason: Reason) -> None:
        self._refused.add(str(reason))

    def on_failed(self, reason: Reason) -> None:
        """Counts a request that was admitted and ended with an error."""
        self._failed.add(str(reason))

    def on_taken(self, group: Group, now: float) -> None:
        """Measures the time in the queue of a request that a replica takes, if it has no tokens yet."""
        if not group.num_outputs:
            self._queue.observe(now - group.arrived_at)

    def on_worker_lost(self, cause: str) -> None:
        self._losses.add(cause)

    def on_recovered(self, recovery: Recovery) -> None:
        self._recoveries.add(catalogue.WORKER)
        self._recomputed.add(catalogue.WORKER, count=recovery.num_replayed_tokens)
        if not recovery.exact:
            self._inexact.add()

    def on_lora_loaded(self, seconds: float) -> None:
        self._lora_loads.observe(seconds)

    def on_taken_over(self, group: Group) -> None:
        """Counts a request that goes on after the loss of the scheduler before this one."""
        if group.num_outputs and not group.is_finished:
            self._recoveries.add(catalogue.SCHEDULER)
            self._recomputed.add(catalogue.SCHEDULER, count=sum(len(sequence.token_ids) for sequence in group.live))

    # Read at each scrape, in the thread of the scrape.

    def watch(
        self,
        engines: Sequence[Engine],
        backlog: Backlog,
        *,
        is_ready: Callable[[], bool],
        num_requests: Callable[[], int],
        num_gateways: Callable[[], int],
    ) -> None:
        """Reads gauges and replicas' totals at each scrape. `engines` grows and shrinks with the replicas."""
        read = self.registry.read
        read(READY, lambda: int(is_ready()))
        read(catalogue.REQUESTS, lambda: _count_requests(num_requests(), len(backlog)))
        read(catalogue.WAITING_TOKENS, lambda: backlog.num_tokens + _count_waiting_tokens(engines))
        read(catalogue.WORKERS, lambda: _count_workers(engines))
        read(catalogue.LEFT_ASIDE, lambda: sum(engine.breaker.is_left_aside for engine in engines))
        read(catalogue.READY_REPLICAS, lambda: sum(engine.is_ready for engine in engines))
        read(catalogue.GATEWAYS, num_gateways)
        for metric, read_values in _OF_REPLICAS.items():
            read(metric, partial(_of_replicas, engines, read_values))


def _count_requests(num_requests: int, num_waiting: int) -> Labelled:
    # Between the two readings a request may end.
    return {("waiting",): num_waiting, ("running",): max(0, num_requests - num_waiting)}


def _count_waiting_tokens(engines: Sequence[Engine]) -> int:
    return sum(each.scheduler.stats().num_waiting_tokens for each in list(engines) if each.scheduler is not None)


def _count_workers(engines: Sequence[Engine]) -> Labelled:
    states = Tally(rank.state for engine in engines for rank in engine.replica.ranks)
    return {(state.value,): states[state] for state in WorkerState}


def _of_replicas(engines: Sequence[Engine], read_values: Callable[[Engine, SchedulerStats], Labelled]) -> Labelled:
    labelled: Labelled = {}
    for engine in list(engines):
        if engine.scheduler is not None:
            values = read_values(engine, engine.scheduler.stats())
            labelled |= {(str(engine.replica_id), *labels): value for labels, value in values.items()}
    return labelled


def _sequences(engine: Engine, stats: SchedulerStats) -> Labelled:
    return {("running",): stats.num_running, ("swapped",): stats.num_swapped, ("waiting",): stats.num_waiting}


def _blocks(engine: Engine, stats: SchedulerStats) -> Labelled:
    return {
        ("device", "used"): stats.num_device_blocks - stats.num_free_device_blocks,
        ("device", "free"): stats.num_free_device_blocks,
        ("host", "used"): stats.num_host_blocks - stats.num_free_host_blocks,
        ("host", "free"): stats.num_free_host_blocks,
    }


def _cached_blocks(engine: Engine, stats: SchedulerStats) -> Labelled:
    return {("device",): stats.num_cached_device_blocks, ("host",): stats.num_cached_host_blocks}


def _query_tokens(engine: Engine, stats: SchedulerStats) -> Labelled:
    has_cache = engine.scheduler is not None and engine.scheduler.config.enable_prefix_caching
    return {(): stats.num_queried_tokens_total if has_cache else 0}


def _preemptions(engine: Engine, stats: SchedulerStats) -> Labelled:
    return {
        ("swap",): stats.num_swaps_total,
        ("recompute",): stats.num_preemptions_total - stats.num_swaps_total,
    }


def _moved_blocks(engine: Engine, stats: SchedulerStats) -> Labelled:
    return {
        ("out",): stats.num_swapped_out_blocks_total,
        ("in",): stats.num_swapped_in_blocks_total,
        ("copy",): stats.num_copied_blocks_total,
    }


def _loras(engine: Engine, stats: SchedulerStats) -> Labelled:
    resident = engine.scheduler.lora_slots.resident_ids if engine.scheduler else ()
    return {("loaded",): len(engine.loras.loaded), ("resident",): len(resident)}


def _lora_passed_seconds(engine: Engine, stats: SchedulerStats) -> Labelled:
    passed = engine.scheduler.lora_slots.passed_seconds if engine.scheduler else {}
    return {(name,): seconds for name, seconds in list(passed.items())}


def _by_source(counts: Sources) -> Labelled:
    return {(source,): count for source, count in counts._asdict().items()}


_OF_REPLICAS: Mapping[Metric, Callable[[Engine, SchedulerStats], Labelled]] = {
    catalogue.SEQUENCES: _sequences,
    catalogue.BLOCKS: _blocks,
    catalogue.CACHED_BLOCKS: _cached_blocks,
    catalogue.QUERY_TOKENS: _query_tokens,
    catalogue.HIT_TOKENS: lambda engine, stats: {(): stats.num_cached_tokens_total},
    catalogue.PROMPT_TOKENS: lambda engine, stats: {(): stats.num_prompt_tokens_total},
    catalogue.GENERATED_TOKENS: lambda engine, stats: {(): stats.num_completion_tokens_total},
    catalogue.DRAFT_TOKENS: lambda _, stats: _by_source(stats.drafts_total.drafted),
    catalogue.ACCEPTED_TOKENS: lambda _, stats: _by_source(stats.drafts_total.accepted),
    catalogue.PREEMPTIONS: _preemptions,
    catalogue.MOVED_BLOCKS: _moved_blocks,
    catalogue.GIVEN_BACK_BLOCKS: lambda _, stats: {(): stats.num_given_back_blocks_total},
    catalogue.STEPS: lambda engine, stats: {(): engine.step_loop.step_log.num_steps},
    catalogue.LORAS: _loras,
    catalogue.LORA_EVICTIONS: lambda engine, stats: {(): engine.loras.num_evicted},
    catalogue.LORA_PASSED_SECONDS: _lora_passed_seconds,
    catalogue.STEPS_IN_FLIGHT: lambda engine, stats: {(): stats.num_steps_in_flight},
}
