"""The host's memory as the second tier of the prefix cache: what goes there, what comes back, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_service.core.blocks.block_manager import BlockManager
from scheduler_service.core.blocks.host_tier import HostTier
from scheduler_service.core.blocks.prefix_lookup import hash_block
from scheduler_service.core.cost import CostModel, StepWork
from scheduler_service.core.sequence import Group, Sequence
from scheduler_service.core.step import StepBuilder
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec

PROMPT = tuple(range(3, 15))  # three blocks
OTHER = (*range(20, 32), *range(12))  # six blocks


def finish(bench: Bench, request_id: str, prompt: tuple[int, ...] = PROMPT) -> None:
    bench.add(make_spec(request_id, prompt, 1))
    bench.run()
    bench.check_cached()


def make_bench(**changes: Any) -> Bench:
    """Its device holds seven blocks: PROMPT and OTHER do not fit both."""
    return Bench(configure(**{"num_device_blocks": 8, **changes}))


def test_what_is_evicted_comes_back() -> None:
    bench = make_bench()
    finish(bench, "first")
    finish(bench, "filler", OTHER)
    evicting = next(step for step in bench.steps if step.blocks_to_swap_out)
    assert len(evicting.blocks_to_swap_out) == 2  # of seven blocks one was unused
    assert set(evicting.new_sequences[0].block_ids) >= {pair.source for pair in evicting.blocks_to_swap_out}
    finish(bench, "second")
    assert bench.prefilled["second"] == 11  # the last token is computed again
    back = next(step for step in bench.steps if step.blocks_to_swap_in)
    assert {pair.source for pair in back.blocks_to_swap_in} == {
        pair.destination for pair in evicting.blocks_to_swap_out
    }
    bench.check_tokens()


def test_a_prompt_of_which_the_last_block_comes_from_the_host_needs_no_copy() -> None:
    bench = make_bench()
    finish(bench, "first")
    finish(bench, "filler", OTHER)
    bench.add(make_spec("second", PROMPT, 4))
    step = bench.send()
    assert step.new_sequences[0].num_computed_tokens == 11
    assert step.new_sequences[0].block_ids[1:] == tuple(pair.destination for pair in step.blocks_to_swap_in)
    assert not step.blocks_to_copy
    assert not bench.scheduler._blocks.device.is_published(step.new_sequences[0].block_ids[2])  # it is written into
    bench.run()
    bench.check_tokens()


def test_a_prompt_of_which_only_a_deeper_block_comes_from_the_host_copies_nothing_either() -> None:
    bench = make_bench()
    finish(bench, "first")
    finish(bench, "filler", OTHER)
    bench.add(make_spec("longer", (*PROMPT, 1, 2, 3), 4))
    step = bench.send()
    assert step.new_sequences[0].num_computed_tokens == 12
    assert len(step.blocks_to_swap_in) == 2
    device = bench.scheduler._blocks.device
    assert all(device.is_published(pair.destination) for pair in step.blocks_to_swap_in)
    bench.run()
    bench.check_tokens()


def test_what_came_back_is_shared_in_the_same_step() -> None:
    bench = make_bench(num_device_blocks=10)
    finish(bench, "first")
    finish(bench, "filler", (*OTHER, *range(12)))
    bench.add(make_spec("second", (*PROMPT, 1), 3))
    bench.add(make_spec("third", (*PROMPT, 2), 3))
    step = bench.send()
    second, third = step.new_sequences
    assert second.block_ids[:3] == third.block_ids[:3]
    assert len({pair.source for pair in step.blocks_to_swap_in}) == len(step.blocks_to_swap_in) == 3
    bench.run()
    bench.check_tokens()


def test_it_stays_on_the_host_and_is_not_copied_there_again() -> None:
    bench = make_bench()
    finish(bench, "first")
    finish(bench, "filler", OTHER)
    finish(bench, "second")
    num_moved = bench.scheduler.stats().num_swapped_out_blocks_total
    finish(bench, "filler again", tuple(reversed(OTHER)))
    moved = bench.scheduler.stats().num_swapped_out_blocks_total - num_moved
    assert moved == 4  # what was left of the first filler; the prompt's blocks are there
    finish(bench, "third")
    assert bench.prefilled["third"] == 11
    bench.check_tokens()


def test_swapping_that_is_dearer_than_computing_is_left() -> None:
    bench = make_bench()
    costs = bench.scheduler._costs
    costs.note_step(StepWork(0, 0, 1), 0.0, 60.0)
    finish(bench, "first")
    finish(bench, "filler", OTHER)
    finish(bench, "second")
    assert bench.scheduler.stats().num_swapped_out_blocks_total == 0
    assert bench.prefilled["second"] == 4


def test_slow_first_copies_do_not_end_it() -> None:
    """Memory that is written for the first time is slow once."""
    bench = make_bench()
    bench.times = (1e-3, 60.0)
    finish(bench, "first")
    finish(bench, "filler", OTHER)
    bench.times = (1e-3, 1e-5)
    finish(bench, "second")
    assert bench.prefilled["second"] == 11
    bench.check_tokens()


def test_copies_that_were_slow_are_tried_again() -> None:
    bench = make_bench()
    for name in ("first", "second"):  # the second time the host has all
        finish(bench, name)
        finish(bench, f"filler behind the {name}", OTHER)
    bench.times = (1e-3, 6.0)
    finish(bench, "slow")
    bench.times = (1e-3, 1e-5)
    for name, now in (("soon", 60.0), ("later", 3600.0)):
        bench.now = now
        finish(bench, f"filler {name}", OTHER)
        finish(bench, name)
    assert (bench.prefilled["soon"], bench.prefilled["later"]) == (4, 11)
    bench.check_tokens()


@pytest.mark.parametrize("off", [{"enable_host_prefix_cache": False}, {"num_host_blocks": 0}])
def test_without_it_nothing_goes_to_the_host(off: dict[str, Any]) -> None:
    bench = make_bench(**off)
    finish(bench, "first")
    finish(bench, "filler", OTHER)
    finish(bench, "second")
    assert bench.prefilled["second"] == 4
    assert bench.scheduler.stats().num_swapped_out_blocks_total == 0


def test_the_loss_of_a_worker_empties_it() -> None:
    bench = make_bench()
    finish(bench, "first")
    finish(bench, "filler", OTHER)
    bench.lose_worker()
    finish(bench, "second")
    assert bench.prefilled["second"] == 0
    bench.check_tokens()


def test_a_victim_that_starts_over_finds_what_was_evicted_of_it() -> None:
    """So that recomputing is hardly dearer than a swap while the host has room."""
    bench = Bench(configure(num_device_blocks=9, preemption_mode="recompute", max_prefill_chunk=16))
    bench.add(make_spec("a", 15, 12))
    bench.add(make_spec("b", 12, 6))
    bench.run()
    assert bench.scheduler.stats().num_preemptions_total > 0
    restart = [new for step in bench.steps for new in step.new_sequences if new.sequence_id == 2][1]
    assert restart.num_computed_tokens >= 12
    assert bench.scheduler.stats().num_swapped_in_blocks_total > 0
    bench.check_tokens()


# What the manager promises whatever a planner does


class Manager:
    """A block manager with blocks of two tokens, by hand."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int) -> None:
        sizes = {"num_device_blocks": num_device_blocks, "num_host_blocks": num_host_blocks}
        self.blocks = BlockManager(configure(block_size=2, **sizes), CostModel(2))

    def admit(self, prompt: tuple[int, ...], step: StepBuilder, num_computed: int | None = None) -> Sequence:
        """A sequence with its blocks, of which so much is computed; all if it is not said."""
        sequence = Group(make_spec(prompt=prompt, max_tokens=8), 1, len(prompt) + 8, 0.0).sequences[0]
        assert self.blocks.admit(sequence, step, 0)
        sequence.num_scheduled = sequence.num_computed = len(prompt) if num_computed is None else num_computed
        sequence.is_prefilling = False
        self.blocks.publish(sequence)
        return sequence

    def leave(self, *prompts: tuple[int, ...]) -> StepBuilder:
        """Contents that nobody holds, each from a step of its own; returns the last."""
        step = StepBuilder(1, 99)
        for prompt in prompts:
            step = StepBuilder(1, 99)
            self.blocks.free(self.admit(prompt, step))
            self.blocks.settle(step)
        return step

    def order_on_host(self, *names: bytes) -> list[bytes]:
        """Those of these contents that are found there, the next one to be evicted first."""
        pool = self.blocks.host
        found = {pool.find(name): name for name in names}
        return [found[block] for block in pool._evictable if block in found]

    def on_host(self, *contents: tuple[int, ...]) -> list[bool]:
        """Which of these are found there."""
        return [self.blocks.host.find(hash_block(b"", content)) is not None for content in contents]


