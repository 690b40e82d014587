"""Computes rates and states from two successive readings of a system's status.

Callers fetch the readings and show the results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.units import size
from blockyard.common.v1 import status_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.duration_pb2 import Duration

DRAIN_NAMES = {status_pb2.DRAIN_STATE_DRAINING: "draining", status_pb2.DRAIN_STATE_DRAINED: "drained"}

# As the gateway's page says them.
LOAD_NAMES = {
    admin_pb2.MODEL_STATE_READY: "loaded",
    admin_pb2.MODEL_STATE_LOADING: "loading",
    admin_pb2.MODEL_STATE_UNLOADED: "not loaded",
    admin_pb2.MODEL_STATE_FAILED: "cannot be loaded",
}

PHASE_NAMES = {
    status_pb2.START_PHASE_INIT_DEVICE: "choosing the device",
    status_pb2.START_PHASE_LOAD_MODEL: "loading the model",
    status_pb2.START_PHASE_COUNT_BLOCKS: "counting blocks",
    status_pb2.START_PHASE_INITIALIZE_CACHE: "warming up",
}


def seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos * 1e-9


def replica_state(replica: status_pb2.ReplicaStatus) -> str:
    if replica.left_aside and not replica.drain_state:
        return "left aside"
    return DRAIN_NAMES.get(replica.drain_state) or ("ready" if replica.ready else "not ready")


def model_state(model: admin_pb2.ModelStatus) -> str:
    """Names whether a model is loaded. An older gateway only tells whether it is ready."""
    return LOAD_NAMES.get(model.state, "loaded" if model.ready else "not ready")


def worker_state(worker: status_pb2.WorkerStatus) -> str:
    """Names a worker's state, and the progress of its start."""
    state = status_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").replace("_", " ").lower()
    return f"{state}, {_describe(worker.start)}" if worker.HasField("start") else state


def find_start(status: admin_pb2.GetStatusResponse) -> tuple[str, int, int] | None:
    """Returns the phase of all workers that are starting, its bytes that are done and all of them; None: none is.

    If they are in different phases, the earliest phase counts.
    """
    workers = [worker for replica in status.scheduler.replicas for worker in replica.workers]
    starts = [worker.start for worker in workers if worker.HasField("start")]
    if not starts:
        return None
    first = min(start.phase for start in starts)
    return _sum_up([start for start in starts if start.phase == first])


def _sum_up(starts: Sequence[status_pb2.StartProgress]) -> tuple[str, int, int]:
    """Adds up starts that are all in one phase."""
    done, total = sum(start.done_bytes for start in starts), sum(start.total_bytes for start in starts)
    return PHASE_NAMES.get(starts[0].phase, "starting"), done, total


def _describe(start: status_pb2.StartProgress) -> str:
    words, done, total = _sum_up([start])
    return f"{words}: {size(done)} of {size(total)} ({done / total:.0%})" if total else words


def message_source(replica: status_pb2.ReplicaStatus, worker: status_pb2.WorkerStatus) -> str:
    """Names the source of a worker's message; that of a replica's first worker is the replica itself."""
    return f"replica {replica.replica_id}" + (f", rank {worker.rank}" if worker.rank else "")


def used_share(pool: status_pb2.BlockPoolStatus) -> float:
    """Computes the share of a pool in use, 0 to 1. Blocks that are only cached count as free."""
    return 1 - pool.num_free_blocks / pool.num_blocks if pool.num_blocks else 0.0


@dataclass(frozen=True, slots=True)
class ReplicaRates:
    """A replica's rates per second; None without an earlier reading.

    `busy_share`: the share of time spent in steps, 0 to 1.
    """

    steps: float | None = None
    tokens: float | None = None
    busy_share: float | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """A system's rates per second between two readings; None without an earlier reading.

    `cached_share`: the cached share of the prompts' tokens, 0 to 1. `right_share`: of the drafts, None if there were
    none; `tokens_per_step`: of a sequence in a step. Latencies are means in seconds over what ended in between.
    """

    completion_tokens: float | None = None
    prompt_tokens: float | None = None
    steps: float | None = None
    cached_share: float | None = None
    draft_tokens: float | None = None
    right_share: float | None = None
    tokens_per_step: float | None = None
    time_to_first_token: float | None = None
    inter_token_latency: float | None = None
    request_latency: float | None = None


