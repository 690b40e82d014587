"""The traps of the schedulers that this one learned from, each with the test that it cannot happen here.

From vLLM's V0:

- a sequence that is preempted is overtaken by those admitted in the same step
  -> test_a_step_that_preempts_admits_nobody
- priorities count for nothing where prefills come in pieces
  -> test_priority.test_a_prefill_in_the_middle_gives_way_too
- the first of the queue is asked before the queue is sorted
  -> test_priority.test_the_best_of_those_that_wait_is_asked_first
- swaps of a preemption by a higher priority are lost, the victim is in the wrong queue
  -> test_priority.test_blocks_are_taken_from_a_lower_priority_in_the_same_step
- several of them in one step
  -> test_priority.test_as_many_give_way_as_are_needed_and_keep_their_order
- a victim that has outgrown a step is dropped
  -> test_preemption.test_a_victim_larger_than_a_step_is_prefilled_in_pieces
- a decode with room in its own block wants a free one
  -> test_preemption.test_a_decode_with_room_in_its_own_block_needs_no_free_block
- no room to swap to ends the engine
  -> test_swap.test_the_host_pool_is_full
- block numbers of both pools are converted into each other
  -> test_both_pools_count_for_themselves
- content counts as computed when it is scheduled
  -> test_prefix_cache.test_what_is_not_answered_is_not_found
- two alike in one step are counted as cached
  -> test_prefix_cache.test_two_alike_in_one_step_both_compute
- a collision of a short hash shows another's content
  -> test_prefix_cache.test_names_are_a_chain_of_sha256
- a search by halves finds deeper blocks of a chain with a hole
  -> test_a_chain_ends_at_its_first_hole
- the head of a chain is evicted before what needs it
  -> test_prefix_cache.test_eviction_takes_the_end_of_a_chain_first
- the same on the host
  -> test_host_cache.test_the_deeper_block_of_a_chain_leaves_the_host_before_its_head
- a use that is noted is lost for the order of eviction
  -> test_prefix_cache.test_a_twin_counts_as_a_use
- what was found for an admission that failed is believed later
  -> test_prefix_cache.test_a_refused_admission_remembers_no_hits
- a fork of a long chain exceeds the recursion limit
  -> test_live_groups.test_a_fork_of_a_long_table_does_not_recurse
- the end of a swapped sequence frees host blocks on the device
  -> test_the_end_of_a_swapped_sequence_frees_both_pools
- a step that swaps in both directions reads what it writes
  -> test_host_cache.test_what_a_step_evicts_is_found_from_the_next_one_on
- decodes starve while prompts keep coming
  -> test_decodes_run_in_every_step_whatever_comes

From V1:

- what can never fit waits, or starts over, for ever
  -> test_scheduler.test_what_outgrows_the_blocks_is_refused_at_once_and_told_what_fits
- without a watermark who is admitted is preempted at once
  -> test_queues.test_the_watermark_stays_free_for_those_that_run
- a preempted sequence loses its place under priorities
  -> test_priority.test_who_gave_way_keeps_its_place_among_its_equals
- only blocks, and not rows, are taken from a lower priority
  -> test_priority.test_rows_are_taken_too
- a victim was in the step already, and its work must be undone
  -> test_priority.test_who_begins_in_a_step_gives_no_block_away_in_it
- a step that preempts is empty
  -> test_a_step_that_preempts_is_not_empty

Prompts as embeddings, of which steps must not be mixed with others, do not exist here.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scheduler_service.core.blocks.block_manager import BlockManager
from scheduler_service.core.blocks.prefix_lookup import hash_block
from scheduler_service.core.cost import CostModel
from scheduler_service.core.sequence import Group
from scheduler_service.core.step import StepBuilder
from tests.unit.scheduler_service.core.harness import Bench, configure, crowd, make_spec, rows

HERE = Path(__file__).parent


def test_the_table_names_tests_that_exist() -> None:
    named = re.findall(r"-> (?:(test_\w+)\.)?(test_\w+)$", __doc__ or "", re.MULTILINE)
    assert len(named) == 27
    for module, test in named:
        [file] = HERE.rglob(f"{module or Path(__file__).stem}.py")
        names = {each.name for each in ast.parse(file.read_text()).body if isinstance(each, ast.FunctionDef)}
        assert test in names, (module, test)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_step_that_preempts_admits_nobody(mode: str) -> None:
    bench = crowd(mode, num_device_blocks=6)
    bench.add(make_spec("c", 1, 2))
    while not bench.scheduler.stats().num_preemptions_total:
        step = bench.send()
        bench.answer()
    assert not step.new_sequences
    bench.run()
    bench.check_tokens()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_step_that_preempts_is_not_empty(mode: str, policy: str) -> None:
    bench = Bench(configure(num_device_blocks=9, preemption_mode=mode, policy=policy, aging_seconds=9.0))
    for number in range(6):
        bench.add(make_spec(f"r{number}", 5 + number, 12, priority=-number))
        before = bench.scheduler.stats().num_preemptions_total
        for _ in range(4):
            step = bench.step()
            after = bench.scheduler.stats().num_preemptions_total
            assert after == before or step.sequence_ids
            before = after
    assert before > 0
    bench.run()
    bench.check_tokens()


def test_both_pools_count_for_themselves() -> None:
    bench = crowd("swap", num_host_blocks=2)
    step = bench.send()
    assert {pair.destination for pair in step.blocks_to_swap_out} == {0, 1}  # the host's first
    assert 0 not in {pair.source for pair in step.blocks_to_swap_out}  # on the device that is for padding
    bench.run()
    bench.check_tokens()


def test_a_chain_ends_at_its_first_hole() -> None:
    manager = BlockManager(configure(block_size=2), CostModel(2))
    head = hash_block(b"", (1, 2))
    deeper = hash_block(hash_block(head, (3, 4)), (5, 6))
    for name in (head, deeper):
        manager.device.publish(manager.device.allocate(), name)
    sequence = Group(make_spec(prompt=(1, 2, 3, 4, 5, 6, 7)), 1, 20, 0.0).sequences[0]
    assert manager.count_cached_tokens(sequence) == 2
    assert manager.admit(sequence, StepBuilder(1, 9), 0)
    assert sequence.num_scheduled == 2
    assert sequence.block_ids[2] != manager.device.find(deeper)


def test_the_end_of_a_swapped_sequence_frees_both_pools() -> None:
    bench = Bench(configure(num_device_blocks=6, preemption_mode="swap"))
    bench.add(make_spec("a", 7, 7, n=2))
    for _ in range(3):
        bench.step()
    while not bench.scheduler.stats().num_swapped:
        bench.step()
    swapped = bench.scheduler._queues.swapped[0]
    assert any(swapped.block_ids)  # what it shares stayed on the device
    assert swapped.host_blocks
    bench.scheduler.abort("a", swapped.sequence_index)
    stats = bench.scheduler.stats()
    assert stats.num_free_host_blocks == stats.num_host_blocks
    bench.run()
    bench.check_tokens()


def test_decodes_run_in_every_step_whatever_comes() -> None:
    bench = Bench(configure(max_num_batched_tokens=8, debug_integrity=False))
    bench.add(make_spec("decodes", 4, 30))
    bench.step()
    for number in range(20):
        bench.add(make_spec(f"r{number}", 12, 1))
        assert rows(bench.step())[1] == 1
    bench.run()
    bench.check_tokens()
