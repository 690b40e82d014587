from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from scheduler_service.core.values import BlockPair, GroupSpec, NewSequence, SchedulerOutput, SchedulerStats, StepResult
from scheduler_service.replicas.steps.step_metrics import PERIOD_SECONDS, StepLog

if TYPE_CHECKING:
    import pytest

SPEC = GroupSpec("r", "o", (1, 2), 1, 5, 0, frozenset())
STATS = SchedulerStats(*range(17))


def new(sequence_id: int, token_ids: tuple[int, ...], num_computed_tokens: int = 0) -> NewSequence:
    return NewSequence(sequence_id, 0, token_ids, 2, num_computed_tokens, (1,), SPEC)


def fields_of(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if record.message == message]


def test_a_step_is_told_with_the_length_of_each_list(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    step = SchedulerOutput(
        9,
        new_sequences=(new(1, (1, 2)), new(2, (1, 2), 1), new(3, (1, 2, 8)), new(4, (1, 2))),
        sequence_ids=(1, 2, 3, 4, 5),
        num_new_tokens=(2, 1, 3, 2, 1),
        appended_sequence_ids=(5,),
        appended_block_ids=(6,),
        blocks_to_swap_out=(BlockPair(1, 2),) * 2,
        blocks_to_swap_in=(BlockPair(1, 2),) * 3,
        blocks_to_copy=(BlockPair(1, 2),),
        finished_sequence_ids=(4, 7),
        max_draft_tokens=(0, 0, 0, 0, 3),
    )
    log = StepLog()
    log.on_scheduled(step, 3, 0.1)
    assert fields_of(caplog, "step") == [
        {
            "epoch": 3,
            "step_id": 9,
            "num_sequences": 5,
            "num_tokens": 9,
            "new": 4,
            # One has output already, one is told to be forgotten in the same step.
            "recomputed": 2,
            "prefix_hits": 1,
            "drafts": 3,
            "prefill_pieces": 3,
            "forks": 0,
            "appended_blocks": 1,
            "replaced_tables": 0,
            "swapped_out": 2,
            "swapped_in": 3,
            "copied": 1,
            "finished": 2,
        }
    ]
    assert log.num_recomputed_sequences == 2


def test_without_debug_only_the_counts_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = StepLog()
    log.on_scheduled(SchedulerOutput(1, new_sequences=(new(3, (1, 2, 8)),)), 1, 0.1)
    assert log.num_recomputed_sequences == 1
    assert caplog.records == []


def test_totals_are_due_after_a_period_with_steps() -> None:
    log = StepLog()
    log.on_answered(StepResult(1), 0.001)
    assert not log.is_due(100.0)
    assert not log.is_due(100.0 + PERIOD_SECONDS / 2)
    assert log.is_due(100.0 + PERIOD_SECONDS)
    log.write_totals(STATS, 100.0 + PERIOD_SECONDS)
    assert not log.is_due(100.0 + 3 * PERIOD_SECONDS)
    log.on_answered(StepResult(2), 0.001)
    assert log.is_due(100.0 + 3 * PERIOD_SECONDS)


def test_totals_tell_the_mean_costs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = StepLog()
    for step_id in (1, 2):
        log.on_scheduled(SchedulerOutput(step_id), 1, 0.001)
        log.on_answered(StepResult(step_id), 0.002)
    log.write_totals(STATS, 5.0)
    (totals,) = fields_of(caplog, "totals")
    assert (totals["steps"], totals["schedule_us"], totals["update_us"]) == (2, 1000.0, 2000.0)
    assert (totals["waiting"], totals["preemptions"], totals["completion_tokens"]) == (0, 9, 16)
