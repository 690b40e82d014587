"""The ids of a stream's events, written and read."""

from __future__ import annotations

from array import array
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.contract.events import Accepted, Delta, Finished, PromptLogprobs, TokenLogprobs, Usage
from blockyard.contract.request import Position
from blockyard.contract.sampling import FinishReason
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from gateway.fronts.openai.call_spec import CallSpec
from gateway.fronts.openai.event_ids import MAX_CHOICES, StreamPosition, StreamTracker, parse
from gateway.request import GenerationRequest


def call(*, num_requests: int = 1, n: int = 1) -> CallSpec:
    return CallSpec("c", is_chat=False, requests=(GenerationRequest("a", n=n),) * num_requests)


# The answer of each sequence.
TOKEN_IDS = array("I", range(20))


def track(call: CallSpec, known: StreamPosition, token_ids: array[int] = TOKEN_IDS) -> StreamTracker:
    return StreamTracker(call, known, lambda _number, _index: token_ids)


def sum_of(num_tokens: int) -> str:
    return f"{crc32(TOKEN_IDS[:num_tokens].tobytes()):08x}"


def delta(index: int, num_tokens: int, num_text_bytes: int) -> Delta:
    return Delta(index, "x", (), num_tokens, num_text_bytes)


def end(index: int = 0) -> Finished:
    return Finished(index, FinishReason.STOP, None, Usage(1, 0, 1), "")


def test_an_id_names_all_choices() -> None:
    places = track(call(num_requests=2, n=2), StreamPosition())
    assert places.id() == "0:0:0,1:0:0,2:0:0,3:0:0"
    assert places.take(0, delta(1, 12, 57))
    assert places.take(1, delta(0, 3, 11))
    assert places.take(1, end())
    one, two = sum_of(12), sum_of(3)
    assert places.id() == f"0:0:0,1:12:57:{one},2:3:11:{two}f,3:0:0"
    assert places.id(usage=True) == f"0:0:0,1:12:57:{one},2:3:11:{two}f,3:0:0,u"


def test_it_reads_what_it_writes() -> None:
    told = parse("0:0:0,1:12:57:9ae16a3b,2:3:11:352441c2f,3:0:0,u")
    assert told.positions == {
        0: Position(0, 0),
        1: Position(12, 57),
        2: Position(3, 11, finished=True),
        3: Position(0, 0),
    }
    assert told.checksums == {1: "9ae16a3b", 2: "352441c2"}
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
        track(call(n=2), parse("2:1:1"))


def test_what_was_told_is_not_new() -> None:
    places = track(call(n=2), parse("0:5:20,1:2:9f"))
    assert not places.take(0, delta(0, 5, 20))
    assert not places.take(0, delta(1, 2, 9))
    assert not places.take(0, end(1))
    assert places.take(0, delta(0, 5, 21))
    assert places.take(0, delta(0, 6, 21))
    assert places.take(0, end(0))
    assert places.id() == f"0:6:21:{sum_of(6)}f,1:2:9:{sum_of(2)}f"
    assert places.take(0, Accepted("c", 1, 1, "m"))


def test_an_answer_that_differs_from_what_was_told_is_not_continued() -> None:
    before = track(call(n=2), StreamPosition())
    before.take(0, delta(0, 5, 20))
    before.take(0, delta(1, 3, 9))
    known = parse(before.id())
    same, other = track(call(n=2), known), track(call(n=2), known, array("I", [0, 1, 2, 99, 4, 5]))
    assert not same.take(0, delta(0, 3, 12))
    assert same.take(0, delta(0, 6, 24))
    # The first three tokens are the same.
    assert other.take(0, delta(1, 4, 12))
    assert not other.take(0, delta(0, 4, 16))
    with pytest.raises(BlockyardError, match="differs from what was sent") as raised:
        other.take(0, delta(0, 6, 24))
    assert raised.value.reason is Reason.REQUEST_EXPIRED


def test_a_position_that_the_answer_lacks_is_that_of_another_answer() -> None:
    wrong = invalid([Violation("positions[0].num_tokens", "is 8, and the sequence has 5 tokens")])
    assert parse("0:8:20:9ae16a3b").explain(wrong).reason is Reason.REQUEST_EXPIRED
    # Without a checksum nothing tells that we wrote the id.
    assert parse("0:8:20").explain(wrong) is wrong
    other = BlockyardError(Reason.QUEUE_FULL, "full")
    assert parse("0:8:20:9ae16a3b").explain(other) is other


def test_log_probabilities_of_a_prompt_are_told_once() -> None:
    event = PromptLogprobs((TokenLogprobs(None),))
    places = track(call(num_requests=2), StreamPosition())
    assert places.take(1, event)
    assert places.id() == "0:0:0,1:0:0p"
    again = track(call(num_requests=2), parse(places.id()))
    assert again.take(0, event)
    assert not again.take(1, event)
    # Where tokens have come, they came before.
    assert not track(call(), parse("0:1:0")).take(0, event)


def test_a_call_of_very_many_choices_has_no_ids() -> None:
    places = track(call(n=MAX_CHOICES + 1), StreamPosition())
    assert places.take(0, delta(64, 1, 1)) and places.take(0, end())
    assert places.id() == ""


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**32 - 1), st.integers(0, 2**50), st.booleans())))
def test_every_place_is_read_as_it_was_written(steps: list[tuple[int, int, int, bool]]) -> None:
    places, expected = track(call(n=4), StreamPosition()), {index: Position() for index in range(4)}
    for index, num_tokens, num_text_bytes, is_end in steps:
        places.take(0, delta(index, num_tokens, num_text_bytes))
        expected[index] = Position(num_tokens, num_text_bytes, finished=is_end)
        if is_end:
            places.take(0, end(index))
    assert parse(places.id()).positions == expected
