"""The ids of a stream's events, written and read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.contract.events import Accepted, Delta, Finished, PromptLogprobs, TokenLogprobs, Usage
from blockyard.contract.request import Position
from blockyard.contract.sampling import FinishReason
from blockyard.errors import BlockyardError, Reason
from gateway.fronts.openai.call_spec import CallSpec
from gateway.fronts.openai.event_ids import MAX_CHOICES, StreamPosition, StreamTracker, parse
from gateway.request import GenerationRequest


def call(*, num_requests: int = 1, n: int = 1) -> CallSpec:
    return CallSpec("c", is_chat=False, requests=(GenerationRequest("a", n=n),) * num_requests)


def delta(index: int, num_tokens: int, num_text_bytes: int) -> Delta:
    return Delta(index, "x", (), num_tokens, num_text_bytes)


def end(index: int = 0) -> Finished:
    return Finished(index, FinishReason.STOP, None, Usage(1, 0, 1), "")


def test_an_id_names_all_choices() -> None:
    places = StreamTracker(call(num_requests=2, n=2), StreamPosition())
    assert places.id() == "0:0:0,1:0:0,2:0:0,3:0:0"
    assert places.take(0, delta(1, 12, 57))
    assert places.take(1, delta(0, 3, 11))
    assert places.take(1, end())
    assert places.id() == "0:0:0,1:12:57,2:3:11f,3:0:0"
    assert places.id(usage=True) == "0:0:0,1:12:57,2:3:11f,3:0:0,u"


def test_it_reads_what_it_writes() -> None:
    told = parse("0:0:0,1:12:57,2:3:11f,3:0:0,u")
    assert told.positions == {
        0: Position(0, 0),
        1: Position(12, 57),
        2: Position(3, 11, finished=True),
        3: Position(0, 0),
    }
    assert (told.prompts, told.usage, told.has_begun) == ({1, 2}, True, True)
    assert told.positions_of(1, 2) == {0: Position(3, 11, finished=True), 1: Position(0, 0)}


def test_nothing_is_the_beginning() -> None:
    assert parse("") == StreamPosition()
    assert not parse("").has_begun


WRONG = ["x", "0:1", "0:1:2g", "0:1:2,", "0:1:2,0:1:3", "0:-1:2", "u,0:1:2", "0:1:2,u,u", "٣:1:2"]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(BlockyardError, match="Last-Event-ID") as raised:
        parse(text)
    assert raised.value.reason is Reason.FIELD_INVALID


def test_a_choice_that_is_not_there_is_refused() -> None:
    with pytest.raises(BlockyardError, match="Last-Event-ID"):
        StreamTracker(call(n=2), parse("2:1:1"))


def test_what_was_told_is_not_new() -> None:
    places = StreamTracker(call(n=2), parse("0:5:20,1:2:9f"))
    assert not places.take(0, delta(0, 5, 20))
    assert not places.take(0, delta(1, 2, 9))
    assert not places.take(0, end(1))
    assert places.take(0, delta(0, 5, 21))
    assert places.take(0, delta(0, 6, 21))
    assert places.take(0, end(0))
    assert places.id() == "0:6:21f,1:2:9f"
    assert places.take(0, Accepted("c", 1, 1, "m"))


def test_log_probabilities_of_a_prompt_are_told_once() -> None:
    event = PromptLogprobs((TokenLogprobs(None),))
    places = StreamTracker(call(num_requests=2), StreamPosition())
    assert places.take(1, event)
    assert places.id() == "0:0:0,1:0:0p"
    again = StreamTracker(call(num_requests=2), parse(places.id()))
    assert again.take(0, event)
    assert not again.take(1, event)
    # Where tokens have come, they came before.
    assert not StreamTracker(call(), parse("0:1:0")).take(0, event)


def test_a_call_of_very_many_choices_has_no_ids() -> None:
    places = StreamTracker(call(n=MAX_CHOICES + 1), StreamPosition())
    assert places.take(0, delta(64, 1, 1)) and places.take(0, end())
    assert places.id() == ""


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**32 - 1), st.integers(0, 2**50), st.booleans())))
def test_every_place_is_read_as_it_was_written(steps: list[tuple[int, int, int, bool]]) -> None:
    places, expected = StreamTracker(call(n=4), StreamPosition()), {index: Position() for index in range(4)}
    for index, num_tokens, num_text_bytes, is_end in steps:
        places.take(0, delta(index, num_tokens, num_text_bytes))
        expected[index] = Position(num_tokens, num_text_bytes, finished=is_end)
        if is_end:
            places.take(0, end(index))
    assert parse(places.id()).positions == expected
