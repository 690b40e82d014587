"""Fixed blocks on the worker: their tables, what is refused of them, and what a step computes with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from blockyard.contract.sampling import SamplingParams
from blockyard.errors import Reason
from worker_service.batch.input_batch import InputBatch
from worker_service.batch.rows import BatchLimits
from worker_service.step import Array, ForkedRow, NewRow, Step
from worker_service.steps.rank_steps import StepDigest
from worker_service.steps.validation import check_step

if TYPE_CHECKING:
    from worker_service.batch.forward_batch import ForwardBatch

LIMITS = BatchLimits(
    max_model_len=64, max_num_seqs=4, block_size=8, vocab_size=100, max_num_batched_tokens=70, num_state_blocks=2
)
NUM_DEVICE_BLOCKS = 33


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def new(sequence_id: int, num_tokens: int, block_ids: tuple[int, ...], fixed_ids: tuple[int, ...]) -> NewRow:
    ids, table, fixed = np.arange(num_tokens), ints(*block_ids), ints(*fixed_ids)
    return NewRow(sequence_id, 0, ids, num_tokens, 0, table, SamplingParams(), fixed_block_ids=fixed)


def step(**fields: Any) -> Step:
    for name in ("num_new_tokens", "appended_block_ids"):
        if name in fields:
            fields[name] = ints(*fields[name])
    return Step(1, 1, **fields)


def problem(batch: InputBatch, asked: Step) -> str:
    error = check_step(asked, batch, NUM_DEVICE_BLOCKS, 4)
    assert error is None or error.reason is Reason.FIELD_INVALID
    return error.message if error else ""


def run(batch: InputBatch, **fields: Any) -> ForwardBatch:
    asked = step(**fields)
    assert problem(batch, asked) == ""
    batch.apply(asked)
    work = batch.make_forward_batch(asked)
    sampled = len(work.layout.sampled.rows)
    batch.commit(work, np.full(sampled, 50), np.zeros(sampled, np.bool_))
    return work


def start(limits: BatchLimits = LIMITS) -> InputBatch:
    """Sequence 1 decodes, with blocks 1 and 2 and fixed ones 11 and 12; sequence 2 with 3 and fixed 13 and 14."""
    batch = InputBatch(limits)
    rows = (new(1, 9, (1, 2), (11, 12)), new(2, 3, (3,), (13, 14)))
    work = run(batch, new_sequences=rows, sequence_ids=(1, 2), num_new_tokens=(9, 3))
    assert work.fixed_tables is not None
    assert work.fixed_tables.tolist() == [[11, 12], [13, 14]]
    assert work.fixed_tables.flags.c_contiguous
    return batch


def fixed_of(work: ForwardBatch) -> list[list[int]]:
    assert work.fixed_tables is not None
    return work.fixed_tables.tolist()


def test_a_step_computes_with_the_fixed_blocks_of_its_rows() -> None:
    batch = start()
    assert fixed_of(run(batch, sequence_ids=(2,), num_new_tokens=(1,))) == [[13, 14]]
    fork = ForkedRow(1, 3, 1, ints(1, 2), ints(15, 16))
    run(batch, forks=(fork,), sequence_ids=(1, 3), num_new_tokens=(1, 0))
    assert fixed_of(run(batch, sequence_ids=(3, 1), num_new_tokens=(1, 1))) == [[15, 16], [11, 12]]
    back = {"replaced_tables": ((1, ints(4, 5)),), "replaced_fixed_tables": ((1, ints(17, 18)),)}
    assert fixed_of(run(batch, sequence_ids=(1,), num_new_tokens=(1,), **back)) == [[17, 18]]
    # Other blocks for tokens alone leave the fixed ones as they are.
    work = run(batch, sequence_ids=(1,), num_new_tokens=(1,), replaced_tables=((1, ints(4, 6)),))
    assert fixed_of(work) == [[17, 18]]


def test_a_row_that_is_used_again_has_its_own() -> None:
    batch = start()
    run(batch, finished_sequence_ids=(1,), new_sequences=(new(4, 2, (1,), (21, 22)),))
    assert fixed_of(run(batch, sequence_ids=(4, 2), num_new_tokens=(2, 1))) == [[21, 22], [13, 14]]


def test_without_states_there_are_no_tables() -> None:
    batch = InputBatch(replace(LIMITS, num_state_blocks=0))
    work = run(batch, new_sequences=(new(1, 3, (1,), ()),), sequence_ids=(1,), num_new_tokens=(3,))
    assert work.fixed_tables is None
    assert batch.filled_fixed_blocks() == []


def test_the_fixed_blocks_of_sequences_with_tokens_are_filled() -> None:
    batch = start()
    run(batch, new_sequences=(new(4, 2, (7,), (21, 22)),))
    assert batch.filled_blocks() == [1, 2, 3]
    assert batch.filled_fixed_blocks() == [11, 12, 13, 14]


def test_a_model_without_attention_has_no_other_tables() -> None:
    batch = InputBatch(replace(LIMITS, kv_windows=()))
    run(batch, new_sequences=(new(1, 60, (), (11, 12)),), sequence_ids=(1,), num_new_tokens=(59,))
    work = run(batch, sequence_ids=(1,), num_new_tokens=(1,))
    assert (fixed_of(work), work.block_tables.size) == ([[11, 12]], 0)
    assert batch.filled_blocks() == []
    assert "more than max_model_len" in problem(batch, step(new_sequences=(new(2, 3, (5,), (13, 14)),)))


BOTH = {"sequence_ids": (1, 2), "num_new_tokens": (1, 1)}
WRONG = {
    "too few": ({"new_sequences": (new(5, 3, (5,), (21,)),)}, "1 blocks, and each sequence has 2 fixed ones"),
    "none": ({"new_sequences": (new(5, 3, (5,), ()),)}, "0 blocks, and each sequence has 2 fixed ones"),
    "too many": ({"forks": (ForkedRow(1, 5, 1, ints(1, 2), ints(21, 22, 23)),)}, "3 blocks, and each sequence has 2"),
    "scratch": ({"new_sequences": (new(5, 3, (5,), (0, 21)),)}, "device blocks must be from 1 to 32"),
    "beyond": (
        {"replaced_tables": ((1, ints(1, 2)),), "replaced_fixed_tables": ((1, ints(21, 33)),)},
        "replaced_tables[0].fixed_block_ids: device blocks must be from 1 to 32",
    ),
    "twice": (
        {"new_sequences": (new(5, 3, (5,), (21, 21)),), "sequence_ids": (5,), "num_new_tokens": (3,)},
        "a block is fixed twice",
    ),
    "another's": (
        {"new_sequences": (new(5, 3, (5,), (21, 13)),), "sequence_ids": (2, 5), "num_new_tokens": (1, 3)},
        "a block is fixed twice",
    ),
    "the parent's": (
        {
            "forks": (ForkedRow(1, 5, 1, ints(1, 2), ints(11, 22)),),
            "sequence_ids": (1, 5),
            "num_new_tokens": (1, 0),
        },
        "a block is fixed twice",
    ),
    "one of its own tokens": (
        {"new_sequences": (new(5, 3, (5,), (21, 5)),), "sequence_ids": (5,), "num_new_tokens": (3,)},
        "blocks [5] hold tokens of a sequence as well",
    ),
    "one of another's tokens": (
        {"replaced_tables": ((1, ints(1, 2)),), "replaced_fixed_tables": ((1, ints(21, 3)),), **BOTH},
        "blocks [3] hold tokens of a sequence as well",
    ),
    "grown into": (
        {"appended_sequence_ids": (2,), "appended_block_ids": (12,), **BOTH},
        "blocks [12] hold tokens of a sequence as well",
    ),
    "replaced by": (
        {"replaced_tables": ((2, ints(11)),), "replaced_fixed_tables": ((2, ints(21, 22)),), **BOTH},
        "blocks [11] hold tokens of a sequence as well",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_is_refused(name: str) -> None:
    fields, wrong = WRONG[name]
    batch = start()
    assert wrong in problem(batch, step(**fields))


def test_a_model_without_states_takes_none() -> None:
    batch = InputBatch(replace(LIMITS, num_state_blocks=0))
    asked = step(new_sequences=(new(1, 3, (1,), (5,)),))
    assert "1 blocks, and each sequence has 0 fixed ones" in problem(batch, asked)


def test_blocks_of_sequences_that_are_not_computed_may_have_gone_to_others() -> None:
    """Sequence 2 was preempted: its row stays, with its old tables."""
    batch = start()
    run(batch, new_sequences=(new(5, 3, (13,), (3, 14)),), sequence_ids=(1, 5), num_new_tokens=(1, 3))


def test_blocks_behind_a_window_may_have_gone_to_others() -> None:
    batch = InputBatch(replace(LIMITS, kv_windows=(0, 8)))
    run(batch, new_sequences=(new(1, 20, (1, 2, 3, 4, 5, 6), (11, 12)),), sequence_ids=(1,), num_new_tokens=(20,))
    one = new(2, 3, (7, 8), (2, 14))
    run(batch, new_sequences=(one,), sequence_ids=(1, 2), num_new_tokens=(1, 3))


def digest(asked: Step) -> int:
    chain = StepDigest()
    batch = InputBatch(LIMITS)
    batch.apply(Step(1, 1, new_sequences=(new(1, 3, (1,), (11, 12)),)))
    chain.add_inputs(asked, batch.make_forward_batch(Step(1, 1)))
    return chain.inputs


CHANGES = {
    "new": [{"new_sequences": (new(2, 3, (2,), fixed),)} for fixed in ((13, 14), (13, 15))],
    "forked": [{"forks": (ForkedRow(1, 2, 1, ints(2), ints(*fixed)),)} for fixed in ((13, 14), (13, 15))],
    "replaced": [{"replaced_fixed_tables": ((1, ints(*fixed)),)} for fixed in ((13, 14), (13, 15))],
}


@pytest.mark.parametrize("name", CHANGES)
def test_ranks_with_other_fixed_blocks_have_other_digests(name: str) -> None:
    one, other = (digest(step(**fields)) for fields in CHANGES[name])
    assert one != other
    assert one == digest(step(**CHANGES[name][0]))
