"""Every rule of the step stream: what breaks it is refused, and nothing has changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from blockyard.contract.sampling import SamplingParams
from blockyard.errors import Reason
from tests.unit.worker_service.rows import block_table_of
from worker_service.batch.input_batch import InputBatch
from worker_service.batch.rows import BatchLimits
from worker_service.step import MAX_VIOLATIONS, Array, BlockPairs, ForkedRow, NewRow, Step
from worker_service.steps.new_sequences import reject_wrong
from worker_service.steps.validation import check_step

if TYPE_CHECKING:
    from worker_service.batch.rows import RowProgress

LIMITS = BatchLimits(max_model_len=64, max_num_seqs=4, block_size=8, vocab_size=100, max_num_batched_tokens=70)
NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 33, 4


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def new(sequence_id: int, num_tokens: int = 3, block_ids: tuple[int, ...] = (9,), **fields: Any) -> NewRow:
    fields = {"sequence_index": 0, "prompt_length": num_tokens, "num_computed_tokens": 0} | fields
    token_ids = fields.pop("token_ids", np.arange(num_tokens))
    return NewRow(sequence_id, token_ids=token_ids, block_ids=ints(*block_ids), **fields)


def pairs(*sources_and_destinations: tuple[int, int]) -> BlockPairs:
    sources, destinations = zip(*sources_and_destinations, strict=True)
    return BlockPairs(ints(*sources), ints(*destinations))


def step(**fields: Any) -> Step:
    for name in ("num_new_tokens", "appended_block_ids"):
        if name in fields:
            fields[name] = ints(*fields[name])
    return Step(1, 1, **fields)


@pytest.fixture
def batch() -> InputBatch:
    """Sequence 1 decodes (10 ids known, 9 computed, 2 blocks); 2 is half prefilled (20 ids, 12, 3 blocks); 3 ended."""
    batch = InputBatch(LIMITS)
    first = step(
        new_sequences=(new(1, 9, (1, 2)), new(2, 20, (3, 4, 5)), new(3, 2, (6,), stop_token_ids=(50,))),
        sequence_ids=(1, 2, 3),
        num_new_tokens=(9, 12, 2),
    )
    assert problem(batch, first) == ""
    batch.apply(first)
    work = batch.make_forward_batch(first)
    batch.commit(work, ints(49, 50), np.zeros(2, np.bool_))
    return batch


def problem(batch: InputBatch, asked: Step) -> str:
    error = check_step(asked, batch, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS)
    assert error is None or error.reason is Reason.FIELD_INVALID
    return error.message if error else ""


def rejection(asked: Step) -> str:
    """Why the only new sequence of a step is rejected."""
    [sequence] = reject_wrong(asked, LIMITS).new_sequences
    return sequence.rejection.message if sequence.rejection else ""


def contents(batch: InputBatch) -> tuple[Any, ...]:
    return tuple(
        (i, batch.token_ids(i).tolist(), block_table_of(batch, i).tolist(), batch.progress(i)) for i in (1, 2, 3)
    )


GOOD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a decode": {"sequence_ids": (1,), "num_new_tokens": (1,)},
    "the rest of a prefill": {"sequence_ids": (2, 1), "num_new_tokens": (8, 1)},
    "a sequence that ended": {"sequence_ids": (3,), "num_new_tokens": (1,)},
    "one that ended, far beyond its table": {"sequence_ids": (3,), "num_new_tokens": (60,)},
    "a new one": {"new_sequences": (new(9),), "sequence_ids": (9,), "num_new_tokens": (3,)},
    "a new one with cached tokens": {"new_sequences": (new(9, num_computed_tokens=2),)},
    "a restart": {"finished_sequence_ids": (1, 1, 77), "new_sequences": (new(1),)},
    "an id that comes back after its end": {"finished_sequence_ids": (3,), "new_sequences": (new(3),)},
    "a child": {
        "forks": (ForkedRow(2, 7, 1, ints(3, 4, 5)),),
        "sequence_ids": (2, 7),
        "num_new_tokens": (8, 0),
    },
    "a child of one that starts": {
        "new_sequences": (new(9),),
        "forks": (ForkedRow(9, 7, 1, ints(9)),),
        "sequence_ids": (7, 9),
        "num_new_tokens": (0, 3),
    },
    "a child that decodes": {"forks": (ForkedRow(1, 7, 1, ints(1, 2)),), "sequence_ids": (7,), "num_new_tokens": (1,)},
    "a child of one that ended": {
        "forks": (ForkedRow(3, 7, 1, ints(6)),),
        "sequence_ids": (7,),
        "num_new_tokens": (0,),
    },
    "a child whose parent is finished": {"forks": (ForkedRow(1, 7, 1, ints(1, 2)),), "finished_sequence_ids": (1,)},
    "a table that grows": {"appended_sequence_ids": (1, 1), "appended_block_ids": (10, 11)},
    "a table that is replaced": {"replaced_tables": ((1, ints(12, 13)),)},
    "transfers in order": {
        "blocks_to_swap_out": pairs((5, 0), (6, 1)),
        "blocks_to_swap_in": pairs((2, 5), (3, 6)),
        "blocks_to_copy": pairs((1, 7), (1, 8), (5, 10)),
    },
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_step_is_taken(batch: InputBatch, name: str) -> None:
    asked = reject_wrong(step(**GOOD[name]), LIMITS)
    assert not any(new.rejection for new in asked.new_sequences)
    assert problem(batch, asked) == ""
    batch.apply(asked)
    batch.make_forward_batch(asked)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "more rows than max_num_seqs": (
        {"sequence_ids": tuple(range(5)), "num_new_tokens": (1,) * 5},
        "sequence_ids: 5 are more than max_num_seqs, 4",
    ),
    "more tokens than max_num_batched_tokens": (
        {"sequence_ids": (1, 2), "num_new_tokens": (1, 70)},
        "num_new_tokens: 71 tokens are more than max_num_batched_tokens, 70",
    ),
    "tokens that would overflow 32 bits": (
        {"sequence_ids": (1, 2), "num_new_tokens": (2**32 - 1, 2**32 - 1)},
        "num_new_tokens: 8589934590 tokens",
    ),
    "unknown sequence": ({"sequence_ids": (8,), "num_new_tokens": (1,)}, "sequences [8] are not known"),
    "finished sequence": (
        {"finished_sequence_ids": (1,), "sequence_ids": (1,), "num_new_tokens": (1,)},
        "sequences [1] are not known",
    ),
    "a sequence twice": ({"sequence_ids": (1, 1), "num_new_tokens": (1, 0)}, "appears twice"),
    "columns of two lengths": ({"sequence_ids": (1, 2), "num_new_tokens": (1,)}, "length of sequence_ids"),
    "more than is known": ({"sequence_ids": (2,), "num_new_tokens": (9,)}, "sequences [2]: computes more tokens"),
    "decode past the known": ({"sequence_ids": (1,), "num_new_tokens": (2,)}, "sequences [1]: computes more tokens"),
    "no tokens and no parent": ({"sequence_ids": (1,), "num_new_tokens": (0,)}, "no parent that samples"),
    "parent does not sample": (
        {"forks": (ForkedRow(2, 7, 1, ints(3, 4, 5)),), "sequence_ids": (2, 7), "num_new_tokens": (7, 0)},
        "sequences [7]: has no parent that samples",
    ),
    "parent is not in the step": (
        {"forks": (ForkedRow(1, 7, 1, ints(1, 2)),), "sequence_ids": (7,), "num_new_tokens": (0,)},
        "no parent that samples",
    ),
    "table too short": (
        {"replaced_tables": ((1, ints(1)),), "sequence_ids": (1,), "num_new_tokens": (1,)},
        "too short a block table",
    ),
    "new table too short": (
        {"new_sequences": (new(9, 9),), "sequence_ids": (9,), "num_new_tokens": (9,)},
        "too short a block table",
    ),
    "child's table too short": (
        {"forks": (ForkedRow(1, 7, 1, ints(1)),), "sequence_ids": (7,), "num_new_tokens": (1,)},
        "too short a block table",
    ),
    "known already": ({"new_sequences": (new(1),)}, "sequence 1 is known already"),
    "new twice": ({"new_sequences": (new(9), new(9))}, "sequence 9 appears twice"),
    "computed beyond the table": (
        {"new_sequences": (new(9, 20, (9,), num_computed_tokens=9),)},
        "more than the table's blocks hold",
    ),
    "new with block 0": ({"new_sequences": (new(9, 3, (0,)),)}, "device blocks must be from 1 to 32"),
    "new with a block beyond": ({"new_sequences": (new(9, 3, (33,)),)}, "device blocks must be from 1 to 32"),
    "table too long": ({"new_sequences": (new(9, 3, tuple(range(1, 11))),)}, "10 blocks hold more than max_model_len"),
    "fork of unknown": ({"forks": (ForkedRow(8, 7, 1, ints(1)),)}, "sequence 8 is not known"),
    "fork of a child": (
        {"forks": (ForkedRow(1, 7, 1, ints(1)), ForkedRow(7, 8, 1, ints(1)))},
        "sequence 7 is not known",
    ),
    "child known": ({"forks": (ForkedRow(1, 2, 1, ints(1)),)}, "sequence 2 is known already"),
    "child twice": (
        {"forks": (ForkedRow(1, 7, 1, ints(1)), ForkedRow(1, 7, 2, ints(1)))},
        "sequence 7 is known already",
    ),
    "child is new": (
        {"forks": (ForkedRow(1, 7, 1, ints(1)),), "new_sequences": (new(7),)},
        "sequence 7 is known already",
    ),
    "child with block 0": ({"forks": (ForkedRow(1, 7, 1, ints(1, 0)),)}, "device blocks must be from 1 to 32"),
    "append to unknown": ({"appended_sequence_ids": (8,), "appended_block_ids": (1,)}, "sequence 8 is not known"),
    "append to finished": (
        {"finished_sequence_ids": (1,), "appended_sequence_ids": (1,), "appended_block_ids": (1,)},
        "sequence 1 is not known",
    ),
    "append block 0": ({"appended_sequence_ids": (1,), "appended_block_ids": (0,)}, "must be from 1 to 32"),
    "append beyond": ({"appended_sequence_ids": (1,), "appended_block_ids": (33,)}, "must be from 1 to 32"),
    "append too much": (
        {"appended_sequence_ids": (1,) * 8, "appended_block_ids": tuple(range(10, 18))},
        "the table holds more than max_model_len",
    ),
    "append columns": ({"appended_sequence_ids": (1,), "appended_block_ids": ()}, "length of appended_sequence_ids"),
    "replace unknown": ({"replaced_tables": ((8, ints(1)),)}, "sequence 8 is not known"),
    "replace with block 0": ({"replaced_tables": ((1, ints(1, 0)),)}, "must be from 1 to 32"),
    "replace beyond": ({"replaced_tables": ((1, ints(33, 2)),)}, "must be from 1 to 32"),
    "swap out of block 0": ({"blocks_to_swap_out": pairs((0, 1))}, "swap_out.sources: blocks must be from 1 to 32"),
    "swap out beyond the host": ({"blocks_to_swap_out": pairs((1, 4))}, "destinations: blocks must be from 0 to 3"),
    "swap out twice to one": ({"blocks_to_swap_out": pairs((1, 2), (3, 2))}, "a block appears twice"),
    "swap in from beyond": ({"blocks_to_swap_in": pairs((4, 1))}, "swap_in.sources: blocks must be from 0 to 3"),
    "swap in to block 0": ({"blocks_to_swap_in": pairs((1, 0))}, "destinations: blocks must be from 1 to 32"),
    "swap in twice to one": ({"blocks_to_swap_in": pairs((1, 5), (2, 5))}, "a block appears twice"),
    "copy to block 0": ({"blocks_to_copy": pairs((1, 0))}, "destinations: blocks must be from 1 to 32"),
    "copy twice to one": ({"blocks_to_copy": pairs((1, 5), (2, 5))}, "a block appears twice"),
    "copy's destination is a source": ({"blocks_to_copy": pairs((1, 5), (5, 6))}, "is a source in the same list"),
    "swap in reads what swap out writes": (
        {"blocks_to_swap_out": pairs((1, 2)), "blocks_to_swap_in": pairs((2, 5))},
        "written by blocks_to_swap_out",
    ),
    "copy writes what swap in writes": (
        {"blocks_to_swap_in": pairs((2, 5)), "blocks_to_copy": pairs((1, 5))},
        "written by blocks_to_swap_in",
    ),
    "lonely sources": ({"blocks_to_copy": BlockPairs(ints(1), ints())}, "must have the same length"),
    "lonely destinations": ({"blocks_to_swap_in": BlockPairs(ints(), ints(3))}, "must have the same length"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_step_is_refused_and_changes_nothing(batch: InputBatch, name: str) -> None:
    before = contents(batch)
    fields, told = BAD[name]
    assert told in problem(batch, step(**fields))
    assert contents(batch) == before
    assert len(batch) == 3


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "more candidates than any beams need": (
        {"new_sequences": (new(9, num_beam_candidates=97, stop_token_ids=(1, 2)),)},
        "num_beam_candidates: 97, at most 96",
    ),
    "four billion candidates": ({"new_sequences": (new(9, num_beam_candidates=2**32 - 1),)}, "4294967295, at most 64"),
    "more stop tokens than there are tokens": (
        {"new_sequences": (new(9, stop_token_ids=tuple(range(165))),)},
        "stop_token_ids: 165 ids of a vocabulary of 100",
    ),
    "no sampling parameters": ({"new_sequences": (new(9, has_sampling=False),)}, "sampling: must be set"),
    "no ids": ({"new_sequences": (new(9, 0),)}, "0 ids where 1 to 64 fit"),
    "too many ids": ({"new_sequences": (new(9, 65),)}, "65 ids where 1 to 64 fit"),
    "id beyond the vocabulary": ({"new_sequences": (new(9, token_ids=ints(1, 100, 2)),)}, "must be below 100"),
    "no prompt": ({"new_sequences": (new(9, prompt_length=0),)}, "0 of 3 tokens"),
    "prompt longer than its ids": ({"new_sequences": (new(9, prompt_length=4),)}, "4 of 3 tokens"),
    "all computed": ({"new_sequences": (new(9, num_computed_tokens=3),)}, "the last token known"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_new_sequence_that_is_wrong_by_itself_is_rejected_and_the_step_is_good(batch: InputBatch, name: str) -> None:
    fields, told = WRONG[name]
    assert told in rejection(step(**fields))
    assert problem(batch, reject_wrong(step(**fields), LIMITS)) == ""


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"allowed_token_ids": (1, 100)}, "allowed_token_ids"),
        ({"bad_token_sequences": ((1, 2), (3, 100))}, "bad_token_sequences"),
        ({"bad_token_sequences": ((2**32 - 1,),)}, "bad_token_sequences"),
        ({"bad_token_sequences": ((1,), ())}, "bad_token_sequences"),
    ],
)
def test_parameters_that_would_break_the_sampler_are_rejected(fields: dict[str, Any], told: str) -> None:
    assert f"sampling.{told}: " in rejection(step(new_sequences=(new(9, sampling=SamplingParams(**fields)),)))


def test_every_violation_is_told_up_to_a_limit(batch: InputBatch) -> None:
    asked = step(
        new_sequences=(new(1, block_ids=(0,)),),
        forks=(ForkedRow(8, 2, 1, ints(0)),),
        blocks_to_copy=pairs((1, 5), (5, 6)),
    )
    error = check_step(asked, batch, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS)
    assert error is not None
    assert {violation.field for violation in error.violations} == {
        "new_sequences[0].sequence_id",
        "new_sequences[0].block_ids",
        "forks[0].parent_sequence_id",
        "forks[0].child_sequence_id",
        "forks[0].block_ids",
        "blocks_to_copy",
    }
    many = check_step(step(new_sequences=(new(9, 0),) * 50), batch, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS)
    assert many is not None
    assert len(many.violations) == MAX_VIOLATIONS


class CountingBatch(InputBatch):
    """Counts how often it is asked about one sequence."""

    num_asked = 0

    def __contains__(self, sequence_id: int) -> bool:
        self.num_asked += 1
        return super().__contains__(sequence_id)

    def progress(self, sequence_id: int) -> RowProgress:
        self.num_asked += 1
        return super().progress(sequence_id)


@pytest.mark.parametrize(
    "fields",
    [
        {"appended_sequence_ids": (1,) * 2_000_000, "appended_block_ids": np.full(2_000_000, 9)},
        {"appended_sequence_ids": tuple(range(100, 2_000_100)), "appended_block_ids": np.full(2_000_000, 9)},
        {"new_sequences": (new(9, 0),) * 100_000},
        {"forks": (ForkedRow(8, 2, 1, ints(0)),) * 100_000},
        {"replaced_tables": ((8, ints(0)),) * 100_000},
        {"input_sequence_ids": tuple(range(100, 100_100)), "input_token_ids": np.zeros(100_000, np.int64)},
    ],
    ids=lambda fields: str(next(iter(fields))),
)
def test_a_check_looks_at_few_things_however_long_the_step_is(fields: dict[str, Any]) -> None:
    batch = CountingBatch(LIMITS)
    batch.apply(step(new_sequences=(new(1, 9, (1, 2)),)))
    batch.num_asked = 0
    error = check_step(Step(1, 1, **fields), batch, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS)
    assert error is not None
    assert len(error.violations) <= MAX_VIOLATIONS
    assert batch.num_asked <= 4 * MAX_VIOLATIONS


def test_a_full_sequence_cannot_compute_past_the_limit() -> None:
    batch = InputBatch(LIMITS)
    first = step(new_sequences=(new(1, 64, tuple(range(1, 10))),), sequence_ids=(1,), num_new_tokens=(64,))
    assert problem(batch, first) == ""
    batch.apply(first)
    batch.commit(batch.make_forward_batch(first), ints(5), np.zeros(1, np.bool_))
    assert "computes past max_model_len" in problem(batch, step(sequence_ids=(1,), num_new_tokens=(1,)))


def test_tables_have_a_block_of_each_kv_group() -> None:
    """And none only where a group with a window may lack it."""
    batch = InputBatch(replace(LIMITS, kv_windows=(0, 8)))
    good = {"sequence_ids": (1,), "num_new_tokens": (9,)}
    assert problem(batch, step(new_sequences=(new(1, 9, (1, 0, 3, 4)),), **good)) == ""
    for block_ids, wrong in (
        ((1, 2, 3), "block of each of 2 KV groups"),
        ((1, 2), "too short a block table"),
        ((0, 2, 3, 4), "device blocks must be from 1"),
        ((1, 2, 3, NUM_DEVICE_BLOCKS), "device blocks must be from 1"),
    ):
        assert wrong in problem(batch, step(new_sequences=(new(1, 9, block_ids),), **good))
