"""Fixed blocks: a sequence has its own from its beginning to its end, and a child begins with its parent's content."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from blockyard.contract.sampling import BeamSearch
from scheduler_service.core.blocks.fixed import FixedBlocks
from scheduler_service.core.config import KvBlockGroups, NeverFits, Room, StepMismatch
from scheduler_service.core.cost import CostModel
from scheduler_service.core.sequence import SequenceStatus
from scheduler_service.core.step import StepBuilder
from scheduler_service.core.values import BlockPair
from tests.kit.oracles.model_worker import StepRefused
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec
from tests.unit.scheduler_service.core.test_random_traces import StateTraces


def make_bench(num_state_blocks: int = 2, **changes: object) -> Bench:
    return Bench(configure(num_state_blocks=num_state_blocks, **changes))


def finish(bench: Bench) -> None:
    bench.run()
    bench.check_tokens()


def find(bench: Bench, sequence_id: int):
    return next(each for each in bench.scheduler._queues.running if each.sequence_id == sequence_id)


def test_a_sequence_has_its_fixed_blocks_from_its_beginning_to_its_end():
    bench = make_bench()
    bench.add(make_spec("a", 6, 9))
    (new,) = bench.step().new_sequences
    assert len(new.fixed_block_ids) == 2
    assert not set(new.fixed_block_ids) & set(new.block_ids)
    while bench.scheduler.has_unfinished():
        step = bench.step()
        assert not step.replaced_fixed_tables
        if bench.scheduler.has_unfinished():
            assert find(bench, 1).fixed_ids == list(new.fixed_block_ids)
    finish(bench)


def test_a_model_without_states_has_none():
    bench = Bench()
    bench.add(make_spec("a", 6, 9, n=2))
    bench.run()
    assert not any(new.fixed_block_ids for step in bench.steps for new in step.new_sequences)
    assert not any(fork.fixed_block_ids for step in bench.steps for fork in step.forks)


def test_a_child_gets_its_copy_in_the_step_after_the_fork():
    """Only then is the parent's state complete."""
    bench = make_bench()
    bench.add(make_spec("a", 6, 5, n=2))
    bench.step()
    fork = bench.step()
    (new,), (child,) = bench.steps[0].new_sequences, fork.forks
    assert not fork.blocks_to_copy
    after = bench.step()
    wanted = [BlockPair(*pair) for pair in zip(new.fixed_block_ids, child.fixed_block_ids, strict=True)]
    assert set(wanted) <= set(after.blocks_to_copy)
    finish(bench)


def test_a_beam_gets_its_copy_in_the_step_of_the_fork():
    bench = make_bench()
    bench.add(make_spec("a", 6, 5, beams=BeamSearch(2)))
    while not (step := bench.step()).forks:
        pass
    (fork,) = step.forks
    assert {pair.destination for pair in step.blocks_to_copy} >= set(fork.fixed_block_ids)
    finish(bench)


def test_a_parents_blocks_stay_held_until_they_are_copied():
    """The parent ends right after the fork. Blocks of its state are a child's source, and nobody gets them before."""
    bench = make_bench(num_device_blocks=12, preemption_mode="swap")
    first = bench.add(make_spec("a", 6, 5, n=2))
    bench.step()
    bench.step()
    sources = find(bench, first).fixed_ids.copy()
    bench.scheduler.abort("a", 0)
    device = bench.scheduler._blocks.device
    assert [device.references[block] for block in sources] == [1, 1]
    bench.add(make_spec("b", 4, 3))
    step = bench.step()
    assert {pair.source for pair in step.blocks_to_copy} >= set(sources)
    (new,) = step.new_sequences
    assert not {*new.fixed_block_ids, *new.block_ids} & set(sources)
    bench.run()
    for name in (("a", 1), ("b", 0)):
        assert bench.tokens[name] == bench.generate_alone(*name)


def test_a_child_that_ends_before_its_copy_needs_none():
    bench = make_bench()
    bench.add(make_spec("a", 6, 5, n=2))
    bench.step()
    bench.step()
    bench.scheduler.abort("a", 1)
    step = bench.step()
    assert not step.blocks_to_copy
    bench.run()
    assert bench.tokens["a", 0] == bench.generate_alone("a", 0)


def test_a_child_that_is_preempted_before_its_copy_starts_over():
    """The host could not be given what the blocks do not hold yet."""
    bench = make_bench(preemption_mode="swap")
    first = bench.add(make_spec("a", 6, 5, n=2))
    bench.step()
    bench.step()
    scheduler, child = bench.scheduler, find(bench, first + 1)
    builder = StepBuilder(len(bench.steps) + 1, 64)
    assert not scheduler._blocks.swap_out(child, builder)
    scheduler._planner.preemption.preempt(child, builder)
    assert child.status is SequenceStatus.WAITING
    assert not child.fixed_ids
    scheduler.check_integrity()
    finish(bench)


def swap_crowd() -> Bench:
    """Two sequences decode in so few blocks that the second is swapped out."""
    bench = make_bench(num_device_blocks=9, preemption_mode="swap")
    bench.add(make_spec("a", 7, 6))
    bench.add(make_spec("b", 4, 6))
    bench.step()
    while not bench.steps[-1].blocks_to_swap_out:
        bench.step()
    return bench


