"""Preemption by swap: what moves, what stays, and how it comes back."""

from __future__ import annotations

from tests.unit.scheduler_service.core.harness import Bench, configure, crowd, make_spec, rows, small_beside_large


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


def test_the_host_pool_is_full() -> None:
    bench = crowd("swap", num_host_blocks=1)
    step = bench.send()
    assert not step.blocks_to_swap_out
    assert bench.scheduler.stats().num_waiting == 1
    bench.run()
    bench.check_tokens()


def test_nobody_is_admitted_while_somebody_is_swapped_out() -> None:
    bench = small_beside_large("swap")
    while bench.scheduler.stats().num_swapped:
        step = bench.step()
        assert not step.new_sequences or not bench.scheduler.stats().num_swapped
    bench.run()
    bench.check_tokens()


def test_swapped_out_blocks_are_evicted_from_the_end_of_the_chain() -> None:
    bench = Bench(configure(num_device_blocks=9, preemption_mode="swap"))
    bench.add(make_spec("a", 15, 3))
    bench.add(make_spec("b", 12, 6))
    table = ()
    while not bench.scheduler.stats().num_swapped:
        table = tuple(bench.worker.rows[2].block_ids) if 2 in bench.worker.rows else ()
        bench.step()
    assert list(bench.scheduler._blocks.device._evictable)[:3] == [table[2], table[1], table[0]]


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
        assert rows(bench.step()) == {1: 1}  # it goes on in every step
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


def test_a_step_that_preempts_brings_nobody_back() -> None:
    bench = Bench(configure(num_device_blocks=9, preemption_mode="swap"))
    bench.add(make_spec("a", 7, 12))
    bench.add(make_spec("b", 12, 12))
    bench.add(make_spec("d", 3, 12))
    while bench.scheduler.stats().num_swapped < 2:
        step = bench.step()
    assert len(step.blocks_to_swap_out) == 5
    assert bench.scheduler.stats().num_free_device_blocks == 4  # the other one would fit
    assert rows(step) == {1: 1}
    assert rows(bench.step()) == {1: 1, 3: 1}
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


def test_blocks_still_cached_are_not_copied_back() -> None:
    bench = Bench(configure(num_device_blocks=9, preemption_mode="swap", enable_host_prefix_cache=False))
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
