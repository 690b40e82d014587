"""What goes wrong with a beam search: lost workers, aborts, and answers that cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blockyard.contract.sampling import BeamSearch, FinishReason
from blockyard.contract.scheduling import SequenceError, SequenceRecord
from scheduler_service.core.config import StepMismatch
from scheduler_service.core.sequence import Group, SequenceStatus
from scheduler_service.core.values import StepResult
from tests.unit.scheduler_service.core.beam_search.test_branching import NO, beams_of, begin, search_spec
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_search_outlives_its_worker_with_its_scores(num_steps: int, in_flight: bool) -> None:
    bench = Bench()
    begin(bench, num_steps)
    if in_flight:
        bench.send()
    lengths = [len(beam.token_ids) for beam in beams_of(bench).sequences]
    assert bench.lose_worker() == [("a", sum(lengths))]
    step = bench.send()
    assert [len(new.token_ids) for new in step.new_sequences] == lengths
    assert not step.forks
    assert not step.input_ids
    bench.run()
    bench.check_tokens()
    assert list(bench.prefilled) == ["a"]


def test_what_beams_proposed_before_a_loss_is_not_asked_again() -> None:
    bench = Bench(configure(num_device_blocks=6, enable_prefix_caching=False))
    begin(bench, 3, search_spec("a", prompt=6, max_tokens=14))
    while not beams_of(bench).candidates:
        bench.step()
    proposed = set(beams_of(bench).candidates)
    bench.lose_worker()
    statuses = {beam: beam.status for beam in beams_of(bench).sequences}
    assert {beam for beam, status in statuses.items() if status is SequenceStatus.PARKED} == proposed
    while beams_of(bench).candidates:
        assert not {beam.sequence_id for beam in proposed} & set(bench.step().sequence_ids)
    bench.run()
    bench.check_tokens()


def test_a_search_that_is_longer_than_another_workers_model_ends_as_it_is() -> None:
    bench = Bench()
    begin(bench, 6, search_spec(max_tokens=30, stop=set()))
    beams = [beam.output_token_ids for beam in beams_of(bench).sequences]
    updates = bench.change_worker(configure(max_model_len=10))
    [update] = updates.values()
    assert [end.reason for end in update.ended] == [FinishReason.LENGTH] * 2
    assert [bench.tokens["a", 0], bench.tokens["a", 1]] == beams[:2]
    bench.check_done()


def test_a_beam_that_fails_fails_its_search() -> None:
    bench = Bench()
    begin(bench, 2)
    bench.add(make_spec("b"))
    step = bench.send()
    result = bench.worker.execute(bench.in_flight.popleft())
    failed = beams_of(bench).sequences[1].sequence_id
    candidates = {key: value for key, value in (result.beam_candidates or {}).items() if key != failed}
    updates = bench.take(replace(result, beam_candidates=candidates, failures=((failed, NO),)))
    assert failed in step.sequence_ids
    ended = [(end.sequence_id, end.reason, end.error) for end in updates["gateway"].ended]
    assert ended == [(1, FinishReason.ERROR, NO), (2, FinishReason.ERROR, NO)]
    bench.finished.clear()
    bench.run()
    assert list(bench.finished) == [("b", 0)]


def test_a_beam_that_failed_in_an_earlier_piece_is_skipped_and_proposes_nothing() -> None:
    bench = Bench(configure(max_prefill_chunk=4))
    first = bench.add(search_spec("a", prompt=6))
    beam = bench.send().sequence_ids[0]
    assert bench.send().sequence_ids == (beam,)
    bench.take(StepResult(1, failures=((beam, NO),)))
    assert bench.finished == {("a", index): FinishReason.ERROR for index in range(bench.specs["a"].n)}
    assert first != beam
    bench.take(StepResult(2, skipped_sequence_ids=(beam,)))
    assert not bench.scheduler.has_unfinished()


@pytest.mark.parametrize("wrong", ["none", "fewer", "others"])
def test_an_answer_without_the_candidates_of_the_step_is_a_mismatch(wrong: str) -> None:
    bench = Bench()
    begin(bench, 2)
    step = bench.send()
    result = bench.worker.execute(step)
    candidates = dict(result.beam_candidates or {})
    if wrong == "none":
        candidates = {}
    elif wrong == "fewer":
        candidates.popitem()
    else:
        candidates[99] = ()
    with pytest.raises(StepMismatch, match="candidates of other beams"):
        bench.scheduler.update(replace(result, beam_candidates=candidates))
    bench.take(result)
    with pytest.raises(StepMismatch):
        bench.scheduler.update(StepResult(step.step_id))


@pytest.mark.parametrize("state", ["waiting", "prefilling", "in flight", "chosen", "parked"])
def test_a_search_is_aborted_as_a_whole(state: str) -> None:
    bench = Bench(configure(max_prefill_chunk=4, num_device_blocks=6 if state == "parked" else 65))
    bench.add(search_spec("a", prompt=6))
    if state != "waiting":
        bench.step()
    if state in ("in flight", "chosen", "parked"):
        while beams_of(bench).search.num_outputs < 2:
            bench.step()
    if state == "in flight":
        bench.send()
    while state == "parked" and not any(b.status is SequenceStatus.PARKED for b in beams_of(bench).sequences):
        bench.step()
    assert not bench.scheduler.abort("a", 0)
    assert bench.scheduler.abort("a")
    [group] = bench.scheduler.take_ended()
    assert [s.finish_reason for s in group.sequences] == [FinishReason.ABORT] * 2
    assert [s.output_token_ids for s in group.sequences] == [[], []]
    bench.run()
    assert not bench.finished


def test_a_search_that_waits_elsewhere_is_ended_as_a_whole() -> None:
    group = Group(search_spec(), 1, 18, 0.0)
    assert not group.end_waiting(0, FinishReason.ABORT)
    assert group.end_waiting(None, FinishReason.ABORT)
    assert group.is_finished
    assert group.live == []


def test_a_search_that_has_ended_elsewhere_has_nothing_live() -> None:
    group = Group(search_spec(), 1, 18, 0.0)
    group.continue_from([SequenceRecord([3, 1], FinishReason.STOP), SequenceRecord([4], FinishReason.LENGTH)], 0)
    assert group.is_finished
    assert (group.live, group.num_outputs) == ([], 3)


def test_a_search_has_another_owner_in_all_its_parts() -> None:
    bench = Bench()
    begin(bench, 2)
    bench.scheduler._groups["a"].reassign("other")
    bench.specs["a"] = bench.scheduler._groups["a"].spec
    bench.run()
    bench.check_tokens()


def test_fewer_continuations_than_asked_for_are_an_error_of_those_missing() -> None:
    bench = Bench()
    bench.add(search_spec(n=2, max_tokens=1, stop=set(), beams=BeamSearch(2)))
    step = bench.send()
    [sequence_id] = step.sequence_ids
    updates = bench.take(StepResult(step.step_id, beam_candidates={sequence_id: ((5, -1.0),)}))
    ends = [(end.sequence_id, end.reason, end.error) for end in updates["gateway"].ended]
    few = SequenceError("NO_TOKEN_POSSIBLE", "fewer continuations are possible than were asked for")
    assert ends == [(1, FinishReason.LENGTH, None), (2, FinishReason.ERROR, few)]
    assert (bench.tokens["a", 0], bench.tokens["a", 1]) == ([5], [])


def test_progress_is_counted_by_the_beams() -> None:
    bench = Bench()
    begin(bench, 3)
    ids = [beam.sequence_id for beam in beams_of(bench).sequences]
    assert bench.scheduler.count_outputs(ids[:1]) == {"a": 12}


def test_the_parts_of_a_search_may_be_in_several_steps() -> None:
    """Some beams are computed in one step, the others in the next one: the choice waits for all of them."""
    bench = Bench(configure(num_device_blocks=9))
    bench.add(search_spec("a", prompt=6, max_tokens=14))
    partial = 0
    while bench.scheduler.has_unfinished():
        bench.step()
        partial += bench.scheduler.has_unfinished() and bool(beams_of(bench).candidates)
    assert partial > 0
    bench.check_tokens()
