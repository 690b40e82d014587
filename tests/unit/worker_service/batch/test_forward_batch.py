"""What the input batch keeps from step to step: it is kept while nothing changes, and found anew when anything does."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from blockyard.contract.sampling import SamplingParams
from tests.unit.worker_service.rows import block_table_of
from worker_service.batch.input_batch import InputBatch
from worker_service.batch.rows import BatchLimits
from worker_service.step import Array, ForkedRow, NewRow, Step

if TYPE_CHECKING:
    from worker_service.batch.forward_batch import ForwardBatch

LIMITS = BatchLimits(max_model_len=64, max_num_seqs=3, block_size=4, vocab_size=100, max_num_batched_tokens=70)
GREEDY = SamplingParams(temperature=0.0)
STOP = 99


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def new(sequence_id: int, num_tokens: int = 2, sampling: SamplingParams = GREEDY, **fields: Any) -> NewRow:
    fields = {"sequence_index": 0, "prompt_length": num_tokens, "num_computed_tokens": 0} | fields
    fields = {
        "token_ids": np.arange(num_tokens),
        "block_ids": ints(sequence_id, 50),
        "stop_token_ids": (STOP,),
    } | fields
    return NewRow(sequence_id, sampling=sampling, **fields)


def plan(batch: InputBatch, work: dict[int, int], **fields: Any) -> ForwardBatch:
    """Applies and plans a step that computes so many tokens of each sequence."""
    asked = Step(1, 1, sequence_ids=tuple(work), num_new_tokens=ints(*work.values()), **fields)
    batch.apply(asked)
    return batch.make_forward_batch(asked)


def commit(batch: InputBatch, work: ForwardBatch, token_id: int = 7, failed: bool = False) -> None:
    count = len(work.layout.sampled)
    batch.commit(work, np.full(count, token_id), np.full(count, failed))


def decode(
    batch: InputBatch, *sequence_ids: int, token_id: int = 7, failed: bool = False, **fields: Any
) -> ForwardBatch:
    """Does a step of one token each."""
    work = plan(batch, dict.fromkeys(sequence_ids, 1), **fields)
    commit(batch, work, token_id, failed)
    return work


@pytest.fixture
def batch() -> InputBatch:
    """Sequences 1 and 2 decode; the prompt of 1 has two tokens, that of 2 three."""
    batch = InputBatch(LIMITS)
    commit(batch, plan(batch, {1: 2, 2: 3}, new_sequences=(new(1), new(2, 3))))
    return batch


def kept(work: ForwardBatch) -> tuple[Any, ...]:
    layout = work.layout
    return layout.rows, layout.num_new_tokens, layout.sampled, layout.beams, layout.computed_rows


def is_kept(before: ForwardBatch, after: ForwardBatch) -> bool:
    return all(one is other for one, other in zip(kept(before), kept(after), strict=True))


def test_steady_decodes_share_what_does_not_change(batch: InputBatch) -> None:
    first = decode(batch, 1, 2)
    second = decode(batch, 1, 2, token_id=8)
    third = decode(batch, 1, 2)
    assert is_kept(first, second)
    assert is_kept(first, third)
    assert [work.seq_lens.tolist() for work in (first, second, third)] == [[3, 4], [4, 5], [5, 6]]
    assert [work.token_ids.tolist() for work in (first, second, third)] == [[7, 7], [7, 7], [8, 8]]
    assert [work.block_tables.shape for work in (first, second, third)] == [(2, 1), (2, 2), (2, 2)]


def test_a_table_that_grows_or_is_replaced_is_seen_at_once(batch: InputBatch) -> None:
    first = decode(batch, 1, 2)
    grown = decode(batch, 1, 2, appended_sequence_ids=(2,), appended_block_ids=ints(33))
    replaced = decode(batch, 1, 2, replaced_tables=((1, ints(40, 41)), (2, ints(42, 43, 44))))
    assert is_kept(first, grown)
    assert is_kept(first, replaced)
    assert block_table_of(batch, 2).tolist() == [42, 43, 44]
    assert [work.block_tables[:, 0].tolist() for work in (first, grown, replaced)] == [[1, 2], [1, 2], [40, 42]]


def test_another_order_is_another_layout(batch: InputBatch) -> None:
    decode(batch, 1, 2)
    work = decode(batch, 2, 1)
    assert (work.layout.sampled.sequence_ids, work.seq_lens.tolist()) == ((2, 1), [5, 4])


def test_other_numbers_of_tokens_are_another_layout(batch: InputBatch) -> None:
    pieces = new(3, 9)
    first = plan(batch, {1: 1, 3: 4}, new_sequences=(pieces,))
    commit(batch, first)
    second = plan(batch, {1: 1, 3: 4})
    commit(batch, second)
    assert is_kept(first, second)
    assert second.token_ids.tolist() == [7, 4, 5, 6, 7]
    last = plan(batch, {1: 1, 3: 1})
    assert (last.layout.sampled.sequence_ids, last.token_ids.tolist()) == ((1, 3), [7, 8])


def test_the_same_numbers_sample_when_the_prompt_is_done(batch: InputBatch) -> None:
    first = plan(batch, {3: 2}, new_sequences=(new(3, 4),))
    commit(batch, first)
    assert first.layout.sampled.sequence_ids == ()
    second = plan(batch, {3: 2})
    assert (second.layout.sampled.sequence_ids, second.layout.sampled.last_hidden.tolist()) == ((3,), [1])


def test_a_row_that_ends_drops_out(batch: InputBatch) -> None:
    decode(batch, 1, 2)
    commit_of_one = plan(batch, {1: 1, 2: 1})
    batch.commit(commit_of_one, ints(STOP, 7), np.zeros(2, np.bool_))
    for _ in range(2):
        layout = decode(batch, 1, 2).layout
        ids = layout.skipped_ids, layout.sampled.sequence_ids
        assert (ids, layout.computed_rows.size) == (((1,), (2,)), 1)


def test_rows_that_fail_drop_out(batch: InputBatch) -> None:
    decode(batch, 1, 2)
    decode(batch, 1, 2, failed=True)
    work = decode(batch, 1, 2)
    assert (work.layout.skipped_ids, work.layout.rows.size, work.token_ids.size) == ((1, 2), 0, 0)


def test_a_sequence_that_was_finished_leaves_its_row_to_another(batch: InputBatch) -> None:
    first = decode(batch, 1, 2)
    other = new(3, 5, SamplingParams(seed=4), stop_token_ids=())
    work = plan(batch, {3: 5, 2: 1}, finished_sequence_ids=(1,), new_sequences=(other,))
    commit(batch, work, token_id=STOP)
    assert work.layout.rows.tolist() == first.layout.rows.tolist()
    assert work.layout.sampled.columns["seed"].tolist() == [4, 0]
    assert decode(batch, 3, 2).layout.skipped_ids == (2,)


def test_a_preempted_sequence_starts_anew_under_its_id(batch: InputBatch) -> None:
    decode(batch, 1, 2)
    again = new(1, 4, prompt_length=2, token_ids=ints(0, 1, 7, 7), block_ids=ints(60), min_tokens=4)
    commit(batch, plan(batch, {1: 4, 2: 1}, finished_sequence_ids=(1,), new_sequences=(again,)), token_id=STOP)
    work = decode(batch, 1, 2, token_id=STOP)
    assert (work.layout.skipped_ids, work.token_ids.tolist(), work.block_tables[0, 0]) == ((2,), [STOP], 60)
    assert decode(batch, 1, 2, token_id=STOP).layout.skipped_ids == (2,)
    assert decode(batch, 1, 2).layout.skipped_ids == (1, 2)


def test_a_preempted_sequence_that_finds_its_blocks_again_is_no_steady_decode(batch: InputBatch) -> None:
    penalized = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    commit(batch, plan(batch, {3: 2}, new_sequences=(new(3, sampling=penalized),)))
    before = decode(batch, 3)
    again = new(3, 4, penalized, prompt_length=2, token_ids=ints(0, 1, 7, 7), num_computed_tokens=3)
    after = decode(batch, 3, token_id=9, finished_sequence_ids=(3,), new_sequences=(again,))
    assert after.layout.rows.tolist() == before.layout.rows.tolist()
    assert not is_kept(before, after)
    ((_, counts),) = decode(batch, 3, token_id=8).layout.sampled.followers
    assert dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True)) == {
        0: 0, 1: 0, 7: 2, 8: 1, 9: 1
    }  # fmt: skip


def test_a_fork_takes_a_row_and_its_own_counts(batch: InputBatch) -> None:
    penalized = new(3, sampling=SamplingParams(temperature=0.0, frequency_penalty=1.0))
    commit(batch, plan(batch, {3: 2}, new_sequences=(penalized,)))
    before = decode(batch, 3)
    work = plan(batch, {3: 1, 4: 0}, forks=(ForkedRow(3, 4, 1, ints(3, 51)),))
    batch.commit(work, ints(20, 21), np.zeros(2, np.bool_))
    assert work.layout.sampled.sequence_ids == (3, 4)
    assert work.layout.sampled.columns["sequence_index"].tolist() == [0, 1]
    both = decode(batch, 3, 4)
    assert not is_kept(before, both)
    counts = [counts for _, counts in both.layout.sampled.followers]
    outputs = [dict(zip(c.token_ids.tolist(), c.output_counts.tolist(), strict=True)) for c in counts]
    assert outputs == [{0: 0, 1: 0, 7: 3, 20: 1}, {0: 0, 1: 0, 7: 3, 21: 1}]


def test_more_rows_than_expected_disturb_nobody(batch: InputBatch) -> None:
    before = decode(batch, 1, 2)
    others = tuple(map(new, range(3, 20)))
    commit(batch, plan(batch, {one.sequence_id: 2 for one in others}, new_sequences=others))
    work = decode(batch, 1, 2)
    assert (work.layout.rows.tolist(), work.seq_lens.tolist()) == (before.layout.rows.tolist(), [4, 5])
    assert batch.token_ids(1).tolist() == [0, 1, 7, 7, 7]


def test_an_epoch_that_uses_the_same_ids_finds_nothing_of_the_last(batch: InputBatch) -> None:
    decode(batch, 1, 2)
    batch.clear()
    assert batch.unknown({1, 2}) == {1, 2}
    assert batch.progress_of((1, 2))["num_tokens"].tolist() == [0, 0]
    work = plan(batch, {1: 1, 2: 1}, new_sequences=(new(1, 1), new(2, 1, token_ids=ints(5))))
    assert (work.token_ids.tolist(), work.seq_lens.tolist()) == ([0, 5], [1, 1])


def test_a_query_in_between_changes_nothing(batch: InputBatch) -> None:
    first = decode(batch, 1, 2)
    batch.progress_of((2, 77))
    second = decode(batch, 1, 2)
    assert second.layout.rows.tolist() == first.layout.rows.tolist()
    assert second.seq_lens.tolist() == [4, 5]


def test_arrays_are_as_the_forward_pass_takes_them(batch: InputBatch) -> None:
    work = plan(batch, {2: 1, 3: 6, 1: 1}, new_sequences=(new(3, 6),))
    layout = work.layout
    columns = (layout.rows, layout.num_new_tokens, work.seq_lens, work.token_ids, layout.sampled.last_hidden)
    assert all(column.dtype == np.int64 and column.flags.c_contiguous for column in columns)
    assert work.block_tables.dtype == np.int32
    assert work.block_tables.flags.c_contiguous


SAMPLINGS = (
    GREEDY,
    SamplingParams(seed=3, top_k=5, logprobs=2),
    SamplingParams(temperature=0.0, frequency_penalty=0.5, prompt_logprobs=1),
    SamplingParams(seed=5, bad_token_sequences=((7,), (7, 8))),
)


class Traffic:
    """Random steps by the rules: sequences come, go, start anew, fork, wait, and have their tables changed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lengths: dict[int, int] = {}
        self.missing: dict[int, int] = {}
        self.next_id = 0

    def step(self) -> Step:
        fields: dict[str, Any] = {}
        living = list(self.lengths)
        chance = self.random.random
        if living and chance() < 0.2:
            gone = self.random.choice(living)
            fields["finished_sequence_ids"] = (gone,)
            fields["new_sequences"] = (self.start(gone, num_missing=1),)
            if chance() < 0.6:
                del self.lengths[gone], self.missing[gone], fields["new_sequences"]
        if len(self.lengths) < 6 and (chance() < 0.3 or not self.lengths):
            fields["new_sequences"] = (*fields.get("new_sequences", ()), self.start(self.take_id()))
        work = {i: self.piece(i) for i in self.lengths if chance() < 0.95}
        parents = [i for i in work if self.missing[i] == 0 and i in living and i in self.lengths]
        if parents and chance() < 0.15:
            child, parent = self.take_id(), self.random.choice(parents)
            fields["forks"] = (ForkedRow(parent, child, 1, ints(1, 2)),)
            self.lengths[child], self.missing[child], work[child] = self.lengths[parent], 0, 0
        if chance() < 0.3:
            fields["replaced_tables"] = ((self.random.choice(list(self.lengths)), ints(*range(20, 37))),)
        return Step(1, 1, sequence_ids=tuple(work), num_new_tokens=ints(*work.values()), **fields)

    def take_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def start(self, sequence_id: int, num_missing: int | None = None) -> NewRow:
        """Starts a sequence, or starts it anew with all but some of its tokens found."""
        length = self.random.randint(1, 9)
        missing = length if num_missing is None else num_missing
        self.lengths[sequence_id], self.missing[sequence_id] = length, missing
        sampling, blocks = self.random.choice(SAMPLINGS), np.arange(1, 17)
        return new(sequence_id, length, sampling, num_computed_tokens=length - missing, block_ids=blocks)

    def piece(self, sequence_id: int) -> int:
        count = self.random.randint(1, min(3, max(1, self.missing[sequence_id])))
        self.missing[sequence_id] = max(0, self.missing[sequence_id] - count)
        return count

    def tokens(self, work: ForwardBatch) -> Array:
        return ints(*(self.random.choice((7, 8, 9, 10, STOP)) for _ in range(len(work.layout.sampled))))


