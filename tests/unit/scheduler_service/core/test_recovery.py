"""A worker that is lost: what is emitted stays, what is not answered never was, and every sequence goes on as alone."""

from __future__ import annotations

import pytest

from blockyard.contract.sampling import FinishReason
from tests.unit.scheduler_service.core.harness import Bench, configure, crowd, make_spec, rows


def waiting(bench: Bench) -> list[int]:
    return [sequence.sequence_id for sequence in bench.scheduler._queues.waiting]


def test_what_was_in_flight_is_forgotten_and_the_rest_goes_on() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 8))
    bench.step()
    bench.step()
    bench.send()
    bench.send()
    assert bench.lose_worker() == [("a", 8)]
    stats = bench.scheduler.stats()
    assert (stats.num_free_device_blocks, stats.num_cached_device_blocks, stats.num_steps_in_flight) == (64, 0, 0)
    assert bench.scheduler.can_schedule()
    step = bench.send()
    assert step.step_id == 1
    [new] = step.new_sequences
    assert (new.prompt_length, len(new.token_ids), new.num_computed_tokens) == (6, 8, 0)
    assert rows(step) == {1: 8}
    bench.run()
    bench.check_tokens()
    assert bench.finished == {("a", 0): FinishReason.LENGTH}
    assert list(bench.prefilled) == ["a"]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_order_is_running_then_swapped_then_waiting(mode: str) -> None:
    bench = crowd(mode)
    bench.add(make_spec("c", 2, 2))
    bench.step()  # a takes the blocks of b
    stats = bench.scheduler.stats()
    assert stats.num_preemptions_total == 1
    bench.lose_worker()
    assert waiting(bench) == [1, 2, 3]
    bench.run()
    bench.check_tokens()
    assert len(bench.finished) == 3


def test_a_fork_that_was_not_answered_is_made_again_and_the_prompt_computed_once() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 4, n=3))
    bench.step()
    bench.send()  # forks
    bench.lose_worker()
    assert waiting(bench) == [1]
    assert bench.send().sequence_ids == (1,)
    assert [fork.child_id for fork in bench.send().forks] == [2, 3]
    bench.run()
    bench.check_tokens()
    assert len(bench.finished) == 3


def test_children_that_have_a_token_go_on_by_themselves() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 4, n=3))
    while not bench.tokens["a", 2]:
        bench.step()
    bench.lose_worker()
    assert waiting(bench) == [1, 2, 3]
    assert not any(step.forks for step in [bench.send(), bench.send()])
    bench.run()
    bench.check_tokens()


def test_children_stay_with_a_leader_that_has_not_begun() -> None:
    bench = Bench(configure(max_num_seqs=3))
    bench.add(make_spec("a", 6, 4, n=2))
    bench.add(make_spec("b", 6, 4, n=2))
    bench.step()
    assert bench.lose_worker() == [("a", 6)]
    assert waiting(bench) == [1, 3]
    bench.run()
    bench.check_tokens()
    assert len(bench.finished) == 4


def test_who_has_ended_is_not_sent_again_and_nobody_is_told_to_forget_it() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 1))
    bench.add(make_spec("b", 6, 9))
    bench.add(make_spec("c", 6, 9, n=2))
    for _ in range(3):
        bench.step()
    bench.scheduler.abort("c", 0)
    bench.lose_worker()
    step = bench.send()
    assert [new.sequence_id for new in step.new_sequences] == [2, 4]
    assert step.finished_sequence_ids == ()
    bench.run()
    bench.check_tokens()


def test_an_abort_after_the_loss_ends_a_request() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 9, n=2))
    bench.step()
    bench.lose_worker()
    assert bench.scheduler.abort("a")
    assert not bench.scheduler.can_schedule()
    bench.check_done()


def test_a_loss_on_top_of_a_loss_costs_nothing_more() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 9))
    assert bench.lose_worker() == []  # it had not begun
    bench.step()
    bench.step()
    assert bench.lose_worker() == [("a", 8)]
    assert bench.lose_worker() == [("a", 8)]
    bench.run()
    bench.check_tokens()


