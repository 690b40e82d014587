"""When blocks run out: who goes, and how they start over."""

from __future__ import annotations

import pytest

from blockyard.contract.sampling import FinishReason
from scheduler_service.core.step import StepBuilder
from scheduler_service.core.values import StepResult
from tests.unit.scheduler_service.core.harness import Bench, configure, crowd, make_spec, rows, small_beside_large

MODES = pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])


@MODES
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_do_not_depend_on_it(mode: str, depth: int) -> None:
    bench = Bench(configure(num_device_blocks=9, preemption_mode=mode, max_num_batched_tokens=16))
    for number in range(6):
        bench.add(make_spec(f"r{number}", 5 + number, 12, n=1 + number % 2))
    bench.run(depth)
    bench.check_tokens()
    assert bench.scheduler.stats().num_preemptions_total > 0


@MODES
def test_a_decode_with_room_in_its_own_block_needs_no_free_block(mode: str) -> None:
    bench = Bench(configure(num_device_blocks=3, preemption_mode=mode))
    bench.add(make_spec("a", 5, 4))
    for _ in range(4):
        bench.step()
    assert bench.scheduler.stats().num_preemptions_total == 0
    bench.check_tokens()


@MODES
def test_the_last_of_the_running_goes(mode: str) -> None:
    bench = crowd(mode)
    step = bench.send()
    assert rows(step) == {1: 1}
    assert step.appended_sequence_ids == (1,)
    stats = bench.scheduler.stats()
    assert (stats.num_running, stats.num_preemptions_total) == (1, 1)
    assert (stats.num_waiting, stats.num_swapped) == ((1, 0) if mode == "recompute" else (0, 1))
    assert not step.finished_sequence_ids
    bench.run()
    bench.check_tokens()


def test_recompute_takes_tokens_in_flight_and_then_restarts() -> None:
    bench = Bench(configure(num_device_blocks=5, preemption_mode="recompute"))
    bench.add(make_spec("a", 7, 3))
    bench.add(make_spec("b", 4, 6))
    bench.send()
    bench.send()
    bench.answer()
    bench.send()  # b is preempted with its second token in flight
    assert len(bench.tokens["b", 0]) == 1
    bench.answer()
    assert len(bench.tokens["b", 0]) == 2
    bench.run()
    step = next(step for step in bench.steps[1:] if step.new_sequences)
    new = step.new_sequences[0]
    assert step.finished_sequence_ids.count(2) == 1  # finished and new: a restart
    assert (new.sequence_id, new.prompt_length) == (2, 4)
    assert new.token_ids == [*bench.specs["b"].prompt_token_ids, *bench.tokens["b", 0][:2]]
    bench.check_tokens()


def test_a_victim_in_flight_is_not_admitted_before_its_answer() -> None:
    bench = Bench(configure(num_device_blocks=5, preemption_mode="recompute"))
    bench.add(make_spec("a", 7, 6))
    bench.add(make_spec("b", 4, 6))
    bench.send()
    bench.send()
    bench.answer()
    bench.send()
    bench.scheduler.abort("a")  # all its blocks are free, but b's second token is in flight
    bench.answer()
    step = bench.send()
    assert [new.sequence_id for new in step.new_sequences] == [2]
    assert len(step.new_sequences[0].token_ids) == 6
    bench.run()
    bench.check_tokens()


def test_a_victim_whose_token_in_flight_is_its_last_never_restarts() -> None:
    bench = Bench(configure(num_device_blocks=5, preemption_mode="recompute"))
    bench.add(make_spec("a", 7, 6))
    bench.add(make_spec("b", 4, 2))
    bench.send()
    bench.send()
    bench.answer()
    bench.send()
    assert bench.scheduler.stats().num_preemptions_total == 1
    bench.run()
    assert len(bench.tokens["b", 0]) == 2
    assert sum(len(step.new_sequences) for step in bench.steps) == 2
    bench.check_tokens()


def test_a_victim_is_stopped_by_its_token_in_flight() -> None:
    for mode in ("swap", "recompute"):
        bench = Bench(configure(num_device_blocks=5, preemption_mode=mode))
        bench.add(make_spec("a", 7, 6))
        bench.add(make_spec("b", 4, 6, stop={31}))
        for number in (1, 2):
            bench.send()
            if number == 1:
                bench.take(StepResult(1, (1, 2), (5, 5)))
        bench.send()
        assert bench.scheduler.stats().num_preemptions_total == 1
        bench.take(StepResult(2, (1, 2), (5, 31)))
        assert bench.finished["b", 0] is FinishReason.STOP
        stats = bench.scheduler.stats()
        assert (stats.num_waiting, stats.num_swapped, stats.num_free_host_blocks) == (0, 0, 64)
        assert bench.send().finished_sequence_ids == (2,)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_two_victims_of_one_step_keep_their_order_and_all_their_pairs(mode: str) -> None:
    bench = Bench(configure(num_device_blocks=10, preemption_mode=mode))
    for name, prompt in (("a", 7), ("b", 7), ("c", 7), ("d", 2), ("e", 2)):
        bench.add(make_spec(name, prompt, 8))
    bench.step()
    bench.step()
    step = bench.step()  # three need a block, and one is free
    assert rows(step) == {1: 1, 2: 1, 3: 1}
    queue = bench.scheduler._queues.swapped if mode == "swap" else bench.scheduler._queues.waiting
    assert [sequence.sequence_id for sequence in queue] == [4, 5]
    assert len(step.blocks_to_swap_out) == (2 if mode == "swap" else 0)
    assert bench.scheduler.stats().num_preemptions_total == 2
    bench.run()
    bench.check_tokens()


