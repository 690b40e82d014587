"""Digests of steps: equal where two ranks did the same, different where anything differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from worker_service.batch.forward_batch import ForwardBatch
from worker_service.runner.model_runner import RunnerOutput
from worker_service.sampling.sampler import BeamCandidates, Sampled
from worker_service.step import BlockPairs, ForkedRow, NewRow, Step
from worker_service.steps.rank_steps import StepDigest

BIG = 2**64 - 1


def column(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


class _Layout:
    """As much of a layout as a digest reads."""

    skipped_ids: tuple[int, ...] = (9,)


def resolved(token_ids: Any = None, seq_lens: Any = None) -> ForwardBatch:
    """What a step resolved to."""
    none = column()
    layout: Any = _Layout()
    return ForwardBatch(
        layout,
        column(4, 5) if seq_lens is None else seq_lens,
        np.zeros((0, 0), np.int32),
        column(7, 8, 9) if token_ids is None else token_ids,
        (),
        none,
    )


def pairs(*numbers: int) -> BlockPairs:
    half = len(numbers) // 2
    return BlockPairs(column(*numbers[:half]), column(*numbers[half:]))


STEP = Step(
    3,
    17,
    sequence_ids=(1, BIG),
    num_new_tokens=column(2, 1),
    new_sequences=(NewRow(1, 0, column(5), 1, 0, column(3, 4)),),
    forks=(ForkedRow(1, 2, 0, column(3)),),
    appended_sequence_ids=(BIG,),
    appended_block_ids=column(6),
    replaced_tables=((1, column(8)),),
    blocks_to_swap_out=pairs(1, 2),
    blocks_to_swap_in=pairs(3, 4),
    blocks_to_copy=pairs(5, 6),
    max_draft_tokens=column(0, 3),
    draft_prices=column(100, 200),
)
CHANGES = {
    "step_id": {"step_id": 18},
    "sequence_ids": {"sequence_ids": (1, BIG - 1)},
    "num_new_tokens": {"num_new_tokens": column(1, 2)},
    "new table": {"new_sequences": (NewRow(1, 0, column(5), 1, 0, column(3, 5)),)},
    "new id": {"new_sequences": (NewRow(2, 0, column(5), 1, 0, column(3, 4)),)},
    "fork": {"forks": (ForkedRow(1, 2, 0, column(4)),)},
    "parent": {"forks": (ForkedRow(3, 2, 0, column(3)),)},
    "appended_sequence_ids": {"appended_sequence_ids": (2,)},
    "appended_block_ids": {"appended_block_ids": column(7)},
    "replaced_tables": {"replaced_tables": ((1, column(8, 9)),)},
    "swap_out": {"blocks_to_swap_out": pairs(2, 1)},
    "swap_in": {"blocks_to_swap_in": pairs(3, 5)},
    "copy": {"blocks_to_copy": pairs()},
    "max_draft_tokens": {"max_draft_tokens": column(0, 4)},
    "draft_prices": {"draft_prices": column(100, 201)},
    "between lists": {"blocks_to_swap_out": pairs(), "blocks_to_swap_in": pairs(1, 3, 2, 4)},
}


def inputs_digest(*steps: tuple[Step, ForwardBatch]) -> int:
    digest = StepDigest()
    for step, batch in steps:
        digest.add_inputs(step, batch)
    return digest.inputs


def test_equal_steps_have_equal_digests() -> None:
    assert inputs_digest((STEP, resolved())) == inputs_digest((replace(STEP), resolved())) != 0
    assert inputs_digest((STEP, resolved())) < 2**64


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_differs_shows(name: str) -> None:
    assert inputs_digest((replace(STEP, **CHANGES[name]), resolved())) != inputs_digest((STEP, resolved()))


@pytest.mark.parametrize("batch", [resolved(token_ids=column(7, 8, 10)), resolved(seq_lens=column(4, 6))])
def test_what_the_rank_resolved_shows(batch: ForwardBatch) -> None:
    assert inputs_digest((STEP, batch)) != inputs_digest((STEP, resolved()))


def test_a_difference_shows_in_every_later_digest() -> None:
    other = (replace(STEP, sequence_ids=(1, 2)), resolved())
    same = (STEP, resolved())
    assert inputs_digest(other, same, same) != inputs_digest(same, same, same)
    assert inputs_digest(same, other) != inputs_digest(other, same)


def outputs_digest(
    token_ids: list[int], failed: list[bool], beams_failed: tuple[bool, ...] = (), counts: list[int] | None = None
) -> int:
    digest = StepDigest()
    of_each = None if counts is None else column(*counts)
    sampled = Sampled(column(*token_ids), np.array(failed, np.bool_), counts=of_each)
    digest.add_outputs(resolved(), RunnerOutput(sampled, BeamCandidates(np.array(beams_failed, np.bool_))))
    return digest.outputs


def test_what_was_sampled_shows_and_what_failed_has_no_token() -> None:
    assert outputs_digest([3, 4], [False, False]) == outputs_digest([3, 4], [False, False])
    different = [
        outputs_digest([3, 4], [False, False]),
        outputs_digest([4, 3], [False, False]),
        outputs_digest([3, 4], [False, True]),
        outputs_digest([3, 4], [False, False], (True,)),
        outputs_digest([3, 4], [False, False], (False,)),
        outputs_digest([3, 4], [False, False], counts=[1, 1]),
        outputs_digest([3, 4], [False, False], counts=[2, 0]),
        outputs_digest([3, 4], [False, True], counts=[2, 0]),
        outputs_digest([3, 5], [False, True], counts=[2, 0]),
    ]
    assert len(set(different)) == len(different)
    assert outputs_digest([3, 5], [False, True]) == outputs_digest([3, 4], [False, True])
