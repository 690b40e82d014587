"""Beam search in the scheduler: forks that share blocks, beams that are dropped, preempted, lost and found again.

Everywhere the truth is the search by itself, every beam of it computed from its tokens alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core.config import StepMismatch
from scheduler_service.core.sequence import Beams, Group, Sequence, SequenceStatus
from scheduler_service.core.values import (
    BeamSpec,
    EarlyStopping,
    FinishReason,
    GroupSpec,
    OwnerUpdate,
    SequenceError,
    StepResult,
)
from tests.kit.oracles.model_worker import search_alone
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec

BEAMS = BeamSpec(4, 0.7)
NO = SequenceError("NOT_FINITE", "no")


def search_spec(
    request_id: str = "a",
    prompt: int = 6,
    max_tokens: int = 12,
    n: int = 2,
    *,
    stop: set[int] | None = None,
    beams: BeamSpec = BEAMS,
) -> GroupSpec:
    return make_spec(request_id, prompt, max_tokens, n=n, stop={1, 2} if stop is None else stop, beams=beams)


def beams_of(bench: Bench, request_id: str = "a") -> Beams:
    beams = bench.scheduler._groups[request_id].beams
    assert beams
    return beams


def begin(bench: Bench, num_steps: int, spec: GroupSpec | None = None) -> list[Sequence]:
    """A search after so many choices."""
    bench.add(spec or search_spec())
    while beams_of(bench).search.num_outputs < num_steps:
        bench.step()
    return beams_of(bench).sequences


@pytest.mark.parametrize("width", [2, 3, 8])
@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("prompt", [1, 4, 6])
def test_a_search_gives_what_it_gives_alone(width: int, early_stopping: EarlyStopping, prompt: int) -> None:
    bench = Bench()
    bench.add(search_spec("a", prompt, n=width, beams=BeamSpec(width, 0.7, early_stopping)))
    bench.run()
    bench.check_tokens()
    assert len(bench.finished) == width


def test_a_search_is_told_at_its_end_with_reasons_and_scores() -> None:
    bench = Bench()
    spec = search_spec(max_tokens=9, n=3, stop={1, 2, 3}, beams=BeamSpec(4))
    assert bench.add(spec) == 1
    told: list[OwnerUpdate] = []
    while bench.scheduler.has_unfinished():
        bench.send()
        told += bench.answer().values()
    [prefilled, end] = told
    assert (prefilled.prefilled, prefilled.token_ids) == ([(1, 0)], [])
    best = search_alone(spec, max_model_len=200)[:3]
    assert [(e.sequence_id, e.reason, e.score) for e in end.finished] == [
        (place, one.reason, one.score) for place, one in enumerate(best, 1)
    ]
    assert {one.reason for one in best} == {FinishReason.STOP, FinishReason.LENGTH}
    [group] = bench.scheduler.take_ended()
    assert [(s.output_token_ids, s.finish_reason, s.score) for s in group.sequences] == [
        (one.token_ids, one.reason, one.score) for one in best
    ]
    assert bench.scheduler.stats().num_completion_tokens_total == len(end.token_ids)


def test_ids_of_a_search_are_nobody_elses() -> None:
    bench = Bench()
    assert bench.add(search_spec("a")) == 1
    assert bench.add(make_spec("b", n=2)) == 1 + 2 + 2 * 4
    assert bench.add(make_spec("c")) == 13
    bench.run()
    bench.check_tokens()


def test_a_search_needs_rows_for_all_its_beams() -> None:
    bench = Bench(configure(max_num_seqs=4))
    with pytest.raises(ValueError, match="1 to 4 sequences or beams"):
        bench.add(search_spec(beams=BeamSpec(5)))
    with pytest.raises(ValueError, match="sequences or beams"):
        bench.add(search_spec(n=5))
    bench.add(make_spec("first", 6, 3))
    bench.add(search_spec())
    assert bench.step().sequence_ids == (1,)  # three rows are not enough
    bench.run()
    bench.check_tokens()


# Forks


def test_children_are_forks_that_share_blocks_and_copy_the_last_one() -> None:
    bench = Bench()
    bench.add(search_spec("a", prompt=6))
    prefill = bench.send()
    bench.answer()
    fork = bench.send()
    parent = prefill.new_sequences[0]
    assert [f.parent_id for f in fork.forks] == [parent.sequence_id] * 3
    assert all(f.block_ids == parent.block_ids for f in fork.forks)
    assert set(fork.num_new_tokens) == {1}
    # The last block is half full: all but one need a copy of their own.
    assert [pair.source for pair in fork.blocks_to_copy] == [parent.block_ids[1]] * 3
    bench.answer()
    bench.run()
    assert bench.scheduler.stats().num_copied_blocks_total >= 3
    bench.check_tokens()


def test_at_the_end_of_a_block_nothing_is_copied() -> None:
    bench = Bench()
    begin(bench, 1, search_spec("a", prompt=4))
    step = bench.send()
    assert len(step.forks) == 3
    assert not step.blocks_to_copy
    assert step.appended_sequence_ids == step.sequence_ids


def test_every_decode_of_a_beam_has_its_token_from_the_scheduler() -> None:
    bench = Bench()
    begin(bench, 3)
    beams = beams_of(bench).sequences
    step = bench.send()
    assert dict(step.input_ids) == {beam.sequence_id: beam.token_ids[-1] for beam in beams}
    assert sorted(step.sequence_ids) == sorted(dict(step.input_ids))


def test_who_is_dropped_is_forgotten_and_its_id_comes_again_later() -> None:
    bench = Bench()
    begin(bench, 1)
    used: dict[int, int] = {}
    while bench.scheduler.has_unfinished():
        step = bench.step()
        for fork in step.forks:
            assert fork.child_id not in step.finished_sequence_ids
            used[fork.child_id] = used.get(fork.child_id, 0) + 1
    assert max(used.values()) > 1
    assert len(used) <= 8
    bench.run()


def test_a_beam_has_one_step_in_flight_and_the_others_keep_their_two() -> None:
    bench = Bench()
    begin(bench, 2)
    bench.add(make_spec("b", 3, 20))
    bench.step()
    first, second = bench.send(), bench.send()
    assert len(first.sequence_ids) == 5
    assert len(second.sequence_ids) == 1
    assert not bench.scheduler.can_schedule()
    bench.answer()
    assert len(bench.send().sequence_ids) == 5
    bench.run()
    bench.check_tokens()


def test_a_search_alone_waits_for_its_answers() -> None:
    bench = Bench()
    begin(bench, 2)
    bench.send()
    assert bench.schedule() is None
    assert not bench.scheduler.can_schedule()


def test_a_prompt_in_pieces_or_in_the_cache_is_no_matter() -> None:
    bench = Bench(configure(max_prefill_chunk=4))
    bench.add(search_spec("a", prompt=11))
    bench.add(replace(search_spec("b"), prompt_token_ids=bench.specs["a"].prompt_token_ids))
    bench.run()
    bench.check_tokens()
    bench.add(replace(search_spec("c"), prompt_token_ids=bench.specs["a"].prompt_token_ids))
    bench.run()
    bench.check_tokens()
    assert bench.prefilled["c"] == 8


# Too little room


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("num_device_blocks", [6, 7, 9, 12])
def test_a_search_in_a_cache_that_holds_hardly_one_beam(mode: str, num_device_blocks: int) -> None:
    bench = Bench(configure(num_device_blocks=num_device_blocks, preemption_mode=mode))
    bench.add(search_spec("a", prompt=6))
    bench.add(search_spec("b", prompt=7, n=4))
    bench.run()
    bench.check_tokens()
    assert len(bench.finished) == 6
    assert bench.scheduler.stats().num_preemptions_total > 0


def test_beams_that_wait_for_others_make_way_for_them() -> None:
    """Blocks for one beam and a half: each is computed in its turn, and what the others proposed is kept."""
    bench = Bench(configure(num_device_blocks=6, enable_prefix_caching=False))
    bench.add(search_spec("a", prompt=6, max_tokens=14))
    parked: set[int] = set()
    while bench.scheduler.has_unfinished():
        bench.step()
        if bench.scheduler.has_unfinished():
            statuses = [beam.status for beam in beams_of(bench).sequences]
            parked.add(statuses.count(SequenceStatus.PARKED))
    bench.run()
    bench.check_tokens()
    assert max(parked) >= 2


def test_a_child_for_which_no_row_is_free_waits_to_be_prefilled() -> None:
    bench = Bench(configure(max_num_seqs=4, num_device_blocks=14))
    bench.add(search_spec("a", prompt=6, max_tokens=20))
    bench.add(make_spec("b", 5, 20, n=2))
    bench.add(make_spec("c", 5, 20, n=2))
    bench.run()
    bench.check_tokens()
    assert len(bench.finished) == 6


def test_a_beam_whose_parent_gave_way_in_the_same_step_begins_with_its_blocks() -> None:
    """It is no fork any more, for the parent's row is not what it was; its tokens have their KV all the same."""
    bench = Bench(configure(max_num_seqs=4, aging_seconds=1e6, policy="priority"))
    bench.add(replace(search_spec("a", n=1, beams=BeamSpec(2)), priority=1))
    bench.step()
    parent, child = beams_of(bench).sequences
    assert child.forked_from is parent
    preemption = bench.scheduler._planner.preemption
    queues = bench.scheduler._queues
    # As if somebody urgent had taken the parent's place, and the parent had begun again behind it.
    queues.take_victim(parent)
    preemption.start_over(parent)
    step = bench.send()
    [new] = [new for new in step.new_sequences if new.sequence_id == child.sequence_id]
    assert not step.forks
    assert new.num_computed_tokens == len(new.token_ids) - 1 == 6
    assert child.sequence_id not in dict(step.input_ids)
    bench.run()
    bench.check_tokens()


# What goes wrong


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
    assert [end.reason for end in update.finished] == [FinishReason.LENGTH] * 2
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
    ended = [(end.sequence_id, end.reason, end.error) for end in updates["gateway"].finished]
    assert ended == [(1, FinishReason.ERROR, NO), (2, FinishReason.ERROR, NO)]
    bench.finished.clear()
    bench.run()
    assert list(bench.finished) == [("b", 0)]


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
    with pytest.raises(StepMismatch, match="candidates of beams"):
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
    group.continue_from([[3, 1], [4]], [FinishReason.STOP, FinishReason.LENGTH])
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
    bench.add(search_spec(n=2, max_tokens=1, stop=set(), beams=BeamSpec(2)))
    step = bench.send()
    [sequence_id] = step.sequence_ids
    updates = bench.take(StepResult(step.step_id, beam_candidates={sequence_id: ((5, -1.0),)}))
    ends = [(end.sequence_id, end.reason, end.error) for end in updates["gateway"].finished]
    few = SequenceError("NO_TOKEN_POSSIBLE", "there are fewer continuations than asked for")
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
