"""Several sequences of one prompt: forks, shared blocks, copies, and ends of some of them."""

from __future__ import annotations

import pytest

from blockyard.contract.sampling import FinishReason
from scheduler_service.core.blocks.block_manager import BlockManager
from scheduler_service.core.cost import CostModel
from scheduler_service.core.sequence import Group
from scheduler_service.core.values import StepResult
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec, rows


def test_children_are_forked_with_the_last_piece() -> None:
    bench = Bench()
    bench.add(make_spec(prompt=6, n=3))
    step = bench.send()  # forks come before new sequences in a step: the last token waits for the next
    assert (rows(step), step.forks) == ({1: 5}, ())
    step = bench.send()
    assert rows(step) == {1: 1, 2: 0, 3: 0}
    assert [(fork.parent_id, fork.child_id, fork.sequence_index) for fork in step.forks] == [(1, 2, 1), (1, 3, 2)]
    assert {fork.block_ids for fork in step.forks} == {(1, 2)}
    assert not step.blocks_to_copy
    bench.run()
    bench.check_tokens()
    assert len(set(map(tuple, bench.tokens.values()))) == 3


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_first_writes_into_a_shared_block_make_one_copy_less_than_sequences(n: int) -> None:
    bench = Bench()
    bench.add(make_spec(prompt=6, n=n))
    bench.step()
    bench.step()
    step = bench.step()
    assert len(step.blocks_to_copy) == n - 1
    assert {pair.source for pair in step.blocks_to_copy} == {2}
    assert [sequence_id for sequence_id, _ in step.replaced_tables] == list(range(1, n))
    assert not step.appended_block_ids
    assert not bench.step().blocks_to_copy
    bench.run()
    bench.check_tokens()


def test_full_blocks_need_no_copy() -> None:
    bench = Bench()
    bench.add(make_spec(prompt=8, n=3))
    bench.step()
    bench.step()
    step = bench.step()
    assert not step.blocks_to_copy
    assert step.appended_sequence_ids == (1, 2, 3)
    bench.run()
    assert bench.scheduler.stats().num_copied_blocks_total == 0
    bench.check_tokens()


def test_a_prompt_of_one_token_is_announced_before_it_is_computed() -> None:
    bench = Bench()
    bench.add(make_spec(prompt=1, n=2))
    step = bench.send()
    assert len(step.new_sequences) == 1
    assert not step.sequence_ids
    assert rows(bench.send()) == {1: 1, 2: 0}
    bench.run()
    bench.check_tokens()


def test_the_prompt_is_counted_and_reported_once() -> None:
    bench = Bench()
    bench.add(make_spec(prompt=9, n=3))
    bench.run()
    assert bench.prefilled == {"r": 0}
    assert bench.scheduler.stats().num_prompt_tokens_total == 9


def test_a_group_waits_for_all_its_rows() -> None:
    """Else two groups could each hold the rows that the other one needs for its forks."""
    bench = Bench(configure(max_num_seqs=4))
    for name in "abcd":
        bench.add(make_spec(name, n=3))
    bench.step()
    assert bench.scheduler.stats().num_running == 1
    bench.step()
    assert bench.scheduler.stats().num_running == 3
    bench.run()
    bench.check_tokens()


def test_children_stand_beside_their_parent() -> None:
    bench = Bench()
    bench.add(make_spec("a", n=2))
    bench.add(make_spec("b"))
    bench.step()
    bench.step()
    assert [sequence.sequence_id for sequence in bench.scheduler._queues.running] == [1, 2, 3]


def test_some_end_and_the_others_go_on() -> None:
    bench = Bench()
    first = bench.add(make_spec(n=3, max_tokens=4, stop={7}))
    bench.step()
    bench.send()
    bench.take(StepResult(2, (1, 2, 3), (5, 7, 6)))
    assert bench.finished == {("r", 1): FinishReason.STOP}
    assert rows(bench.send()) == {first: 1, first + 2: 1}
    assert not bench.scheduler.abort("r", 1)
    assert bench.scheduler.abort("r", 2)
    assert bench.scheduler.has_unfinished()
    assert bench.scheduler.abort("r")
    assert not bench.scheduler.has_unfinished()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
@pytest.mark.parametrize("index", [0, 1])
def test_one_is_aborted_before_the_forks(index: int, num_steps: int) -> None:
    bench = Bench(configure(max_prefill_chunk=2))
    bench.add(make_spec("other", 1, 3))
    bench.add(make_spec(n=3))
    bench.add(make_spec("later", 1, 3))
    for _ in range(num_steps):
        bench.step()
    assert bench.scheduler.abort("r", index)
    waiting = [sequence.sequence_id for sequence in bench.scheduler._queues.waiting]
    assert waiting == [[1, 2 + (index == 0), 5], [] if index else [3], [] if index else [3]][num_steps]
    bench.run()
    bench.check_tokens()
    assert {name for name in bench.finished if name[0] == "r"} == {("r", i) for i in range(3) if i != index}


def test_a_group_is_aborted_before_the_forks() -> None:
    bench = Bench(configure(max_prefill_chunk=2))
    bench.add(make_spec(n=3))
    bench.step()
    bench.scheduler.abort("r")
    assert bench.step().finished_sequence_ids == (1,)  # the children were never named
    bench.check_done()


def test_a_fork_of_a_long_table_does_not_recurse() -> None:
    manager = BlockManager(configure(block_size=1, num_device_blocks=20_002), CostModel(1))
    group = Group(make_spec(prompt=tuple(range(20_000)), n=2), 1, 20_010, 0.0)
    parent, child = group.sequences
    assert manager.admit(parent, None, 0)  # type: ignore[arg-type]  # nothing is copied
    parent.num_scheduled = parent.num_computed = 20_000
    manager.fork(parent, child)
    manager.publish(parent)
    manager.free(parent)
    manager.free(child)
    assert manager.device.num_free == 20_001