def test_nobody_passes_one_that_was_preempted() -> None:
    bench = small_beside_large("recompute")
    while bench.scheduler.stats().num_waiting == 2:
        step = bench.step()
        assert [new.sequence_id for new in step.new_sequences] in ([], [2], [2, 3])
    bench.run()
    bench.check_tokens()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_who_comes_back_leaves_a_block_for_each_that_runs(mode: str) -> None:
    """Or it would be the next victim at once."""
    bench = Bench(configure(preemption_mode=mode, debug_integrity=False, enable_prefix_caching=False))
    for name in "abcd":
        bench.add(make_spec(name, 5, 12))
    bench.step()
    bench.scheduler._planner.preemption.preempt(bench.scheduler._queues.running[-1], StepBuilder(2, 9))
    device = bench.scheduler._blocks.device
    num_needed = 2 + (mode == "recompute")  # its blocks; and on admission one for its next token
    lost = [device.allocate() for _ in range(device.num_free - num_needed - 2)]
    assert rows(bench.step()) == {1: 1, 2: 1, 3: 1}
    device.release(lost.pop())
    assert 4 in rows(bench.send())


def test_a_restart_waits_for_all_answers_with_three_steps_in_flight() -> None:
    bench = Bench(configure(num_device_blocks=5, preemption_mode="recompute", max_steps_in_flight=3))
    bench.add(make_spec("a", 7, 6))
    bench.add(make_spec("b", 4, 6))
    for _ in range(3):
        bench.send()
    bench.answer()
    bench.scheduler.abort("a")
    assert not bench.send().new_sequences
    bench.answer()
    step = bench.send()
    assert step.new_sequences[0].token_ids == [*bench.specs["b"].prompt_token_ids, *bench.tokens["b", 0]]
    bench.run(3)
    bench.check_tokens()


def test_a_victim_larger_than_a_step_is_prefilled_in_pieces() -> None:
    bench = Bench(configure(num_device_blocks=6, preemption_mode="recompute", max_num_batched_tokens=4))
    bench.add(make_spec("a", 4, 14))
    bench.add(make_spec("b", 4, 14))
    bench.run()
    assert bench.scheduler.stats().num_preemptions_total > 0
    assert any(len(step.new_sequences[0].token_ids) > 4 for step in bench.steps if step.new_sequences)
    assert set(bench.finished.values()) == {FinishReason.LENGTH}
    bench.check_tokens()


def test_a_piece_in_flight_of_one_that_starts_over_counts_for_nothing() -> None:
    bench = Bench(configure(num_device_blocks=11, preemption_mode="recompute", max_prefill_chunk=2))
    bench.add(make_spec("a", 1, 12))
    bench.add(make_spec("b", 29, 3))
    bench.send()
    while not bench.scheduler.stats().num_preemptions_total:
        bench.send()
        bench.answer()
    assert 2 in bench.steps[-2].sequence_ids
    bench.answer()  # walks all state: who waits has no KV
    bench.run()
    assert [new.sequence_id for step in bench.steps for new in step.new_sequences] == [1, 2, 2]
    bench.check_tokens()


@MODES
@pytest.mark.parametrize("index", [None, 0])
def test_abort_of_one_that_is_preempted(mode: str, index: int | None) -> None:
    bench = crowd(mode)
    bench.send()
    assert bench.scheduler.abort("b", index)
    assert 2 in bench.send().finished_sequence_ids
    bench.run()
    bench.check_tokens()


def test_a_scheduler_that_can_run_nothing_raises() -> None:
    """It takes a bug to get there: here, blocks that nobody gives back."""
    bench = Bench(configure(debug_integrity=False))
    device = bench.scheduler._blocks.device
    for _ in range(device.num_usable):
        device.allocate()
    bench.add(make_spec())
    with pytest.raises(RuntimeError, match="no live request can be scheduled"):
        bench.schedule()
    bench.lose_worker()
    bench.run()
    bench.check_tokens()


def test_a_leak_does_not_make_it_loop() -> None:
    bench = Bench(configure(debug_integrity=False, preemption_mode="recompute"))
    bench.add(make_spec(prompt=4))
    bench.step()
    device = bench.scheduler._blocks.device
    for _ in range(device.num_free):
        device.allocate()
    with pytest.raises(RuntimeError, match="no live request can be scheduled"):
        bench.schedule()  # the only one that runs is its own victim, and does not come back
