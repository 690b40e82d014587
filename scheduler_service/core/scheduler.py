"""Decides what each step computes. Owns the sequences; knows nothing of messages, clocks and workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from scheduler_service.core.output import FinishReason

if TYPE_CHECKING:
    from scheduler_service.core.output import GroupSpec, OwnerUpdate, SchedulerOutput, SchedulerStats, StepResult


class NeverFits(Exception):
    """A request that could not run even alone. `num_tokens_that_fit`: prompt and output together, at most."""

    def __init__(self, num_tokens: int, num_tokens_that_fit: int) -> None:
        super().__init__(f"{num_tokens} tokens never fit: at most {num_tokens_that_fit} do")
        self.num_tokens_that_fit = num_tokens_that_fit


class DuplicateRequest(Exception):
    """A live request has this id."""


class StepMismatch(Exception):
    """An answer that does not belong to the step it claims to answer: one of the two sides has a bug. Changes nothing."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler may use. Blocks count from the worker's pools; device block 0 is never handed out."""

    block_size: int
    num_device_blocks: int
    num_host_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunk: int = 0
    enable_prefix_caching: bool = True
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    max_steps_in_flight: int = 2
    watermark: float = 0.01
    debug_integrity: bool = False


class Scheduler:
    """Continuous batching over a paged cache: one object for each replica."""

    def __init__(self, config: SchedulerConfig) -> None: ...

    def add(self, spec: GroupSpec, now: float) -> int: ...

    def abort(
        self, request_id: str, sequence_index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> bool: ...

    def abort_owner(self, owner: str) -> int: ...

    def has_unfinished(self) -> bool: ...

    def can_schedule(self) -> bool: ...

    def schedule(self, now: float) -> SchedulerOutput | None: ...

    def update(self, result: StepResult) -> dict[str, OwnerUpdate]: ...

    def fail_all(self, message: str) -> dict[str, OwnerUpdate]: ...

    def stats(self) -> SchedulerStats: ...

    def check_integrity(self) -> None: ...