def test_other_pools_take_over_what_fits_in_the_same_order() -> None:
    bench = Bench()
    bench.add(make_spec("a", 10, 9))
    bench.add(make_spec("b", 6, 4, n=2))
    for _ in range(3):
        bench.step()
    bench.change_worker(configure(block_size=2, num_device_blocks=40, num_host_blocks=3))
    assert waiting(bench) == [1, 2, 3]
    assert bench.add(make_spec("c")) == 4  # an id never comes again
    bench.run()
    bench.check_tokens()
    assert len(bench.finished) == 4


def test_a_sequence_that_is_as_long_as_the_new_length_finishes() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 100))
    bench.add(make_spec("b", 6, 100, owner="other"))
    bench.scheduler.abort("b")
    for _ in range(10):
        bench.step()
    updates = bench.change_worker(configure(max_model_len=12))
    assert [ended.reason for ended in updates["gateway"].ended] == [FinishReason.LENGTH]
    assert not bench.scheduler.has_unfinished()
    bench.check_done()


def test_a_request_that_goes_on_ends_at_the_new_length() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 100))
    for _ in range(4):
        bench.step()
    bench.change_worker(configure(max_model_len=12))
    bench.run()
    bench.check_tokens()
    assert len(bench.tokens["a", 0]) == 6


@pytest.mark.parametrize("changes", [{"num_device_blocks": 3}, {"max_model_len": 6}])
def test_a_request_that_never_fits_fails_alone(changes: dict[str, int]) -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 9, n=2))
    bench.add(make_spec("b", 2, 3))
    bench.step()
    updates = bench.change_worker(configure(**changes))
    [(request_id, message)] = updates["gateway"].failed
    assert request_id == "a"
    assert "never fit" in message
    bench.run()
    bench.check_tokens()
    assert list(bench.finished) == [("b", 0)]


def test_outputs_are_counted_by_request() -> None:
    bench = Bench()
    bench.add(make_spec("a", n=2))
    bench.add(make_spec("b"))
    for _ in range(3):
        bench.step()
    count = {
        request_id: sum(len(bench.tokens[request_id, index]) for index in range(n))
        for request_id, n in (("a", 2), ("b", 1))
    }
    assert bench.scheduler.count_outputs([2]) == {"a": count["a"]}
    assert bench.scheduler.count_outputs([1, 2, 3, 99]) == count


def test_suspects_run_one_at_a_time_beside_those_that_are_cleared() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.add(make_spec(name, 6, 8))
    bench.step()
    bench.lose_worker(["a", "c"])
    assert bench.send().sequence_ids == (1, 2)  # b is no suspect, c has to wait for a
    bench.answer()
    assert 3 in bench.send().sequence_ids  # a has given a token
    bench.run()
    bench.check_tokens()
    assert len(bench.finished) == 3


def test_a_suspect_that_ends_makes_way_for_the_next() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.add(make_spec(name, 6, 8))
    bench.step()
    bench.lose_worker(["a", "b", "unknown"])
    assert bench.send().sequence_ids == (1,)
    bench.scheduler.abort("a")
    assert 2 in bench.send().sequence_ids
    bench.answer()
    bench.run()
    assert ("b", 0) in bench.finished


def test_a_suspect_starts_whatever_another_replica_computes() -> None:
    """Each replica's next death has one suspect in hand, which decides. Nothing would wake the one that waits."""
    here, there = Bench(), Bench()
    for bench, name in ((here, "a"), (there, "b")):
        bench.add(make_spec(name, 6, 8))
        bench.step()
    suspects = here.scheduler._planner.suspects
    for bench in (here, there):
        bench.lose_worker()
        bench.scheduler._planner.suspects = suspects
    suspects.replace([*here.scheduler._groups.values(), *there.scheduler._groups.values()])
    assert here.send().sequence_ids == (1,)
    assert there.send().sequence_ids == (1,)