def test_what_a_step_evicts_is_found_from_the_next_one_on() -> None:
    """The worker swaps out before it swaps in, and refuses to read what it writes in the same step."""
    manager = Manager(4, 4)
    manager.leave((1, 2))
    step = StepBuilder(2, 99)
    holder = manager.admit((3, 4, 5, 6, 7), step, 0)
    manager.blocks.free(holder)
    again = manager.admit((1, 2, 9), step)
    assert not step.swap_in
    manager.blocks.settle(step)
    assert len(step.swap_out) == 1
    manager.blocks.free(again)
    manager.leave((3, 4, 5, 6, 7, 8))
    step = StepBuilder(3, 99)
    manager.admit((1, 2, 9), step)
    assert [pair.source for pair in step.swap_in] == [0]


def test_a_host_block_that_a_step_reads_is_not_written_in_it() -> None:
    manager = Manager(3, 1)
    manager.leave((1, 2), (3, 4), (5, 6))  # two blocks: the first content is on the host
    assert manager.on_host((1, 2), (3, 4)) == [True, False]
    step = StepBuilder(2, 99)
    manager.admit((1, 2, 9), step)  # evicts two, and one of them would take the place of what is read
    manager.blocks.settle(step)
    assert [pair.source for pair in step.swap_in] == [0]
    assert not step.swap_out
    assert manager.on_host((1, 2)) == [True]


