from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.contract.events import Accepted, Delta, Event, Finished, Recovered, Usage
from blockyard.contract.sampling import FinishReason
from tests.kit.oracles.transcript import Transcript, difference, read

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

ACCEPTED = Accepted("r", 3, 1, "m")
FINISHED = Finished(0, FinishReason.STOP, "é", Usage(3, 0, 2), "d")
FIRST = Delta(0, "né", (7,), 1, 3)
SECOND = Delta(0, "e", (8,), 2, 4)
WHOLE = [ACCEPTED, FIRST, Recovered("x", 5, True), SECOND, FINISHED]


async def stream(events: Iterable[Event]) -> AsyncIterator[Event]:
    for event in events:
        yield event


async def transcript_of(events: Iterable[Event]) -> Transcript:
    transcript = Transcript()
    await read(stream(events), transcript)
    return transcript


async def test_an_answer_is_put_together() -> None:
    transcript = await transcript_of(WHOLE)
    sequence = transcript.sequences[0]
    assert (sequence.text, sequence.token_ids, sequence.end) == ("née", (7, 8), (FinishReason.STOP, "é", 2))
    assert transcript.num_tokens == 2
    assert [recovered.num_replayed_tokens for recovered in transcript.recoveries] == [5]
    assert transcript.longest_gap_at > 0


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([FIRST], "accepted comes first"),
        ([ACCEPTED, ACCEPTED], "accepted comes first and once"),
        ([ACCEPTED, FIRST, FIRST], "a token is lost or came twice"),
        ([ACCEPTED, SECOND], "a token is lost or came twice"),
        ([ACCEPTED, Delta(0, "né", (7,), 1, 2)], "text is lost or came twice"),
        ([ACCEPTED, FIRST, FINISHED, SECOND], "goes on after its end"),
        ([ACCEPTED, FIRST, FINISHED, FINISHED], "ends twice"),
        ([ACCEPTED, FIRST], r"sequences \[0\] have no end"),
        ([ACCEPTED], "have no end"),
    ],
)
async def test_what_is_wrong_is_told(events: list[Event], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        await transcript_of(events)


async def test_answers_are_compared_however_they_came() -> None:
    whole = await transcript_of(WHOLE)
    at_once = await transcript_of([ACCEPTED, Delta(0, "née", (7, 8), 2, 4), FINISHED])
    assert difference(at_once, whole) == ""


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([ACCEPTED, Delta(0, "née", (7, 9), 2, 4), FINISHED], "sequence 0: token 1 is 9, where 8 was due"),
        ([ACCEPTED, Delta(0, "nee", (7, 8), 2, 3), FINISHED], "sequence 0: text 'nee', due 'née'"),
        ([ACCEPTED, FIRST, FINISHED], "sequence 0: text 'né', due 'née'"),
        (
            [ACCEPTED, FIRST, SECOND, Finished(0, FinishReason.LENGTH, None, Usage(3, 0, 2), "d")],
            "sequence 0: end .* due ",
        ),
        ([ACCEPTED, Finished(1, FinishReason.STOP, None, Usage(), "d")], r"sequences \[1\], where \[0\] were due"),
    ],
)
async def test_a_difference_is_told(events: list[Event], told: str) -> None:
    whole = await transcript_of(WHOLE)
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(difference(await transcript_of(events), whole))