def test_a_swap_takes_the_fixed_blocks_along():
    bench = swap_crowd()
    (swapped,) = bench.scheduler._queues.swapped
    assert (len(swapped.fixed_ids), len(swapped.fixed_host)) == (0, 2)
    assert set(swapped.fixed_host) <= {pair.destination for pair in bench.steps[-1].blocks_to_swap_out}
    before = swapped.fixed_host.copy()
    while not bench.steps[-1].blocks_to_swap_in:
        bench.step()
    back = {pair.source: pair.destination for pair in bench.steps[-1].blocks_to_swap_in}
    assert bench.steps[-1].replaced_fixed_tables == ((swapped.sequence_id, tuple(back[block] for block in before)),)
    finish(bench)


def test_a_swapped_sequence_that_ends_gives_its_host_blocks_back():
    bench = swap_crowd()
    bench.scheduler.abort("b")
    bench.run()


def test_a_child_without_room_is_prefilled_by_itself():
    bench = make_bench(num_state_blocks=3, num_device_blocks=8)
    bench.add(make_spec("a", 6, 4, n=2))
    bench.run()
    bench.check_tokens()
    assert [len(step.new_sequences) for step in bench.steps if step.new_sequences] == [1, 1]
    assert not any(step.forks for step in bench.steps)


def test_the_prompt_of_such_children_is_reported_once_even_if_the_leader_ends_first():
    bench = make_bench(num_state_blocks=3, num_device_blocks=8)
    bench.add(make_spec("a", 6, 4, n=2))
    bench.step()
    bench.send()
    bench.scheduler.abort("a", 0)
    bench.run()
    assert bench.tokens["a", 1] == bench.generate_alone("a", 1)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_model_may_have_no_attention(mode: str, n: int):
    bench = make_bench(kv_windows=(), num_device_blocks=8, preemption_mode=mode)
    for name in "abcd":
        bench.add(make_spec(name, 6, 5, n=n))
    bench.add(make_spec("beams", 6, 5, beams=BeamSearch(2)))
    finish(bench)
    assert not any(new.block_ids for step in bench.steps for new in step.new_sequences)


def test_states_are_not_found_by_a_prefix():
    bench = make_bench()
    for name in "ab":
        bench.add(make_spec(name, tuple(range(20)), 3))
        finish(bench)
    assert bench.prefilled == {"a": 0, "b": 0}


def test_fixed_blocks_count_where_requests_are_measured():
    config = configure(num_device_blocks=11, num_state_blocks=3)
    assert config.max_tokens == 7 * 4 + 1
    assert configure(num_device_blocks=3, num_state_blocks=3).max_tokens == 1
    with pytest.raises(NeverFits, match="29 that a worker holds"):
        config.fit(make_spec("a", 20, 10))
    groups = KvBlockGroups(4, (0,), num_state_blocks=3)
    assert (groups.count_blocks(9), groups.count_tokens(10), groups.count_tokens(2)) == (6, 28, 0)
    assert KvBlockGroups(4, (), num_state_blocks=3).count_tokens(3) is None
    # One request with two sequences: two states, three blocks of tokens, and the next block of each.
    assert Room(64, 8, 2 * 3 + 3 + 2, groups).fits(9, 2)
    assert not Room(64, 8, 2 * 3 + 3 + 1, groups).fits(9, 2)


def test_a_swap_costs_the_fixed_blocks_too():
    costs = CostModel(4, 1, 20)
    assert costs.preempt_seconds(4) == costs.recompute_seconds(4)
    assert CostModel(4, 0, 20).preempt_seconds(4) > 0
    assert costs.preempt_seconds(1000) < costs.recompute_seconds(1000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_state_blocks": -1},
        {"whole_prompts": True},
        {"max_draft_tokens": 2},
        {"num_state_blocks": 0, "kv_windows": ()},
    ],
)
def test_what_does_not_go_together_is_refused(wrong: dict[str, object]):
    with pytest.raises(ValueError, match="out of range"):
        configure(**{"num_state_blocks": 2} | wrong)


def copy_nothing(self: FixedBlocks, parent, child) -> None:
    self.take(child)


def copy_at_once(self: FixedBlocks, step) -> None:
    for child in list(self._copies):
        copy = self._copies.pop(child)
        step.copies += copy.pairs
        self._release_sources(copy)


def swap_nothing_in(self: FixedBlocks, sequence, step) -> None:
    self.take(sequence)
    self._tier.hand_over(sequence.fixed_host)
    sequence.fixed_host = []
    step.replaced_fixed[sequence.sequence_id] = sequence


def release_twice(self: FixedBlocks, sequence) -> None:
    for block in sequence.fixed_ids * 2:
        self._device.release(block)
    sequence.fixed_ids, sequence.fixed_host = [], []


MUTATIONS = {
    "a fork without a copy": ("fork", copy_nothing),
    "a copy in the step of the fork": ("settle", copy_at_once),
    "a state that stays on the host": ("swap_in", swap_nothing_in),
    "blocks that are released twice": ("free", release_twice),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_random_traces_find(monkeypatch: pytest.MonkeyPatch, name: str):
    """Each mistake is found by the traces that the core passes."""
    monkeypatch.setattr(FixedBlocks, *MUTATIONS[name])
    limits = settings(
        StateTraces.TestCase.settings,
        max_examples=1000,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    # A trace ends with all answers; where a step was refused, the next one's is not expected.
    with pytest.raises((AssertionError, StepRefused, StepMismatch)):
        run_state_machine_as_test(StateTraces, settings=limits)