def told(batch: InputBatch, work: ForwardBatch) -> list[Any]:
    """All that others see of what a step computes."""
    columns = (work.layout.rows, work.layout.num_new_tokens, work.seq_lens, work.block_tables, work.token_ids)
    settled = dict(zip(work.layout.computed_rows.tolist(), work.computed_lengths.tolist(), strict=True))
    prompts = [(p.sequence_id, p.first_position, p.token_ids.tolist(), p.first_hidden) for p in work.prompts]
    asked = batch.sample_rows(work.layout.sampled)
    outputs = {place: output.tolist() for place, output in asked.outputs.items()}
    counts = [(c.token_ids.tolist(), c.output_counts.tolist()) for x in asked.lists if (c := x.counts)]
    rows = (work.layout.sampled.sequence_ids, work.layout.sampled.last_hidden.tolist(), work.layout.skipped_ids)
    return [
        *(column.tolist() for column in columns), settled, prompts, rows,
        asked.columns.tolist(), asked.positions.tolist(), outputs, counts, work.layout.sampled.is_plain_greedy,
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_is_what_would_be_found(seed: int) -> None:
    """Of two batches with the same traffic, one is asked for somebody else before each step, and so finds all anew."""
    traffic, keeping, forgetting = Traffic(seed), InputBatch(LIMITS), InputBatch(LIMITS)
    for _ in range(60):
        asked = traffic.step()
        keeping.apply(asked)
        forgetting.apply(asked)
        forgetting.progress_of((-1,))
        works = keeping.make_forward_batch(asked), forgetting.make_forward_batch(asked)
        assert told(keeping, works[0]) == told(forgetting, works[1])
        tokens, failed = traffic.tokens(works[0]), np.zeros(len(works[0].layout.sampled), np.bool_)
        for batch, work in zip((keeping, forgetting), works, strict=True):
            batch.commit(work, tokens, failed)
    for sequence_id in traffic.lengths:
        assert keeping.token_ids(sequence_id).tolist() == forgetting.token_ids(sequence_id).tolist()
        assert keeping.progress(sequence_id) == forgetting.progress(sequence_id)
