"""Beam search in the scheduler: forks that share blocks, beams that are dropped, preempted, lost and found again.

Everywhere the truth is the search by itself, every beam of it computed from its tokens alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from blockyard.contract.sampling import BeamSearch, EarlyStopping, FinishReason
from blockyard.contract.scheduling import SequenceError
from scheduler_service.core.sequence import Beams, Sequence, SequenceStatus
from tests.kit.oracles.model_worker import search_alone
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec

if TYPE_CHECKING:
    from scheduler_service.core.values import GroupSpec, OwnerUpdate

BEAMS = BeamSearch(4, 0.7)
NO = SequenceError("NOT_FINITE", "no")


def search_spec(
    request_id: str = "a",
    prompt: int = 6,
    max_tokens: int = 12,
    n: int = 2,
    *,
    stop: set[int] | None = None,
    beams: BeamSearch = BEAMS,
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
    bench.add(search_spec("a", prompt, n=width, beams=BeamSearch(width, 0.7, early_stopping)))
    bench.run()
    bench.check_tokens()
    assert len(bench.finished) == width


def test_a_search_is_told_at_its_end_with_reasons_and_scores() -> None:
    bench = Bench()
    spec = search_spec(max_tokens=9, n=3, stop={1, 2, 3}, beams=BeamSearch(4))
    assert bench.add(spec) == 1
    told: list[OwnerUpdate] = []
    while bench.scheduler.has_unfinished():
        bench.send()
        told += bench.answer().values()
    [prefilled, end] = told
    assert (prefilled.prefilled, prefilled.token_ids) == ([(1, 0)], [])
    best = search_alone(spec, max_model_len=200)[:3]
    assert [(e.sequence_id, e.reason, e.score) for e in end.ended] == [
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
        bench.add(search_spec(beams=BeamSearch(5)))
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
    bench.add(replace(search_spec("a", n=1, beams=BeamSearch(2)), priority=1))
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
