"""The model worker bites: each rule of a step, broken, is seen. That is what its consent is worth elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from scheduler_service.core.values import BlockPair, Fork, NewSequence, SchedulerOutput
from tests.kit.oracles.model_worker import ModelWorker, StepRefused, generate_alone
from tests.unit.scheduler_service.core.harness import VOCAB_SIZE, make_spec

SPEC = make_spec(prompt=(1, 2, 3, 4, 5, 6), max_tokens=9)
NEW = NewSequence(1, 0, SPEC.prompt_token_ids, 6, 0, (1, 2), SPEC)
OTHER = replace(NEW, sequence_id=2, block_ids=(3, 4))
FIRST = SchedulerOutput(1, new_sequences=(NEW,), sequence_ids=(1,), num_new_tokens=(6,))


def make_worker(*steps: SchedulerOutput) -> ModelWorker:
    worker = ModelWorker(4, 8, 4, vocab_size=VOCAB_SIZE)
    for step in steps:
        worker.execute(step)
    return worker


def decode(step_id: int = 2, **changes: Any) -> SchedulerOutput:
    return SchedulerOutput(step_id, sequence_ids=(1,), num_new_tokens=(1,))._replace(**changes)


def test_it_samples_what_running_alone_gives() -> None:
    worker = make_worker()
    token_ids = [*worker.execute(FIRST).token_ids, *worker.execute(decode()).token_ids]
    assert token_ids == generate_alone(SPEC, 0, max_model_len=99, vocab_size=VOCAB_SIZE)[:2]


def test_pieces_give_the_same_token() -> None:
    worker = make_worker(FIRST._replace(num_new_tokens=(2,)))
    result = worker.execute(decode(num_new_tokens=(4,)))
    assert result.token_ids == make_worker().execute(FIRST).token_ids


def test_after_a_stop_token_rows_are_skipped() -> None:
    spec = replace(SPEC, stop_token_ids=frozenset(range(VOCAB_SIZE)))
    worker = make_worker(FIRST._replace(new_sequences=(replace(NEW, spec=spec),)))
    before = list(worker.device)
    result = worker.execute(decode())
    assert (result.sequence_ids, result.skipped_sequence_ids) == ((), (1,))
    assert worker.device == before


def test_min_tokens_masks_stop_tokens() -> None:
    stop = frozenset(range(1, VOCAB_SIZE))
    spec = replace(SPEC, stop_token_ids=stop, min_tokens=3)
    assert generate_alone(spec, 0, max_model_len=99, vocab_size=VOCAB_SIZE)[:3] == [0, 0, 0]


def test_a_restart_is_finished_and_new() -> None:
    worker = make_worker(FIRST)
    worker.execute(SchedulerOutput(2, new_sequences=(NEW,), finished_sequence_ids=(1, 1, 99)))
    assert worker.rows[1].num_computed == 0


def test_what_is_swapped_out_comes_back() -> None:
    worker = make_worker(
        FIRST,
        SchedulerOutput(2, blocks_to_swap_out=(BlockPair(1, 0), BlockPair(2, 1))),
        SchedulerOutput(3, new_sequences=(replace(OTHER, block_ids=(1, 2)),), sequence_ids=(2,), num_new_tokens=(6,)),
    )
    back = (BlockPair(0, 5), BlockPair(1, 6))
    worker.execute(decode(4, blocks_to_swap_in=back, replaced_tables=((1, (5, 6)),)))
    with pytest.raises(StepRefused, match="another's KV"):
        worker.execute(decode(5, replaced_tables=((1, (1, 2)),)))


FORK = Fork(1, 7, 1, (1, 2))

BROKEN = {
    "a gap": decode(3),
    "row columns": decode(num_new_tokens=()),
    "table columns": decode(appended_sequence_ids=(1,)),
    "a row twice": decode(sequence_ids=(1, 1), num_new_tokens=(1, 1)),
    "new twice": decode(new_sequences=(OTHER, OTHER)),
    "a child twice": decode(forks=(FORK, FORK)),
    "an unknown row": decode(sequence_ids=(9,)),
    "an unknown parent": decode(forks=(replace(FORK, parent_id=9),)),
    "a known child": decode(forks=(replace(FORK, child_id=1),)),
    "a child elsewhere": decode(forks=(replace(FORK, block_ids=(1, 3)),)),
    "a known new one": decode(new_sequences=(NEW,)),
    "nothing to compute": decode(new_sequences=(replace(OTHER, num_computed_tokens=6),)),
    "no prompt": decode(new_sequences=(replace(OTHER, prompt_length=0),)),
    "a table replaced and grown": decode(
        replaced_tables=((1, (1, 2)),), appended_sequence_ids=(1,), appended_block_ids=(5,)
    ),
    "block 0": decode(appended_sequence_ids=(1,), appended_block_ids=(0,)),
    "a block that is not there": decode(replaced_tables=((1, (1, 8)),)),
    "a new block that is not there": decode(new_sequences=(replace(OTHER, block_ids=(3, 9)),)),
    "a host block that is not there": decode(blocks_to_swap_out=(BlockPair(3, 4),)),
    "two into one": decode(blocks_to_copy=(BlockPair(1, 5), BlockPair(2, 5))),
    "a chain of copies": decode(blocks_to_copy=(BlockPair(1, 5), BlockPair(5, 6))),
    "a host block read and written": decode(
        blocks_to_swap_out=(BlockPair(1, 0),), blocks_to_swap_in=(BlockPair(0, 5),)
    ),
    "swapped in and copied over": decode(blocks_to_swap_in=(BlockPair(0, 5),), blocks_to_copy=(BlockPair(1, 5),)),
    "more than is known": decode(num_new_tokens=(2,)),
    "nothing without a parent": decode(num_new_tokens=(0,)),
    "a child of one at rest": decode(forks=(FORK,), sequence_ids=(7,), num_new_tokens=(0,)),
    "another's content": decode(replaced_tables=((1, (3, 2)),)),
    "beyond the table": decode(replaced_tables=((1, (1,)),)),
    "a copy over what is read": decode(blocks_to_copy=(BlockPair(2, 1),)),
    "two writers": decode(forks=(FORK,), sequence_ids=(1, 7), num_new_tokens=(1, 1)),
    "a write over another's prefix": decode(
        new_sequences=(replace(OTHER, token_ids=(9, 9, 9), prompt_length=3, block_ids=(1,)),),
        sequence_ids=(1, 2),
        num_new_tokens=(1, 3),
    ),
    "a parent without logits": decode(
        new_sequences=(OTHER,),
        forks=(FORK,),
        sequence_ids=(1, 7),
        num_new_tokens=(1, 0),
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_rule_is_seen(what: str) -> None:
    worker = make_worker(FIRST)
    if what == "a parent without logits":
        worker = make_worker(FIRST._replace(num_new_tokens=(2,)))
    with pytest.raises(StepRefused):
        worker.execute(BROKEN[what])


def test_what_is_not_broken_is_accepted() -> None:
    worker = make_worker(FIRST._replace(num_new_tokens=(5,)))
    result = worker.execute(decode(forks=(FORK,), sequence_ids=(1, 7), num_new_tokens=(1, 0)))
    assert len(result.token_ids) == 2
    copy = decode(
        3,
        sequence_ids=(1, 7),
        num_new_tokens=(1, 1),
        blocks_to_copy=(BlockPair(2, 5),),
        replaced_tables=((1, (1, 5)),),
    )
    worker.execute(copy)