def find_rates(before: admin_pb2.GetStatusResponse | None, now: admin_pb2.GetStatusResponse) -> Rates:
    """Computes rates between two readings. A process that restarted in between has none: its counters began anew."""
    scheduler = now.scheduler
    elapsed = _elapsed(before.scheduler, scheduler) if before else None
    if before is None or elapsed is None:
        return Rates()
    old = before.scheduler
    prompt = scheduler.num_prompt_tokens - old.num_prompt_tokens
    completion = max(0, scheduler.num_completion_tokens - old.num_completion_tokens)
    drafted, right = (one - other for one, other in zip(_count_drafts(scheduler), _count_drafts(old), strict=True))
    is_same_gateway = before.gateway.gateway_id == now.gateway.gateway_id
    mean = _mean if is_same_gateway else lambda *_: None
    return Rates(
        completion_tokens=completion / elapsed,
        prompt_tokens=max(0, prompt) / elapsed,
        steps=max(0, _num_steps(scheduler) - _num_steps(old)) / elapsed,
        cached_share=(scheduler.num_cached_tokens - old.num_cached_tokens) / prompt if prompt > 0 else None,
        draft_tokens=max(0, drafted) / elapsed,
        right_share=right / drafted if drafted > 0 else None,
        # All tokens but the drafts that were right had a step of their own.
        tokens_per_step=completion / (completion - right) if completion > right else None,
        time_to_first_token=mean(before.gateway.time_to_first_token, now.gateway.time_to_first_token),
        inter_token_latency=mean(before.gateway.inter_token_latency, now.gateway.inter_token_latency),
        request_latency=mean(before.gateway.request_latency, now.gateway.request_latency),
    )


def find_replica_rates(
    before: admin_pb2.GetStatusResponse | None, now: admin_pb2.GetStatusResponse, replica_id: int
) -> ReplicaRates:
    elapsed = _elapsed(before.scheduler, now.scheduler) if before else None
    old = _find(before, replica_id) if before else None
    new = _find(now, replica_id)
    if elapsed is None or old is None or new is None:
        return ReplicaRates()
    busy = seconds(new.step_time) - seconds(old.step_time)
    return ReplicaRates(
        max(0, new.num_steps - old.num_steps) / elapsed,
        max(0, new.num_completion_tokens - old.num_completion_tokens) / elapsed,
        min(1.0, max(0.0, busy / elapsed)),
    )


def _find(reading: admin_pb2.GetStatusResponse, replica_id: int) -> status_pb2.ReplicaStatus | None:
    return next((each for each in reading.scheduler.replicas if each.replica_id == replica_id), None)


def _elapsed(before: status_pb2.SchedulerStatus, now: status_pb2.SchedulerStatus) -> float | None:
    """Returns the seconds between two readings of one scheduler; None if it restarted in between."""
    elapsed = seconds(now.uptime) - seconds(before.uptime)
    return elapsed if elapsed > 0 and before.HasField("uptime") else None


def _num_steps(scheduler: status_pb2.SchedulerStatus) -> int:
    return sum(replica.num_steps for replica in scheduler.replicas)


def _count_drafts(scheduler: status_pb2.SchedulerStatus) -> tuple[int, int]:
    """Returns the drafts of all replicas, and how many of them were right."""
    replicas = scheduler.replicas
    return sum(each.num_draft_tokens for each in replicas), sum(each.num_accepted_tokens for each in replicas)


def _mean(before: status_pb2.LatencyTotals, now: status_pb2.LatencyTotals) -> float | None:
    count = now.count - before.count
    return (seconds(now.sum) - seconds(before.sum)) / count if count > 0 else None
