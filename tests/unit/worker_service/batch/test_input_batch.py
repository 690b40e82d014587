"""Rows: added, forked, forgotten, grown; what a step computes; what it leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from blockyard.contract.sampling import SamplingParams
from tests.unit.worker_service.rows import block_table_of
from worker_service.batch.input_batch import InputBatch
from worker_service.batch.rows import BatchLimits, RowProgress
from worker_service.step import Array, ForkedRow, NewRow, Step

LIMITS = BatchLimits(max_model_len=64, max_num_seqs=4, block_size=8, vocab_size=100, max_num_batched_tokens=70)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def new(sequence_id: int, token_ids: list[int], block_ids: list[int], **fields: Any) -> NewRow:
    fields = {"sequence_index": 0, "prompt_length": len(token_ids), "num_computed_tokens": 0} | fields
    return NewRow(sequence_id, token_ids=ints(*token_ids), block_ids=ints(*block_ids), **fields)


def step(**fields: Any) -> Step:
    if "num_new_tokens" in fields:
        fields["num_new_tokens"] = ints(*fields["num_new_tokens"])
    return Step(1, 1, **fields)


def run(batch: InputBatch, tokens: list[int] | None = None, failed: list[bool] | None = None, **fields: Any) -> Any:
    """Applies and commits a step, with these tokens as sampled."""
    asked = step(**fields)
    batch.apply(asked)
    work = batch.make_forward_batch(asked)
    tokens = tokens if tokens is not None else [50] * len(work.layout.sampled.sequence_ids)
    batch.commit(work, ints(*tokens), np.array(failed if failed is not None else [False] * len(tokens), np.bool_))
    return work


@pytest.fixture
def batch() -> InputBatch:
    return InputBatch(LIMITS)


def test_a_prompt_is_computed_in_pieces_and_sampled_with_its_last(batch: InputBatch) -> None:
    one = new(7, list(range(10)), [3, 4])
    work = run(batch, new_sequences=(one,), sequence_ids=(7,), num_new_tokens=[6])
    assert work.token_ids.tolist() == list(range(6))
    assert (work.seq_lens.tolist(), work.layout.sampled.sequence_ids) == ([6], ())
    assert work.block_tables.tolist() == [[3]]
    work = run(batch, [42], sequence_ids=(7,), num_new_tokens=[4])
    assert work.token_ids.tolist() == [6, 7, 8, 9]
    sampled = work.layout.sampled
    assert (work.seq_lens.tolist(), sampled.sequence_ids, sampled.last_hidden.tolist()) == ([10], (7,), [3])
    assert work.block_tables.tolist() == [[3, 4]]
    work = run(batch, [43], sequence_ids=(7,), num_new_tokens=[1])
    assert (work.token_ids.tolist(), work.seq_lens.tolist()) == ([42], [11])
    assert batch.token_ids(7).tolist() == [*range(10), 42, 43]


def test_a_mixed_step_keeps_the_order_of_the_request(batch: InputBatch) -> None:
    run(batch, [20], new_sequences=(new(1, [1, 2], [1]),), sequence_ids=(1,), num_new_tokens=[2])
    run(batch, [30], new_sequences=(new(2, [3, 4, 5], [2]),), sequence_ids=(2,), num_new_tokens=[3])
    asked = {"new_sequences": (new(3, [6, 7, 8, 9], [5]),), "sequence_ids": (2, 3, 1), "num_new_tokens": [1, 3, 1]}
    work = run(batch, [31, 21], **asked)
    assert work.token_ids.tolist() == [30, 6, 7, 8, 20]
    assert work.seq_lens.tolist() == [4, 3, 3]
    assert work.block_tables[:, 0].tolist() == [2, 5, 1]
    assert (work.layout.sampled.sequence_ids, work.layout.sampled.last_hidden.tolist()) == ((2, 1), [0, 4])
    assert batch.token_ids(1).tolist() == [1, 2, 20, 21]
    assert batch.token_ids(2).tolist() == [3, 4, 5, 30, 31]


def test_computed_tokens_are_not_computed_again(batch: InputBatch) -> None:
    one = new(1, list(range(20)), [1, 2, 3], num_computed_tokens=16)
    work = run(batch, new_sequences=(one,), sequence_ids=(1,), num_new_tokens=[4])
    assert work.token_ids.tolist() == [16, 17, 18, 19]
    assert (work.seq_lens.tolist(), work.layout.sampled.sequence_ids) == ([20], (1,))


def test_a_fork_copies_its_parent_and_goes_its_own_way(batch: InputBatch) -> None:
    penalties = SamplingParams(frequency_penalty=0.5, seed=9)
    run(batch, new_sequences=(new(1, [1, 2, 3], [1], sampling=penalties),), sequence_ids=(1,), num_new_tokens=[2])
    forks = (ForkedRow(1, 2, 1, ints(1)), ForkedRow(1, 3, 2, ints(1)))
    asked = {"forks": forks, "sequence_ids": (1, 2, 3), "num_new_tokens": [1, 0, 0]}
    work = run(batch, [10, 11, 12], **asked)
    assert work.token_ids.tolist() == [3]
    assert (work.layout.sampled.sequence_ids, work.layout.sampled.last_hidden.tolist()) == ((1, 2, 3), [0, 0, 0])
    assert [batch.token_ids(i).tolist()[3:] for i in (1, 2, 3)] == [[10], [11], [12]]
    work = run(batch, sequence_ids=(3, 1, 2), num_new_tokens=[1, 1, 1], replaced_tables=((2, ints(5)), (3, ints(6))))
    assert work.token_ids.tolist() == [12, 10, 11]
    assert work.block_tables[:, 0].tolist() == [6, 1, 5]
    columns = batch.sample_rows(work.layout.sampled).columns
    assert columns["sequence_index"].tolist() == [2, 0, 1]
    assert columns["seed"].tolist() == [9, 9, 9]
    counts = [
        dict(zip(x.counts.token_ids, x.counts.output_counts, strict=True))
        for x in batch.sample_rows(work.layout.sampled).lists
        if x.counts
    ]
    assert counts == [{1: 0, 2: 0, 3: 0, t: 1, 50: 1} for t in (12, 10, 11)]


def test_a_parent_that_starts_in_this_step_is_forked_after_it_was_added(batch: InputBatch) -> None:
    asked = {
        "new_sequences": (new(1, [1, 2, 3], [1]),),
        "forks": (ForkedRow(1, 2, 1, ints(1)),),
        "sequence_ids": (2, 1),
        "num_new_tokens": [0, 3],
    }
    work = run(batch, [11, 10], **asked)
    assert (work.layout.sampled.sequence_ids, work.layout.sampled.last_hidden.tolist()) == ((2, 1), [2, 2])
    assert batch.token_ids(2).tolist() == [1, 2, 3, 11]


def test_a_sequence_that_is_finished_and_new_starts_anew(batch: InputBatch) -> None:
    stops = {"stop_token_ids": (50,)}
    run(batch, new_sequences=(new(1, [1, 2], [1], **stops),), sequence_ids=(1,), num_new_tokens=[2])
    again = new(1, [1, 2, 9], [4], prompt_length=2)
    asked = {"finished_sequence_ids": (1, 99), "new_sequences": (again,), "sequence_ids": (1,), "num_new_tokens": [3]}
    work = run(batch, [10], **asked)
    assert (work.layout.skipped_ids, work.token_ids.tolist()) == ((), [1, 2, 9])
    assert batch.sample_rows(work.layout.sampled).positions.tolist() == [2]
    assert len(batch) == 1


def test_a_stop_token_ends_the_row_after_min_tokens_only(batch: InputBatch) -> None:
    one = new(1, [1, 2], [1], stop_token_ids=(8, 50), min_tokens=2)
    two = new(2, [1, 2], [2])
    run(batch, [50, 50], new_sequences=(one, two), sequence_ids=(1, 2), num_new_tokens=[2, 2])
    run(batch, [50, 50], sequence_ids=(1, 2), num_new_tokens=[1, 1])
    work = run(batch, [50, 50], sequence_ids=(1, 2), num_new_tokens=[1, 1])
    assert work.layout.skipped_ids == ()
    for _ in range(2):
        work = run(batch, [51], sequence_ids=(1, 2), num_new_tokens=[1, 1])
        assert (work.layout.skipped_ids, work.layout.sampled.sequence_ids, work.layout.rows.size) == ((1,), (2,), 1)
    assert batch.token_ids(1).tolist() == [1, 2, 50, 50, 50]


def test_a_row_that_failed_computes_nothing_more(batch: InputBatch) -> None:
    news = (new(1, [1], [1]), new(2, [2], [2]))
    run(batch, [0, 5], failed=[True, False], new_sequences=news, sequence_ids=(1, 2), num_new_tokens=[1, 1])
    work = run(batch, [6], sequence_ids=(1, 2), num_new_tokens=[1, 1])
    assert (work.layout.skipped_ids, work.layout.sampled.sequence_ids) == ((1,), (2,))


def test_a_step_of_ended_rows_alone_computes_nothing(batch: InputBatch) -> None:
    run(batch, [50], new_sequences=(new(1, [1], [1], stop_token_ids=(50,)),), sequence_ids=(1,), num_new_tokens=[1])
    work = run(batch, [], sequence_ids=(1,), num_new_tokens=[1])
    assert (work.layout.skipped_ids, work.layout.rows.size) == ((1,), 0)
    assert (work.token_ids.size, work.block_tables.shape) == (0, (0, 0))


def test_tables_grow_and_are_replaced_as_a_whole_last(batch: InputBatch) -> None:
    run(batch, new_sequences=(new(1, [1], [1]), new(2, [1], [2])), sequence_ids=(1, 2), num_new_tokens=[1, 1])
    batch.apply(step(appended_sequence_ids=(1, 2, 1), appended_block_ids=ints(5, 6, 7)))
    assert block_table_of(batch, 1).tolist() == [1, 5, 7]
    assert block_table_of(batch, 2).tolist() == [2, 6]
    batch.apply(step(appended_sequence_ids=(2,), appended_block_ids=ints(8), replaced_tables=((2, ints(9, 8)),)))
    assert block_table_of(batch, 2).tolist() == [9, 8]


def test_more_sequences_than_expected_find_rows(batch: InputBatch) -> None:
    for index in range(30):
        stops = tuple(range(60, 60 + index % 5))
        one = new(index, [index, 1], [index + 1], stop_token_ids=stops)
        run(batch, [40], new_sequences=(one,), sequence_ids=(index,), num_new_tokens=[2])
    for index in range(30):
        assert batch.token_ids(index).tolist() == [index, 1, 40]
        assert block_table_of(batch, index).tolist() == [index + 1]
    run(batch, [63] * 30, sequence_ids=tuple(range(30)), num_new_tokens=[1] * 30)
    work = run(batch, sequence_ids=tuple(range(30)), num_new_tokens=[1] * 30)
    assert work.layout.skipped_ids == tuple(range(4, 30, 5))
    batch.clear()
    assert len(batch) == 0
    assert 3 not in batch


def test_a_reused_row_remembers_nothing(batch: InputBatch) -> None:
    heavy = new(
        1, [1, 2, 3], [1], stop_token_ids=(50, 51, 52), min_tokens=1, sampling=SamplingParams(logit_bias={3: 1.0})
    )
    run(batch, [50], new_sequences=(heavy,), sequence_ids=(1,), num_new_tokens=[3])
    run(batch, finished_sequence_ids=(1,))
    for index in range(2, 6):
        work = run(batch, [50], new_sequences=(new(index, [1], [1]),), sequence_ids=(index,), num_new_tokens=[1])
        assert not batch.sample_rows(work.layout.sampled).columns["edits_logits"].any()
        assert run(batch, [50], sequence_ids=(index,), num_new_tokens=[1]).layout.skipped_ids == ()


def test_how_far_an_unknown_sequence_is_reads_as_zero(batch: InputBatch) -> None:
    run(batch, new_sequences=(new(5, [1, 2], [1]),), sequence_ids=(5,), num_new_tokens=[2])
    table = batch.progress_of((5, 6))
    assert table.tolist() == [(3, 2, 1, False), (0, 0, 0, False)]
    assert [batch.progress(5), batch.progress(6)] == [RowProgress(3, 2, 1), RowProgress()]
    assert batch.unknown({5, 6, 7}) == {6, 7}
    table["num_tokens"] = 99
    batch.progress(5).num_tokens = 99
    assert batch.progress(5) == RowProgress(3, 2, 1)


def test_tables_of_several_kv_groups_are_taken_apart() -> None:
    """Group 0 keeps all, group 1 what a query sees of 8 tokens; each block of 8 tokens has a block of each."""
    batch = InputBatch(replace(LIMITS, kv_windows=(0, 8)))
    one = new(7, list(range(20)), [1, 11, 2, 12, 3, 13])
    two = new(8, list(range(10)), [4, 14, 5, 15])
    both = {"sequence_ids": (7, 8), "num_new_tokens": [20, 10]}
    work = run(batch, new_sequences=(one, two), **both)
    assert work.block_tables.tolist() == [[1, 2, 3], [4, 5, 0], [11, 12, 13], [14, 15, 0]]
    assert work.block_tables.flags.c_contiguous
    # 20 tokens are computed: the next query sees from token 13 on; of the other from token 3 on.
    assert batch.filled_blocks() == [1, 2, 3, 4, 5, 12, 13, 14, 15]
    work = run(
        batch,
        sequence_ids=(8,),
        num_new_tokens=[1],
        appended_sequence_ids=(8, 8),
        appended_block_ids=ints(6, 16),
        replaced_tables=((7, ints(1, 0, 2, 12, 3, 13)),),
    )
    assert work.block_tables.tolist() == [[4, 5], [14, 15]]
    assert block_table_of(batch, 8).tolist() == [4, 14, 5, 15, 6, 16]
