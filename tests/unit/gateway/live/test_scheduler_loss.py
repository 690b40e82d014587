"""What the core does when its scheduler is gone and another one comes, or the same one again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from blockyard.contract.codec.scheduling import encode_submission
from blockyard.contract.events import Accepted, Delta, Finished, Recovered, Usage
from blockyard.contract.request import OnDisconnect
from blockyard.contract.sampling import Candidates, FinishReason, PredictionUsage, SamplingParams, StopCriteria
from blockyard.contract.scheduling import (
    Abort,
    AbortReason,
    Acceptance,
    Add,
    Ending,
    Failure,
    Prefill,
    Resumed,
    SequenceRecord,
)
from blockyard.errors import BlockyardError, Reason
from tests.unit.gateway.core import Core, passed
from tests.unit.gateway.harness import END_TOKEN, demo_tokenizer, ids_of

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def resumed(add: Add, *sequences: SequenceRecord, first: int = 50, **fields: Any) -> Resumed:
    """What a scheduler tells that has the request."""
    submission = encode_submission(replace(add.submission, remaining_seconds=None))
    return Resumed(add.handle, submission, first, sequences, **fields)


def outputs(add: Add) -> list[list[int]]:
    """The tokens that a request was sent again with."""
    assert add.resubmission is not None
    return [list(record.token_ids) for record in add.resubmission.sequences]


async def events_of(reader: Any) -> list[Any]:
    return [event async for event in reader]


async def test_a_request_is_sent_again_with_what_has_come_and_goes_on_behind_it(core: Core) -> None:
    reader = await core.accepted(return_token_ids=True)
    core.told(prefilled=[Prefill(10, 1)], sequence_ids=[10, 10], token_ids=[20, 21])
    core.lost()
    core.attached()
    again = core.link.adds[1]
    assert again.handle != core.link.adds[0].handle
    assert again.submission == core.link.adds[0].submission
    assert outputs(again) == [[20, 21]]
    assert again.resubmission is not None and again.resubmission.num_cached_tokens == 1
    core.told(accepted=[Acceptance(again.handle, 30)])
    core.tokens(30, 22, end=LENGTH)
    before, recovered, after, finished = await events_of(reader)
    assert (before.token_ids, after.token_ids) == ((20, 21), (22,))
    # The prompt's two tokens and the two that had come.
    assert recovered == Recovered("the scheduler was lost", 4, True)
    assert finished == Finished(0, LENGTH, None, Usage(2, 1, 3), "id")


@pytest.mark.parametrize("facts", [{"determinism_id": "other"}, {"batch_invariant": False}])
async def test_another_build_goes_on_inexactly(core: Core, facts: dict[str, Any]) -> None:
    reader = await core.accepted()
    core.lost()
    core.attached(**facts)
    core.told(accepted=[Acceptance(core.link.adds[1].handle, 30)])
    core.tokens(30, 22, end=LENGTH)
    recovered, _, finished = await events_of(reader)
    assert not recovered.exact and finished.determinism_id == ""


async def test_a_scheduler_that_forgot_nothing_goes_on_where_it_is(core: Core) -> None:
    reader = await core.accepted(n=2, return_token_ids=True)
    core.told(sequence_ids=[10, 11, 10], token_ids=[20, 40, 21])
    core.lost()
    core.attached()
    again = core.link.adds[1]
    assert outputs(again) == [[20, 21], [40]]
    # It went on meanwhile: one sequence has ended.
    core.told(resumed=[resumed(again, SequenceRecord((20, 21, 22)), SequenceRecord((40, 41), LENGTH))])
    core.tokens(50, 23, end=LENGTH)
    events = await events_of(reader)
    assert not any(isinstance(event, Recovered) for event in events)
    token_ids: dict[int, tuple[int, ...]] = {0: (), 1: ()}
    for delta in (event for event in events if isinstance(event, Delta)):
        token_ids[delta.index] += delta.token_ids
    assert token_ids == {0: (20, 21, 22, 23), 1: (40, 41)}


async def test_what_became_of_a_prediction_is_told_from_what_the_scheduler_knows(core: Core) -> None:
    reader = await core.accepted(sampling=SamplingParams(predicted_token_ids=(20, 21)))
    core.told(sequence_ids=[10, 10], token_ids=[20, 21], predictions=[(10, PredictionUsage(1, 3))])
    core.lost()
    core.attached()
    again = core.link.adds[1]
    [record] = again.resubmission.sequences if again.resubmission else ()
    assert record.prediction == PredictionUsage(1, 3)
    core.told(resumed=[resumed(again, SequenceRecord((20, 21, 22), prediction=PredictionUsage(2, 3)))])
    core.told(sequence_ids=[50], token_ids=[23], predictions=[(50, PredictionUsage(2, 4)), (50, PredictionUsage(2, 5))])
    core.tokens(50, 24, end=LENGTH)
    finished = (await events_of(reader))[-1]
    assert isinstance(finished, Finished) and finished.usage.prediction == PredictionUsage(2, 5)


async def test_a_scheduler_that_knows_less_repeats_what_is_here(core: Core) -> None:
    reader = await core.accepted(return_token_ids=True, sampling=SamplingParams(logprobs=0))
    core.told(sequence_ids=[10] * 3, token_ids=[20, 21, 22], logprobs=[(10, entry(i)) for i in (20, 21, 22)])
    core.lost()
    core.attached()
    # Another gateway, which had less of it, was there first.
    core.told(resumed=[resumed(core.link.adds[1], SequenceRecord((20,), logprobs=(entry(20),)))])
    core.told(
        sequence_ids=[50] * 3, token_ids=[21, 22, 23], logprobs=[(50, entry(token_id)) for token_id in (21, 22, 23)]
    )
    core.tokens(50, END_TOKEN, end=STOP)
    events = await events_of(reader)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [i for delta in deltas for i in delta.token_ids] == [20, 21, 22, 23, END_TOKEN]
    told = [each.chosen.token_id for delta in deltas for each in delta.logprobs if each.chosen]
    assert told == [20, 21, 22, 23]


def entry(token_id: int) -> Candidates:
    return Candidates([token_id], [-1.0], [1])


async def test_a_request_that_was_not_accepted_is_sent_as_a_new_one(core: Core) -> None:
    reader = await core.start()
    core.lost()
    core.attached()
    assert [add.resubmission for add in core.link.adds] == [None, None]
    core.told(accepted=[Acceptance(core.link.adds[0].handle, 10), Acceptance(core.link.adds[1].handle, 30)])
    core.tokens(10, 20)
    core.tokens(30, 22, end=LENGTH)
    events = await events_of(reader)
    assert [type(event) for event in events] == [Accepted, Delta, Finished]


async def test_new_requests_wait_and_go_behind_those_that_were_accepted(core: Core) -> None:
    old = await core.accepted("old")
    core.lost()
    new = await core.start("new")
    assert len(core.link.adds) == 1
    core.attached()
    assert [add.submission.request_id for add in core.link.adds[1:]] == ["old", "new"]
    for reader in (old, new):
        await reader.aclose()


async def test_a_request_may_end_here_while_there_is_no_scheduler(core: Core) -> None:
    stopped = await core.accepted("stopped", 10, stop=StopCriteria(stop_strings=("cat",)))
    closed = await core.accepted("closed", 20)
    core.tokens(10, *ids_of("a cat"))
    core.lost()
    await closed.aclose()
    assert isinstance((await events_of(stopped))[-1], Finished)
    assert core.link.aborts == []
    core.attached()
    # What is whole is sent for others to find.
    [again] = core.link.adds[2:]
    assert again.resubmission is not None
    assert again.resubmission.sequences[0].reason is STOP


async def test_a_stop_string_in_what_came_last_is_found_before_it_is_sent_again(core: Core) -> None:
    reader = await core.accepted(n=2, stop=StopCriteria(stop_strings=("cat",)))
    core.tokens(10, *ids_of("a cat"), 20)
    core.tokens(11, 20)
    core.lost()
    core.attached()
    again = core.link.adds[1]
    assert again.resubmission is not None
    assert [record.reason for record in again.resubmission.sequences] == [STOP, None]
    assert outputs(again) == [ids_of("a cat"), [20]]
    # The scheduler had forgotten nothing, and runs on with what has ended here.
    core.told(resumed=[resumed(again, SequenceRecord((*ids_of("a cat"), 20, 21)), SequenceRecord((20,)))])
    assert core.link.aborts == [Abort(again.handle, "r", AbortReason.STOP_STRING, 0, len(ids_of("a cat")))]
    core.tokens(50, 22)
    core.tokens(51, 23, end=LENGTH)
    ends = {event.index: event for event in await events_of(reader) if isinstance(event, Finished)}
    assert (ends[0].matched_stop, ends[0].usage.num_completion_tokens) == ("cat", len(ids_of("a cat")))
    assert (ends[1].finish_reason, ends[1].usage.num_completion_tokens) == (LENGTH, 2)


async def test_a_stop_string_that_another_gateway_saw_is_seen_here_too(core: Core) -> None:
    reader = await core.accepted(stop=StopCriteria(stop_strings=("cat",)))
    core.tokens(10, *ids_of("a cat"), end=STOP)
    delta, finished = await events_of(reader)
    assert (delta.text, finished.matched_stop) == ("a ", "cat")


async def test_whole_answers_are_sent_again_for_other_gateways(core: Core) -> None:
    reader = await core.accepted()
    core.tokens(10, 20, 21, end=LENGTH)
    core.lost()
    core.attached()
    again = core.link.adds[1]
    assert again.resubmission is not None
    assert [(list(r.token_ids), r.reason) for r in again.resubmission.sequences] == [([20, 21], LENGTH)]
    core.told(accepted=[Acceptance(again.handle, 30)])
    assert core.live.num_running == 0
    # Once is enough, however often the facts change.
    core.attached()
    assert len(core.link.adds) == 2
    assert not any(isinstance(event, Recovered) for event in await events_of(reader))


async def test_a_whole_answer_that_the_scheduler_still_runs_is_stopped_there(core: Core) -> None:
    await core.accepted(stop=StopCriteria(stop_strings=("cat",)))
    core.tokens(10, *ids_of("a cat"), *[20] * 30)
    core.lost()
    core.link.sent.clear()
    core.attached()
    [again] = core.link.adds
    core.told(resumed=[resumed(again, SequenceRecord((*ids_of("a cat"), *[20] * 40)))])
    assert core.link.aborts == [Abort(again.handle, "r", AbortReason.STOP_STRING, 0, len(ids_of("a cat")))]


async def test_a_whole_answer_does_not_end_the_request_where_less_of_it_is(core: Core) -> None:
    await core.accepted()
    core.tokens(10, 20, 21, 22, end=LENGTH)
    core.lost()
    core.link.sent.clear()
    core.attached()
    [again] = core.link.adds
    # Another gateway, which has a token less, was there first: its clients need the last token.
    core.told(resumed=[resumed(again, SequenceRecord((20, 21)))])
    # This gateway leaves, and the other one reads on.
    assert core.link.aborts == [Abort(again.handle, "r")]


async def test_numbers_that_came_do_not_end_the_request_where_they_are_not(core: Core) -> None:
    """Of a pooling request, which has no tokens by which its progress could be told."""
    await core.accepted()
    core.told(ended=[Ending(10, LENGTH)], pooled=[(10, b"\0\0\x80?")])
    core.lost()
    core.link.sent.clear()
    core.attached()
    [again] = core.link.adds
    core.told(resumed=[resumed(again, SequenceRecord(()))])
    assert core.link.aborts == [Abort(again.handle, "r")]


async def test_a_scheduler_that_is_lost_while_it_repeats_tokens_leaves_none_out(core: Core) -> None:
    reader = await core.accepted()
    core.tokens(10, 20, 21, 22)
    core.lost()
    core.attached()
    # Another gateway brought the request without a token: those that this one has come again.
    core.told(resumed=[resumed(core.link.adds[-1], SequenceRecord(()))])
    core.tokens(50, 20)
    core.lost()
    core.attached()
    # The next scheduler has what this gateway brings, and repeats nothing.
    core.told(accepted=[Acceptance(core.link.adds[-1].handle, 60)])
    core.tokens(60, 23, 24, end=LENGTH)
    [finished] = [event for event in await events_of(reader) if isinstance(event, Finished)]
    assert finished.usage.num_completion_tokens == 5


async def test_a_sequence_does_not_end_where_less_of_it_is(core: Core) -> None:
    reader = await core.accepted(n=2)
    core.told(sequence_ids=[10, 10, 11], token_ids=[20, 21, 40], ended=[Ending(10, LENGTH)])
    core.lost()
    core.attached()
    again = core.link.adds[-1]
    core.told(resumed=[resumed(again, SequenceRecord((20,)), SequenceRecord((40,)))])
    assert core.link.aborts == []
    core.tokens(50, 21, end=LENGTH)
    core.tokens(51, 41, end=LENGTH)
    ends = [event for event in await events_of(reader) if isinstance(event, Finished)]
    assert [(event.index, event.usage.num_completion_tokens) for event in ends] == [(0, 2), (1, 2)]


async def test_what_is_refused_when_it_is_sent_again_fails(core: Core) -> None:
    reader = await core.accepted()
    whole = await core.accepted("whole", 20)
    core.tokens(20, 21, end=LENGTH)
    core.lost()
    core.attached()
    error = BlockyardError(Reason.NEVER_FITS, "smaller now")
    core.told(failed=[Failure(add.handle, error) for add in core.link.adds[2:]])
    with pytest.raises(BlockyardError) as raised:
        await events_of(reader)
    assert raised.value is error
    assert isinstance((await events_of(whole))[-1], Finished)


async def test_no_scheduler_is_waited_for_only_so_long() -> None:
    core = Core(max_scheduler_wait_seconds=0.05)
    old = await core.accepted("old")
    core.tokens(10, 20)
    core.lost()
    core.link.message = "the scheduler is gone"
    new = await core.start("new")
    assert isinstance(await anext(old), Delta)
    for reader in (old, new):
        with pytest.raises(BlockyardError) as raised:
            async with asyncio.timeout(10):
                await events_of(reader)
        error = raised.value
        assert (error.reason, error.message) == (Reason.NO_READY_WORKER, "the scheduler is gone")
        assert error.retry_after_seconds == 1.0
    assert core.live.num_running == 0


async def test_a_scheduler_that_comes_in_time_ends_the_wait() -> None:
    core = Core(max_scheduler_wait_seconds=0.05)
    reader = await core.accepted()
    core.lost()
    core.attached()
    core.told(accepted=[Acceptance(core.link.adds[1].handle, 30)])
    await passed(0.1)
    core.tokens(30, 20, end=LENGTH)
    assert isinstance((await events_of(reader))[-1], Finished)


async def test_a_queue_deadline_holds_without_a_scheduler_too(core: Core) -> None:
    core.link.takes_requests = False
    reader = await core.start(max_queue_seconds=0.05)
    with pytest.raises(BlockyardError) as raised:
        async with asyncio.timeout(10):
            await anext(reader)
    assert raised.value.reason is Reason.QUEUE_DEADLINE


async def test_times_that_go_to_the_scheduler_are_those_that_are_left(core: Core) -> None:
    core.link.takes_requests = False
    begin = time.monotonic()
    reader = await core.start(max_queue_seconds=50.0, remaining_seconds=100.0)
    await passed(0.02)
    core.attached()
    seconds = time.monotonic() - begin
    [add] = core.link.adds
    assert add.submission.max_queue_seconds is not None and add.submission.remaining_seconds is not None
    assert 50.0 - seconds <= add.submission.max_queue_seconds < 49.99
    assert 100.0 - seconds <= add.submission.remaining_seconds < 99.99
    core.told(accepted=[Acceptance(add.handle, 10)])
    core.lost()
    core.attached()
    again = core.link.adds[1]
    # The scheduler knows its age.
    assert again.submission.max_queue_seconds == 50.0
    assert again.resubmission is not None and again.resubmission.age_seconds >= 0.02
    await reader.aclose()


async def test_a_kept_request_is_sent_again_though_nobody_reads_it(core: Core) -> None:
    reader = await core.accepted(on_disconnect=OnDisconnect.KEEP)
    await reader.aclose()
    core.lost()
    core.attached()
    assert len(core.link.adds) == 2
    assert core.link.aborts == []


async def test_texts_that_are_cut_within_a_character_go_on(core: Core) -> None:
    token_ids = ids_of("wörld 😀 there")
    reader = await core.accepted()
    for number, token_id in enumerate(token_ids):
        core.tokens(core.first, token_id)
        core.lost()
        core.attached()
        assert outputs(core.link.adds[-1]) == [token_ids[: number + 1]]
        core.first = 100 * (number + 1)
        core.told(accepted=[Acceptance(core.link.adds[-1].handle, core.first)])
    core.tokens(core.first, END_TOKEN, end=STOP)
    events = await events_of(reader)
    text = "".join(event.text for event in events if isinstance(event, Delta))
    assert text == demo_tokenizer().decode(token_ids)
    assert sum(isinstance(event, Recovered) for event in events) == len(token_ids)
