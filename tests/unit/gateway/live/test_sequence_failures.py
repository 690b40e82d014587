"""Sequences that fail by themselves: told with their ends, and the request ends so if all of it did."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from blockyard.contract.codec.scheduling import encode_submission
from blockyard.contract.events import Finished
from blockyard.contract.request import OnDisconnect, Position
from blockyard.contract.sampling import FinishReason, SamplingParams
from blockyard.contract.scheduling import Acceptance, Ending, Resumed, SequenceError, SequenceRecord
from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    import pytest

    from gateway.live.reader import Reader
    from tests.unit.gateway.core import Core

ERROR, LENGTH = FinishReason.ERROR, FinishReason.LENGTH
NO_NUMBERS = BlockyardError(Reason.NOT_FINITE, "no numbers")
NO_TOKEN = BlockyardError(Reason.NO_TOKEN_POSSIBLE, "nothing is left")


def fail(core: Core, sequence_id: int, *token_ids: int, error: BlockyardError | None = NO_NUMBERS) -> None:
    """A sequence gets its last tokens and fails."""
    told = SequenceError(str(error.reason), error.message) if error else None
    ended = [Ending(sequence_id, ERROR, None, told)]
    core.told(sequence_ids=[sequence_id] * len(token_ids), token_ids=list(token_ids), ended=ended)


async def read(reader: Reader) -> tuple[list[Any], BlockyardError | None]:
    """The events, and what they end with."""
    events: list[Any] = []
    try:
        async for event in reader:
            events.append(event)
    except BlockyardError as error:
        return events, error
    return events, None


def ends_of(events: list[Any]) -> dict[int, tuple[FinishReason, BlockyardError | None]]:
    return {event.index: (event.finish_reason, event.error) for event in events if isinstance(event, Finished)}


async def test_one_that_fails_leaves_its_neighbours_alone(core: Core) -> None:
    reader = await core.accepted(n=2)
    fail(core, 11, 40, 41)
    core.tokens(10, 20, 21, 22, end=LENGTH)
    events, error = await read(reader)
    assert error is None
    assert ends_of(events) == {0: (LENGTH, None), 1: (ERROR, NO_NUMBERS)}
    [failed] = [event for event in events if isinstance(event, Finished) and event.index == 1]
    assert failed.usage.num_completion_tokens == 2


async def test_a_request_of_which_all_fail_ends_with_the_first_ones_error(core: Core) -> None:
    reader = await core.accepted(n=2)
    fail(core, 10, 20)
    fail(core, 11, error=NO_TOKEN)
    events, error = await read(reader)
    assert ends_of(events) == {0: (ERROR, NO_NUMBERS), 1: (ERROR, NO_TOKEN)}
    assert error == NO_NUMBERS


async def test_the_log_and_the_metrics_tell_a_request_of_which_all_fail_as_failed(
    core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await core.accepted("whole", n=2)
    fail(core, 10)
    core.tokens(11, 20, end=LENGTH)
    await core.accepted("none", first=20)
    fail(core, 20)
    finished = {labels: value for labels, value in core.live.metrics.finished.samples() if value}
    assert sorted(finished.values()) == [1, 1] and any("NOT_FINITE" in labels for labels in finished)
    assert [record.message for record in caplog.records] == ["request finished", "request failed"]


async def test_one_that_fails_before_its_prompt_is_computed_keeps_nobody_waiting(core: Core) -> None:
    """Its log probabilities of the prompt, which go before all else, never come."""
    reader = await core.accepted(sampling=SamplingParams(prompt_logprobs=0))
    fail(core, 10)
    async with asyncio.timeout(20):
        events, error = await read(reader)
    assert [type(event) for event in events] == [Finished]
    assert error == NO_NUMBERS


async def test_a_failure_without_a_word_is_a_bug(core: Core) -> None:
    reader = await core.accepted()
    fail(core, 10, error=None)
    _, error = await read(reader)
    assert error is not None and error.reason is Reason.BUG


async def test_who_asks_again_is_told_the_same(core: Core) -> None:
    first = await core.accepted(on_disconnect=OnDisconnect.KEEP)
    fail(core, 10, 20)
    told = await read(first)
    assert told[1] == NO_NUMBERS
    again = await core.resume("r")
    events, error = await read(again)
    assert (ends_of(events), error) == (ends_of(told[0]), NO_NUMBERS)
    # Even who has been told of every end already.
    _, error = await read(await core.resume("r", positions={0: Position(1, 1, finished=True)}))
    assert error == NO_NUMBERS


async def test_another_scheduler_is_told_why_a_sequence_failed(core: Core) -> None:
    reader = await core.accepted(n=2)
    fail(core, 11, 40)
    core.lost()
    core.attached()
    again = core.link.adds[1]
    assert again.resubmission is not None
    record = again.resubmission.sequences[1]
    assert (record.reason, record.error) == (ERROR, SequenceError("NOT_FINITE", "no numbers"))
    core.told(accepted=[Acceptance(again.handle, 30)])
    core.tokens(30, 22, end=LENGTH)
    events, error = await read(reader)
    assert (ends_of(events), error) == ({0: (LENGTH, None), 1: (ERROR, NO_NUMBERS)}, None)


async def test_another_gateway_learns_why_a_sequence_failed(core: Core) -> None:
    submission = await core.submission_of("r")
    task = asyncio.ensure_future(core.resume("r"))
    await asyncio.sleep(0)
    [question] = core.link.resumes
    record = SequenceRecord((7,), ERROR, error=SequenceError("NO_TOKEN_POSSIBLE", NO_TOKEN.message))
    core.told(resumed=[Resumed(question.handle, encode_submission(submission), 50, [record])])
    events, error = await read(await task)
    assert (ends_of(events), error) == ({0: (ERROR, NO_TOKEN)}, NO_TOKEN)
