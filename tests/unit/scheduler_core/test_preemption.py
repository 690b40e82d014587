"""When blocks run out: who goes, how, and how they come back."""

from __future__ import annotations

import pytest

from scheduler_service.core.output import FinishReason, SchedulerOutput, StepResult
from tests.unit.scheduler_core.harness import Bench, configure, make_spec

MODES = pytest.mark.parametrize("mode", ["auto", "swap", "recompute"])


def rows(step: SchedulerOutput) -> dict[int, int]:
    return dict(zip(step.sequence_ids, step.num_new_tokens, strict=True))


def crowd(mode: str, num_device_blocks: int = 5, **changes: object) -> Bench:
    """Two sequences in decode, with two blocks each and no other: in the third step the first one needs a third."""
    bench = Bench(configure(num_device_blocks=num_device_blocks, preemption_mode=mode, **changes))
    bench.add(make_spec("a", 7, 6))
    bench.add(make_spec("b", 4, 6))
    bench.step()
    bench.step()
    return bench


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


def test_swap_moves_what_was_computed_and_what_is_in_flight() -> None:
    bench = Bench(configure(num_device_blocks=5, preemption_mode="swap"))
    bench.add(make_spec("a", 7, 6))
    bench.add(make_spec("b", 4, 6))
    bench.send()
    bench.send()  # writes the fifth token of b
    bench.answer()
    step = bench.send()  # moves it while that is in flight
    assert len(step.blocks_to_swap_out) == 2
    assert step.appended_block_ids[0] in {pair.source for pair in step.blocks_to_swap_out}
    bench.answer()
    assert len(bench.tokens["b", 0]) == 2  # taken though it is swapped out
    bench.run()
    step = next(step for step in bench.steps if step.blocks_to_swap_in)
    assert [sequence_id for sequence_id, _ in step.replaced_tables] == [2]
    assert not step.new_sequences
    assert 2 in step.sequence_ids
    bench.check_tokens()


def test_a_row_that_is_swapped_out_is_parked_and_not_forgotten() -> None:
    bench = crowd("swap")
    bench.step()
    assert 2 in bench.worker.rows
    assert not bench.steps[-1].finished_sequence_ids


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
    assert new.token_ids == bench.specs["b"].prompt_token_ids + tuple(bench.tokens["b", 0][:2])
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


def test_a_victim_with_nothing_more_to_compute_is_not_swapped() -> None:
    bench = Bench(configure(num_device_blocks=5, preemption_mode="swap"))
    bench.add(make_spec("a", 7, 6))
    bench.add(make_spec("b", 4, 2))
    bench.send()
    bench.send()
    bench.answer()
    assert not bench.send().blocks_to_swap_out
    bench.run()
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


def test_the_host_pool_is_full() -> None:
    bench = crowd("swap", num_host_blocks=1)
    step = bench.send()
    assert not step.blocks_to_swap_out
    assert bench.scheduler.stats().num_waiting == 1
    bench.run()
    bench.check_tokens()


def test_nobody_is_admitted_while_somebody_is_swapped_out() -> None:
    bench = crowd("swap")
    bench.step()
    bench.add(make_spec("c", 1, 2))
    while bench.scheduler.stats().num_swapped:
        step = bench.step()
        assert not step.new_sequences or not bench.scheduler.stats().num_swapped
    bench.run()
    bench.check_tokens()


def test_nobody_passes_one_that_was_preempted() -> None:
    bench = crowd("recompute")
    bench.step()
    bench.add(make_spec("c", 1, 2))
    while bench.scheduler.stats().num_waiting == 2:
        step = bench.step()
        assert [new.sequence_id for new in step.new_sequences] in ([], [2], [2, 3])
    bench.run()
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


def test_shared_blocks_stay_when_their_holder_is_swapped_out() -> None:
    bench = Bench(configure(num_device_blocks=6, preemption_mode="swap"))
    bench.add(make_spec("a", 7, 7, n=2))
    bench.step()
    bench.step()
    bench.step()  # one copy: three blocks
    bench.add(make_spec("b", 4, 7))
    steps = [bench.step() for _ in range(2)]
    moved = [pair for step in steps for pair in step.blocks_to_swap_out]
    bench.run()
    moved = [step for step in bench.steps if step.blocks_to_swap_out]
    assert moved
    bench.check_tokens()


def test_a_victim_that_frees_nothing_by_swap_starts_over() -> None:
    """All blocks of a fresh child are shared: holding them on the device would only stop the others."""
    bench = Bench(configure(num_device_blocks=3, preemption_mode="swap"))
    bench.add(make_spec("a", 6, 3, n=3))
    bench.step()
    bench.step()
    step = bench.step()
    assert rows(step) == {1: 1}
    assert not step.blocks_to_swap_out
    assert bench.scheduler.stats().num_waiting == 2
    bench.run()
    bench.check_tokens()


def find_given_up(bench: Bench) -> set[int]:
    """Sequences that were swapped out and then began anew: named new again without a preemption between."""
    named: set[int] = set()
    again: set[int] = set()
    for step in bench.steps:
        again |= named & {new.sequence_id for new in step.new_sequences}
        named |= {new.sequence_id for new in step.new_sequences} | {fork.child_id for fork in step.forks}
    return again