def test_what_preempted_sequences_need_goes_before_what_is_evicted() -> None:
    manager = Manager(5, 2)
    victim = manager.admit((1, 2, 3, 4), StepBuilder(1, 99))
    manager.leave((5, 6), (7, 8))
    step = StepBuilder(2, 99)
    other = manager.admit((9, 10, 11), step, 0)  # evicts both
    assert manager.blocks.host.num_free == 0
    assert manager.blocks.swap_out(victim, step)
    manager.blocks.settle(step)
    assert len(step.swap_out) == 2
    assert set(victim.host_blocks.values()) == {0, 1}
    assert manager.on_host((5, 6), (7, 8)) == [False, False]
    for sequence in (victim, other):
        manager.blocks.free(sequence)
    assert manager.blocks.host.num_free == 2


def test_what_the_host_has_by_its_content_is_not_moved_again() -> None:
    manager = Manager(4, 4)
    manager.leave((1, 2), (3, 4, 5, 6, 7, 8))
    step = StepBuilder(2, 99)
    victim = manager.admit((1, 2, 3), step)
    manager.blocks.settle(step)
    step = StepBuilder(3, 99)
    assert manager.blocks.swap_out(victim, step)
    assert len(step.swap_out) == 1  # the block that is not full
    manager.blocks.settle(step)
    step = StepBuilder(4, 99)
    assert manager.blocks.swap_in(victim, step, 0)
    manager.blocks.settle(step)
    manager.blocks.free(victim)
    assert manager.on_host((1, 2)) == [True]


