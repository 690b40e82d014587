"""Requests that come from elsewhere: from a scheduler that lost its worker, or from before this process began."""

from __future__ import annotations

import pytest

from blockyard.contract.sampling import FinishReason
from blockyard.contract.scheduling import SequenceRecord
from scheduler_service.core.config import KvBlockGroups, Room
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.sequence import Group, SequenceStatus
from scheduler_service.core.values import StepResult
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec


def alone(request_id: str, prompt: int, max_tokens: int, n: int = 1) -> Bench:
    """The truth: the request by itself."""
    bench = Bench()
    bench.add(make_spec(request_id, prompt, max_tokens, n=n))
    bench.run()
    return bench


def move_in(bench: Bench, group: Group) -> None:
    """Let a bench know a group that was not added to it."""
    bench.specs[group.spec.request_id] = group.spec
    for sequence in group.sequences:
        bench.names[sequence.sequence_id] = (group.spec.request_id, sequence.sequence_index)
        bench.tokens[group.spec.request_id, sequence.sequence_index] = sequence.output_token_ids
    bench.note(bench.scheduler.adopt([group]))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 6])
def test_another_scheduler_goes_on_where_the_first_was(num_steps: int) -> None:
    truth = alone("a", 6, 8, n=3)
    first, second = Bench(), Bench()
    first.add(make_spec("a", 6, 8, n=3))
    for _ in range(num_steps):
        first.step()
    [(group, _)] = first.scheduler.evacuate()
    first.scheduler.check_integrity()
    assert not first.scheduler.has_unfinished()
    move_in(second, group)
    second.run()
    assert second.tokens == truth.tokens
    assert second.scheduler.take_ended() == [group]


@pytest.mark.parametrize("lengths", [(0, 0, 0), (2, 0, 0), (2, 3, 1), (8, 4, 0), (8, 0, 0), (0, 8, 8)])
def test_a_request_goes_on_from_what_its_gateway_has(lengths: tuple[int, ...]) -> None:
    truth = alone("a", 6, 8, n=3)
    spec = make_spec("a", 6, 8, n=3)
    group = Group(spec, 40, 14, 0.0)
    outputs = [truth.tokens["a", index][:length] for index, length in enumerate(lengths)]
    ends = [FinishReason.LENGTH if length == 8 else None for length in lengths]
    group.continue_from(list(map(SequenceRecord, outputs, ends)), 0)
    assert [s.status is SequenceStatus.FINISHED for s in group.sequences] == [length == 8 for length in lengths]
    bench = Bench()
    move_in(bench, group)
    bench.run()
    assert bench.tokens == truth.tokens
    assert len(bench.finished) == sum(length < 8 for length in lengths)


def test_a_group_that_has_ended_elsewhere_has_nothing_live() -> None:
    group = Group(make_spec("a", 6, 8, n=2), 1, 14, 0.0)
    group.continue_from([SequenceRecord([1, 2], FinishReason.STOP), SequenceRecord([], FinishReason.ABORT)], 0)
    assert group.is_finished
    assert (group.live, group.unforked, group.num_outputs) == ([], [], 2)


def test_tokens_go_to_the_new_owner() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 8))
    bench.step()
    [group] = bench.scheduler._groups.values()
    group.reassign("other")
    bench.specs["a"] = group.spec
    bench.send()
    assert list(bench.answer()) == ["other"]


def test_a_stop_string_cuts_what_is_kept() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 20))
    for _ in range(8):
        bench.step()
    [group] = bench.scheduler._groups.values()
    assert bench.scheduler.abort("a", 0, FinishReason.STOP, 3)
    assert group.sequences[0].output_token_ids == bench.tokens["a", 0][:3]
    assert group.sequences[0].finish_reason is FinishReason.STOP
    assert bench.scheduler.take_ended() == [group]
    assert bench.scheduler.take_ended() == []


def test_what_comes_with_a_token_is_passed_on_once() -> None:
    bench = Bench()
    first = bench.add(make_spec("a", 6, 2, n=2))
    bench.step()
    step = bench.send()
    ids = step.sequence_ids
    told = {sequence_id: f"told {sequence_id}" for sequence_id in ids}
    result = StepResult(step.step_id, ids, (1, 1), logprobs=tuple(told.items()), prompt_logprobs=((first, "prompt"),))
    [update] = bench.scheduler.update(result).values()
    assert dict(update.logprobs) == told
    assert update.prompt_logprobs == [(first, "prompt")]
    [group] = bench.scheduler._groups.values()
    assert [sequence.logprobs for sequence in group.sequences] == [[told[first]], [told[first + 1]]]
    assert group.prompt_logprobs == ["prompt"]
    # One that has ended when the answer comes got no token, so nothing is told with it.
    late = bench.scheduler.schedule()
    assert late is not None
    bench.scheduler.abort("a", 0)
    result = StepResult(late.step_id, late.sequence_ids, (1, 1), logprobs=tuple((each, "late") for each in ids))
    [update] = bench.scheduler.update(result).values()
    assert update.logprobs == [(first + 1, "late")]


def test_what_comes_with_the_only_token_of_an_answer_is_passed_on_too() -> None:
    bench = Bench()
    first = bench.add(make_spec("a", 6, 1))
    step = bench.send()
    result = StepResult(
        step.step_id, step.sequence_ids, (1,), logprobs=((first, "told"),), prompt_logprobs=((first, "prompt"),)
    )
    [update] = bench.scheduler.update(result).values()
    assert [finished.sequence_id for finished in update.ended] == [first]
    assert update.logprobs == [(first, "told")]
    assert update.prompt_logprobs == [(first, "prompt")]


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole() -> None:
    bench = Bench()
    prompt = tuple(range(12))
    bench.add(make_spec("a", prompt, 2))
    bench.run()
    spec = make_spec("b", prompt, 2)
    for wanted in (False, True):
        group = Group(type(spec)(**{**_fields(spec), "computes_prompt": wanted}), 90, 14, 0.0)
        assert (bench.scheduler.count_cached_tokens(group) == 0) is wanted


def _fields(spec: object) -> dict[str, object]:
    return {name: getattr(spec, name) for name in type(spec).__dataclass_fields__}  # type: ignore[attr-defined]


def test_room_is_what_a_step_could_admit() -> None:
    bench = Bench(configure(max_num_seqs=4, max_num_batched_tokens=20))
    room = bench.scheduler.find_room()
    assert (room.num_tokens, room.num_rows, room.num_stuck) == (20, 4, 0)
    bench.add(make_spec("a", 6, 5, n=3))
    room = bench.scheduler.find_room()
    assert (room.num_tokens, room.num_rows) == (14, 1)
    assert room.fits(14, 1) and not room.fits(14, 2)
    # One may wait here for rows or blocks that are still held; a second waits elsewhere.
    assert room.takes(14, 2)
    room.take(14, 2)
    assert room.num_stuck == 1
    assert not room.takes(14, 2) and room.takes(14, 1)
    room.take(14, 1)
    assert not room.takes(1, 1)


def test_blocks_count_as_room() -> None:
    room = Room(100, 10, 5, KvBlockGroups(4))
    assert room.fits(16, 1) and not room.fits(17, 1)
    room.take(8, 1)
    assert room.num_blocks == 2
    assert not room.fits(8, 1)


def test_a_scheduler_counts_on_where_its_predecessor_stopped() -> None:
    bench = Bench()
    bench.add(make_spec("a", 6, 3))
    bench.run()
    successor = Scheduler(configure(num_device_blocks=30))
    successor.succeed(bench.scheduler)
    assert successor.stats().num_completion_tokens_total == 3