def test_the_only_one_that_runs_gets_the_blocks_that_swapped_ones_share() -> None:
    bench = Bench(configure(num_device_blocks=9, preemption_mode="swap", enable_prefix_caching=False))
    bench.add(make_spec("a", 4, 24))  # seven blocks of eight in the end
    bench.add(make_spec("b", 8, 16, n=2))  # two blocks that both children hold, and their own
    while bench.scheduler.stats().num_swapped < 2:
        bench.step()
    assert bench.scheduler.stats().num_waiting == 0
    while bench.scheduler.stats().num_waiting == 0:
        step = bench.step()
    assert rows(step) == {1: 1}  # it goes on in the very step
    assert bench.scheduler.stats().num_running == 1
    bench.run()
    assert find_given_up(bench)
    bench.check_tokens()


def test_the_first_swapped_one_gets_the_blocks_that_others_share_when_nobody_runs() -> None:
    prompt = (2, 6, 7, 1, 7, 4, 6, 6, 1, 4, 4, 1, 2, 7)
    bench = Bench(
        configure(
            block_size=2, num_device_blocks=10, preemption_mode="swap", max_prefill_chunk=2, max_steps_in_flight=3
        )
    )
    bench.add(make_spec("a", prompt, 4, n=3))
    bench.add(make_spec("b", prompt[:10], 7))
    while bench.scheduler.stats().num_swapped < 2:
        bench.step()
    assert [sequence.sequence_id for sequence in bench.scheduler._queues.swapped] == [4, 2]
    while 4 not in bench.step().sequence_ids:
        pass
    assert bench.scheduler.stats().num_swapped == 0
    assert [sequence.sequence_id for sequence in bench.scheduler._queues.waiting] == [2, 3]
    bench.run()
    bench.check_tokens()


def test_a_swapped_one_in_flight_comes_back_after_its_answers() -> None:
    bench = Bench(configure(num_device_blocks=5, preemption_mode="swap", max_steps_in_flight=3))
    bench.add(make_spec("a", 7, 6))
    bench.add(make_spec("b", 4, 6))
    bench.send()
    bench.send()
    assert len(bench.send().blocks_to_swap_out) == 2
    bench.answer()
    bench.scheduler.abort("a")
    assert bench.send().sequence_ids == ()
    bench.answer()
    assert bench.send().sequence_ids == (2,)
    bench.run(3)
    bench.check_tokens()


def test_a_long_prefill_is_swapped_out_and_goes_on() -> None:
    bench = Bench(configure(num_device_blocks=11, preemption_mode="swap", max_prefill_chunk=2))
    bench.add(make_spec("a", 7, 8))
    for _ in range(3):
        bench.step()
    bench.add(make_spec("b", 25, 3))
    step = bench.step()
    while not step.blocks_to_swap_out:
        step = bench.step()
    computed = bench.worker.rows[2].num_computed
    assert 0 < computed < 25
    assert len(step.blocks_to_swap_out) == -(-computed // 4)  # the blocks beyond hold nothing
    bench.run()
    bench.check_tokens()
    assert sum(len(step.new_sequences) for step in bench.steps) == 2


@MODES
@pytest.mark.parametrize("index", [None, 0])
def test_abort_of_one_that_is_preempted(mode: str, index: int | None) -> None:
    bench = crowd(mode)
    bench.send()
    assert bench.scheduler.abort("b", index)
    assert 2 in bench.send().finished_sequence_ids
    bench.run()
    bench.check_tokens()


def test_blocks_still_cached_are_not_copied_back() -> None:
    bench = Bench(configure(num_device_blocks=9, preemption_mode="swap"))
    bench.add(make_spec("a", 15, 3))
    bench.add(make_spec("b", 12, 6))
    bench.run()
    stats = bench.scheduler.stats()
    assert (stats.num_swapped_out_blocks_total, stats.num_swapped_in_blocks_total) == (4, 1)
    bench.check_tokens()


def test_a_host_block_just_read_is_not_written_in_the_same_step() -> None:
    """The model worker refuses it; here many swaps in both directions make sure that it could happen."""
    bench = Bench(configure(num_device_blocks=10, num_host_blocks=5, preemption_mode="swap", max_num_seqs=8))
    for number in range(8):
        bench.add(make_spec(f"r{number}", 3 + number % 4, 14))
    bench.run()
    bench.check_tokens()
    assert bench.scheduler.stats().num_swapped_in_blocks_total > 5


def test_a_stall_is_left_and_counted() -> None:
    """It takes a bug to get there: here, blocks that nobody gives back."""
    bench = Bench(configure(debug_integrity=False))
    device = bench.scheduler._blocks.device
    lost = [device.allocate() for _ in range(device.num_usable)]
    bench.add(make_spec())
    assert bench.schedule() is None
    assert bench.scheduler.can_schedule()
    assert bench.schedule() is None
    assert bench.scheduler.stats().num_recoveries_total == 1
    for block in lost:
        device.release(block)
    bench.send()


def test_the_recovery_preempts_all_but_the_first() -> None:
    bench = Bench(configure(num_device_blocks=10, preemption_mode="swap"))
    for name, prompt in (("a", 7), ("b", 7), ("c", 7), ("d", 2), ("e", 2)):
        bench.add(make_spec(name, prompt, 8))
    while not bench.scheduler.stats().num_swapped:
        bench.step()
    bench.scheduler._planner.preempt_all_but_first()
    bench.scheduler.check_integrity()
    stats = bench.scheduler.stats()
    assert (stats.num_running, stats.num_swapped) == (1, 0)
    assert [sequence.sequence_id for sequence in bench.scheduler._queues.waiting] == [2, 3, 4, 5]
    bench.run()
    bench.check_tokens()