def test_what_a_victim_leaves_on_the_host_is_found_by_others() -> None:
    manager = Manager(4, 4)
    victim = manager.admit((1, 2, 3), StepBuilder(1, 99))
    step = StepBuilder(2, 99)
    assert manager.blocks.swap_out(victim, step)
    other = manager.admit((5, 6, 7, 8, 9), step, 0)  # evicts on the device what the victim left there
    manager.blocks.settle(step)
    assert len(step.swap_out) == 2  # and does not move it twice
    manager.blocks.free(other)
    step = StepBuilder(3, 99)
    manager.admit((1, 2, 9), step)
    assert [pair.source for pair in step.swap_in] == [victim.host_blocks[0]]


def test_a_host_block_is_written_once_in_a_step_though_its_victim_starts_over() -> None:
    manager = Manager(4, 1)
    manager.leave((5, 6))
    victim = manager.admit((1, 2), StepBuilder(1, 99))
    step = StepBuilder(2, 99)
    assert manager.blocks.swap_out(victim, step)
    manager.blocks.free(victim)
    manager.admit((7, 8, 9, 10, 11), step, 0)  # evicts, but the host's only block is spoken for
    manager.blocks.settle(step)
    assert len(step.swap_out) == 1


def test_the_deeper_block_of_a_chain_leaves_the_host_before_its_head() -> None:
    manager = Manager(5, 3)
    chain = (1, 2, 3, 4, 5, 6)
    head = hash_block(b"", chain[:2])
    second = hash_block(head, chain[2:4])
    third = hash_block(second, chain[4:])
    manager.leave(chain, tuple(range(11, 19)))
    assert manager.order_on_host(head, second, third) == [third, second, head]
    manager.leave((*chain, 9))  # read from there
    assert manager.order_on_host(head, second, third) == [third, second, head]
    manager.leave(tuple(range(21, 29)))  # evicted again
    assert manager.order_on_host(head, second, third) == [third, second, head]
    manager.leave((31, 32))  # evicts one of these
    assert manager.order_on_host(head, second, third) == [second, head]


def test_what_the_host_has_and_the_device_evicts_again_counts_as_used() -> None:
    tier = HostTier(2, caches=True)
    for device_block, name in enumerate((b"a", b"b", b"a", b"c"), 1):
        step = StepBuilder(device_block, 9)
        tier.spill(device_block, name)
        tier.settle(step)
        assert len(step.swap_out) == (device_block != 3)
    assert [tier.find(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]


def test_what_a_swap_in_reads_keeps_the_order_of_its_chain() -> None:
    manager = Manager(6, 4)
    chain = (1, 2, 3, 4, 5, 6)
    names = [hash_block(b"", chain[:2])]
    for start in (2, 4):
        names.append(hash_block(names[-1], chain[start : start + 2]))
    victim = manager.admit((*chain, 7), StepBuilder(1, 99))
    step = StepBuilder(2, 99)
    assert manager.blocks.swap_out(victim, step)
    manager.blocks.settle(step)
    step = StepBuilder(3, 99)
    assert manager.blocks.swap_in(victim, step, 0)
    manager.blocks.settle(step)
    assert manager.order_on_host(*names) == names[::-1]


def test_what_a_victim_writes_is_read_from_the_next_step_on() -> None:
    manager = Manager(5, 4)
    victim = manager.admit((1, 2, 3), StepBuilder(1, 99))
    step = StepBuilder(2, 99)
    assert manager.blocks.swap_out(victim, step)
    other = manager.admit(tuple(range(5, 12)), step, 0)  # evicts what it left on the device
    manager.blocks.free(other)
    again = manager.admit((1, 2, 9), step)
    assert not step.swap_in
    manager.blocks.settle(step)
    manager.blocks.free(again)
    manager.leave(tuple(range(21, 29)))
    step = StepBuilder(3, 99)
    manager.admit((1, 2, 9), step)
    assert len(step.swap_in) == 1
