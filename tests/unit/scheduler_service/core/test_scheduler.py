"""Requests in, steps out, answers in: without pressure on the blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockyard.contract.sampling import FinishReason
from blockyard.contract.scheduling import Ending, SequenceError
from scheduler_service.core.scheduler import CoreConfig, NeverFits, Scheduler, StepMismatch
from scheduler_service.core.values import GroupSpec, StepResult
from tests.kit.oracles.core_requests import add_request
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec, rows

BROKEN = SequenceError("NOT_FINITE", "broken")

# What is taken


def test_ids_are_consecutive_and_grow() -> None:
    bench = Bench()
    assert [bench.add(make_spec("a", n=3)), bench.add(make_spec("b"))] == [1, 4]
    bench.run()
    assert bench.add(make_spec("a")) == 5


@pytest.mark.parametrize("spec", [make_spec(prompt=()), make_spec(max_tokens=0), make_spec(n=0), make_spec(n=17)])
def test_what_makes_no_sense_is_refused(spec) -> None:
    with pytest.raises(ValueError, match="sequences"):
        Bench().add(spec)


def test_more_sequences_than_tokens_of_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="1 to 2"):
        Bench(configure(max_num_batched_tokens=2)).add(make_spec(n=3))


def test_what_outgrows_the_blocks_is_refused_at_once_and_told_what_fits() -> None:
    bench = Bench(configure(num_device_blocks=4))
    with pytest.raises(NeverFits) as caught:
        bench.add(make_spec(prompt=8, max_tokens=6))
    assert caught.value.num_tokens_that_fit == 13
    bench.add(make_spec(prompt=8, max_tokens=5))  # the last token needs no slot
    bench.run()
    bench.check_tokens()


def test_what_outgrows_the_model_ends_at_its_length() -> None:
    bench = Bench(configure(max_model_len=10))
    bench.add(make_spec(prompt=8, max_tokens=50))
    bench.run()
    assert len(bench.tokens["r", 0]) == 2
    assert bench.finished["r", 0] is FinishReason.LENGTH
    with pytest.raises(NeverFits):
        bench.add(make_spec(prompt=10, max_tokens=1))


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"num_device_blocks": 1},
        {"num_host_blocks": -1},
        {"max_prefill_chunk": -1},
        {"preemption_mode": "hope"},
        {"policy": "whim"},
        {"victims": "first"},
        {"aging_seconds": -1.0},
        {"target_step_seconds": float("nan")},
        {"watermark": 1.0},
    ],
)
def test_a_configuration_out_of_range_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        configure(**change)


def test_defaults() -> None:
    config = CoreConfig(16, 10, 0, 100, 8, 64)
    assert (config.max_steps_in_flight, config.enable_prefix_caching, config.watermark) == (2, True, 0.01)


# Steps


def test_one_request_prefills_then_decodes() -> None:
    bench = Bench()
    first = bench.add(make_spec(prompt=6, max_tokens=3))
    step = bench.send()
    assert step.step_id == 1
    assert rows(step) == {first: 6}
    assert step.new_sequences[0].block_ids == (1, 2)
    assert step.new_sequences[0].token_ids == list(bench.specs["r"].prompt_token_ids)
    step = bench.send()  # before the first is answered
    assert rows(step) == {first: 1}
    assert not step.new_sequences
    assert not step.appended_block_ids
    assert bench.schedule() is None  # two in flight
    assert not bench.scheduler.can_schedule()
    bench.answer()
    step = bench.send()
    assert rows(step) == {first: 1}
    assert (step.appended_sequence_ids, step.appended_block_ids) == ((), ())
    bench.run()
    assert bench.finished == {("r", 0): FinishReason.LENGTH}
    bench.check_tokens()


def test_a_block_is_added_only_when_the_last_is_full() -> None:
    bench = Bench()
    first = bench.add(make_spec(prompt=7, max_tokens=8))
    appended = [(bench.step().appended_sequence_ids, bench.scheduler.stats().num_free_device_blocks) for _ in range(6)]
    assert appended == [((), 62), ((), 62), ((first,), 61), ((), 61), ((), 61), ((), 61)]


def test_never_past_max_tokens() -> None:
    bench = Bench()
    first = bench.add(make_spec(max_tokens=1))
    assert rows(bench.send()) == {first: 6}
    assert bench.schedule() is None
    bench.run()
    assert len(bench.tokens["r", 0]) == 1


def test_after_nothing_to_do_a_call_is_worth_it_only_after_a_change() -> None:
    bench = Bench()
    bench.add(make_spec(max_tokens=1))
    bench.send()
    assert bench.scheduler.can_schedule()
    assert bench.schedule() is None
    assert not bench.scheduler.can_schedule()
    bench.add(make_spec("other"))
    assert bench.scheduler.can_schedule()


def test_decodes_come_before_prefills_and_pieces_share_what_is_left() -> None:
    bench = Bench(configure(max_num_batched_tokens=10))
    long = bench.add(make_spec("long", 25, 2))
    assert rows(bench.step()) == {long: 10}
    short = bench.add(make_spec("short", 3, 9))
    assert rows(bench.step()) == {long: 10}
    assert rows(bench.step()) == {long: 5, short: 3}
    longer = bench.add(make_spec("longer", 30, 2))
    assert rows(bench.step()) == {long: 1, short: 1, longer: 8}
    assert rows(bench.step()) == {short: 1, longer: 9}
    bench.run()
    bench.check_tokens()


def test_prefills_wait_when_decodes_take_the_tokens() -> None:
    bench = Bench(configure(max_prefill_chunk=2, max_num_batched_tokens=6))
    bench.add(make_spec("a", 2, 3, n=3))
    b, c, d = (bench.add(make_spec(name, 20)) for name in "bcd")
    assert rows(bench.step()) == {1: 1, b: 2, c: 2, d: 1}
    assert rows(bench.step()) == {1: 1, 2: 0, 3: 0, b: 2, c: 2, d: 1}
    assert rows(bench.step()) == {1: 1, 2: 1, 3: 1, b: 2, c: 1}
    bench.run()
    bench.check_tokens()


def test_a_piece_is_bounded() -> None:
    bench = Bench(configure(max_prefill_chunk=4))
    a, b = bench.add(make_spec("a", 10)), bench.add(make_spec("b", 5))
    assert [rows(bench.step()) for _ in range(3)] == [{a: 4, b: 4}, {a: 4, b: 1}, {b: 1, a: 2}]
    bench.run()
    bench.check_tokens()


def test_rows_are_bounded_by_sequences_and_by_tokens() -> None:
    for changes in ({"max_num_seqs": 2}, {"max_num_batched_tokens": 2}):
        bench = Bench(configure(**changes))
        for name in "abc":
            bench.add(make_spec(name, 1, 3))
        bench.step()
        assert bench.scheduler.stats().num_running == 2
        assert bench.scheduler.stats().num_waiting == 1
        bench.run()
        bench.check_tokens()


def test_first_come_first_served() -> None:
    bench = Bench(configure(max_num_seqs=1))
    for name in "cab":
        bench.add(make_spec(name, max_tokens=2))
    bench.run()
    assert [name for name, _ in bench.finished] == ["c", "a", "b"]


# Ends


def find_stop(bench: Bench, position: int) -> int:
    """The token that the usual request gets at this place, and not before."""
    return bench.generate_alone("r", 0)[position]


def test_a_stop_token_ends_late_and_what_was_sent_meanwhile_is_dropped() -> None:
    probe = Bench()
    probe.add(make_spec(max_tokens=9))
    stop = find_stop(probe, 3)
    bench = Bench()
    first = bench.add(make_spec(max_tokens=9, stop={stop}))
    bench.run()
    expected = bench.generate_alone("r", 0)
    assert bench.tokens["r", 0] == expected
    assert expected[-1] == stop
    assert bench.finished["r", 0] is FinishReason.STOP
    named = [step.step_id for step in bench.steps if first in step.sequence_ids]
    assert len(named) == len(expected) + 1  # one step was in flight
    assert bench.steps[-1].finished_sequence_ids == (first,)
    assert bench.scheduler.stats().num_completion_tokens_total == len(expected)


@pytest.mark.parametrize(("min_tokens", "stops"), [(0, True), (1, False)])
def test_the_token_at_position_p_stops_only_from_min_tokens_on(min_tokens: int, stops: bool) -> None:
    bench = Bench()
    first = bench.add(make_spec(max_tokens=4, min_tokens=min_tokens, stop={7}))
    bench.send()
    updates = bench.take(StepResult(1, (first,), (7,)))
    assert bool(updates["gateway"].ended) is stops


def test_a_stop_token_at_the_last_place_is_a_stop() -> None:
    bench = Bench()
    first = bench.add(make_spec(max_tokens=1, stop={7}))
    bench.send()
    bench.take(StepResult(1, (first,), (7,)))
    assert bench.finished["r", 0] is FinishReason.STOP


def test_owners_are_told_of_their_own() -> None:
    bench = Bench()
    bench.add(make_spec("a", owner="one", max_tokens=1))
    bench.add(make_spec("b", owner="two", max_tokens=1))
    bench.send()
    updates = bench.answer()
    assert {owner: update.sequence_ids for owner, update in updates.items()} == {"one": [1], "two": [2]}
    assert updates["one"].prefilled == [(1, 0)]


# Aborts


def test_abort_is_idempotent_and_unknown_is_false() -> None:
    bench = Bench()
    bench.add(make_spec())
    assert bench.scheduler.abort("r", 0)
    assert not bench.scheduler.abort("r")
    assert not bench.scheduler.abort("r", 5)
    assert not bench.scheduler.abort("never")
    bench.check_done()


def test_who_was_never_scheduled_is_never_named() -> None:
    bench = Bench()
    bench.add(make_spec())
    bench.scheduler.abort("r")
    assert bench.schedule() is None


def test_an_abort_in_flight_is_told_to_the_worker_and_not_to_the_owner() -> None:
    bench = Bench()
    first = bench.add(make_spec())
    bench.send()
    bench.scheduler.abort("r", 0, FinishReason.STOP)
    step = bench.send()  # a step of finished ids alone
    assert step.finished_sequence_ids == (first,)
    assert not step.sequence_ids
    assert bench.answer() == {}
    assert bench.answer() == {}
    bench.check_done()


# Answers


def test_answers_come_in_order() -> None:
    bench = Bench()
    bench.add(make_spec())
    with pytest.raises(StepMismatch):
        bench.scheduler.update(StepResult(1))
    bench.send()
    bench.send()
    with pytest.raises(StepMismatch):
        bench.scheduler.update(StepResult(2, (1,), (5,)))


@pytest.mark.parametrize(
    "result",
    [
        StepResult(1),
        StepResult(1, (2,), (5,)),
        StepResult(1, (1, 2), (5, 6)),
        StepResult(1, (1,), (5, 6)),
        StepResult(1, (), (), (1,)),
        StepResult(1, (1,), (5,), (), ((1, "both"),)),
    ],
)
def test_an_answer_that_cannot_be_is_refused_and_changes_nothing(result: StepResult) -> None:
    bench = Bench()
    bench.add(make_spec())
    bench.send()
    with pytest.raises(StepMismatch):
        bench.scheduler.update(result)
    bench.run()
    bench.check_tokens()


def test_a_sequence_that_fails_alone() -> None:
    bench = Bench()
    a, b = bench.add(make_spec("a")), bench.add(make_spec("b"))
    bench.send()
    bench.send()
    updates = bench.scheduler.update(StepResult(1, (b,), (5,), (), ((a, BROKEN),)))
    ended = updates["gateway"].ended
    assert ended == [Ending(a, FinishReason.ERROR, error=BROKEN)]
    assert not bench.scheduler.abort("a")
    bench.scheduler.update(StepResult(2, (b,), (5,), (a,)))  # known to have ended: skipped
    assert a in bench.send().finished_sequence_ids


def test_a_piece_that_fails() -> None:
    bench = Bench(configure(max_prefill_chunk=2))
    a = bench.add(make_spec("a"))
    bench.send()
    bench.send()
    assert bench.scheduler.update(StepResult(1, failures=((a, BROKEN),)))["gateway"].ended
    assert bench.scheduler.update(StepResult(2, failures=((a, BROKEN), (99, BROKEN)))) == {}
    assert not bench.scheduler.has_unfinished()


def test_the_time_of_a_step_in_which_one_fails_says_nothing_of_its_work() -> None:
    bench = Bench(configure(max_prefill_chunk=2))
    before = bench.scheduler._costs.step_time.predict(1000, 0)
    for number in range(20):
        a = bench.add(make_spec(f"a{number}"))
        step = bench.send()
        bench.scheduler.update(StepResult(step.step_id, failures=((a, BROKEN),), forward_seconds=1e-6))
    assert bench.scheduler._costs.step_time.predict(1000, 0) == before


def test_what_a_piece_that_fails_was_to_compute_is_not_found_again() -> None:
    bench = Bench(configure(max_prefill_chunk=8))
    a = bench.add(make_spec("a", tuple(range(12))))
    bench.send()
    bench.scheduler.update(StepResult(1, failures=((a, BROKEN),)))
    bench.in_flight.clear()
    b = bench.add(make_spec("b", tuple(range(12))))
    [new] = bench.send().new_sequences
    assert (new.sequence_id, new.num_computed_tokens) == (b, 0)


def test_a_leader_that_fails_takes_its_group_along() -> None:
    bench = Bench(configure(max_prefill_chunk=2))
    a = bench.add(make_spec("a", n=3))
    bench.send()
    updates = bench.scheduler.update(StepResult(1, failures=((a, BROKEN),)))
    ended = updates["gateway"].ended
    assert ended == [Ending(a + index, FinishReason.ERROR, error=BROKEN) for index in range(3)]
    [group] = bench.scheduler.take_ended()
    assert [(s.finish_reason, s.error) for s in group.sequences] == [(FinishReason.ERROR, BROKEN)] * 3
    assert not bench.scheduler.has_unfinished()


def test_stats_count() -> None:
    bench = Bench(configure(max_prefill_chunk=4))
    bench.add(make_spec("a", 8, 3))
    bench.run()
    stats = bench.scheduler.stats()
    assert stats.num_prefill_pieces_total == 2
    assert stats.num_prompt_tokens_total == 8
    assert stats.num_completion_tokens_total == 3
    assert stats.num_cached_device_blocks == 2


def test_what_is_told_of_a_sequence_that_has_ended_is_told_to_nobody() -> None:
    """Even where the worker left out what it was to tell with an earlier token."""
    config = CoreConfig(8, 20, 0, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)
    scheduler = Scheduler(config)
    sequence_id = 1
    add_request(scheduler, GroupSpec("r", "owner", (1, 2, 3), 1, 20, 0, frozenset({7})), sequence_id)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    [update] = scheduler.update(StepResult(1, (sequence_id,), (7,))).values()
    assert [end.sequence_id for end in update.ended] == [sequence_id]
    late = scheduler.update(StepResult(2, (sequence_id,), (5,), logprobs=((sequence_id, "told"),)))
    assert late == {}
    scheduler.check_integrity()


def test_the_bytes_of_new_sequences_in_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its message is larger than any that a worker takes, and so is the one after the loss of the worker."""
    monkeypatch.setattr("scheduler_service.core.step.MAX_NEW_BYTES", 1000)
    bench = Bench()
    for name, num_bytes in {"a": 600, "b": 2000, "c": 10, "d": 600, "e": 10}.items():
        bench.add(replace(make_spec(name), payload=b"p" * num_bytes))
    bench.add(make_spec("f", stop=frozenset(range(100, 300))))
    for _ in range(2):
        begun = [[sequence.spec.request_id for sequence in bench.step().new_sequences] for _ in range(4)]
        # Small ones pass those that have no room.
        assert begun == [["a", "c", "e"], ["b"], ["d"], ["f"]]
        bench.lose_worker()
    bench.run()
    bench.check_tokens()
