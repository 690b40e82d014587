"""Sequence numbers: the same however an answer is cut, and a place to go on from wherever a client stopped."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.contract.events import Accepted, Delta, TokenLogprobs
from gateway.fronts.responses.answer import FROM_THE_BEGINNING, ResponseAnswer
from gateway.fronts.responses.call import understand
from gateway.fronts.responses.schema import ResponseBody
from gateway.request import GenerationRequest, ReturnedLogprob
from tests.unit.gateway.fronts.openai.scripted import ARGUMENTS, SAID, THOUGHT, calling, finished

if TYPE_CHECKING:
    from blockyard.contract.events import Event

TEXT = "Grüße, 世界: one two three"
CALL = understand(ResponseBody.model_validate({"input": "Hi"}), "", 0)


def cut_at_random(seed: int) -> list[Event]:
    """An answer in pieces of any size, each character a token."""
    cuts = sorted(random.Random(seed).sample(range(1, len(TEXT)), k=seed % len(TEXT)))
    pieces = [TEXT[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]
    return [*(Delta(0, piece, (), 0, 0, tuple(map(entry_of, piece))) for piece in pieces), finished(len(TEXT))]


def entry_of(character: str) -> TokenLogprobs:
    return TokenLogprobs(ReturnedLogprob(ord(character), character, -1.0, 1, character.encode()))


def events_of(core: list[Event], starting_after: int = FROM_THE_BEGINNING) -> list[dict[str, Any]]:
    answer = ResponseAnswer(CALL, Accepted("resp_1", 3, 0, "m"), len, starting_after)
    return [*answer.start(), *(event for item in core for event in answer.add(item))]


def said_by(events: list[dict[str, Any]]) -> tuple[str, str]:
    deltas = [event for event in events if "delta" in event]
    tokens = [entry["token"] for event in deltas for entry in event["logprobs"]]
    return "".join(event["delta"] for event in deltas), "".join(tokens)


@pytest.mark.parametrize("seed", range(1, 20))
def test_another_reader_goes_on_where_the_first_one_stopped(seed: int) -> None:
    first = events_of(cut_at_random(seed))
    numbers = [event["sequence_number"] for event in first]
    assert numbers == sorted(set(numbers))
    for place, event in enumerate(first):
        rest = events_of(cut_at_random(seed + 7), event["sequence_number"])
        assert said_by([*first[: place + 1], *rest]) == (TEXT, TEXT)
        kinds = [each["type"] for each in (*first[: place + 1], *rest) if "delta" not in each]
        assert kinds == [each["type"] for each in first if "delta" not in each]
        assert [each for each in rest if "delta" not in each] == [
            each for each in first[place + 1 :] if "delta" not in each
        ]


BYTES = [(byte, bytes([byte])) for byte in "\u4e16".encode()]


@pytest.mark.parametrize("together", [False, True])
def test_a_text_has_the_tokens_that_it_consists_of(together: bool) -> None:
    def piece(text: str, *tokens: tuple[int, bytes], thought: str = "") -> Delta:
        entries = [TokenLogprobs(ReturnedLogprob(i, raw.decode(errors="replace"), -1.0, 1, raw)) for i, raw in tokens]
        return Delta(0, text, (), 0, 0, tuple(entries), reasoning_text=thought)

    # A character of three tokens, white space that a marker might follow, and what is held back at the end.
    core: list[Event] = [
        *(piece("", (300, b"<think>")), piece("", (301, b"So"), thought="So"), piece("", (302, b"</think>"))),
        *(piece("", (303, b"\n\n")), *(piece("", each) for each in BYTES[:2]), piece("\u4e16", BYTES[2])),
        *(piece("So", (304, b"So")), piece("", (305, b" ")), piece(" it", (306, b"it")), piece("", (307, b"<to"))),
        piece("<to"),
        finished(12),
    ]
    if together:
        tokens = [entry for each in core if isinstance(each, Delta) for entry in each.logprobs]
        core = [Delta(0, "\u4e16So it<to", (), 0, 0, tuple(tokens), reasoning_text="So"), core[-1]]
    events = events_of(core)
    told = [bytes(entry["bytes"]) for event in events if "delta" in event for entry in event.get("logprobs", ())]
    assert told == [*(raw for _, raw in BYTES), b"So", b" ", b"it", b"<to"]
    [item] = [each for each in events[-1]["response"]["output"] if each["type"] == "message"]
    assert [bytes(entry["bytes"]) for entry in item["content"][0]["logprobs"]] == told


@pytest.mark.parametrize(("size", "other"), [(1, 4), (4, 1), (1000, 3), (3, 1000)])
def test_reasoning_and_calls_go_on_where_they_stopped(size: int, other: int) -> None:
    def read(size: int, starting_after: int = FROM_THE_BEGINNING) -> list[dict[str, Any]]:
        core: Any = calling(GenerationRequest("Hi"), size=size)
        return events_of(core[1:], starting_after)

    first = read(size)
    for place, event in enumerate(first):
        together = [*first[: place + 1], *read(other, event["sequence_number"])]
        assert "".join(each["delta"] for each in together if "delta" in each) == THOUGHT + SAID + ARGUMENTS + "{}"
        assert [each for each in together if "delta" not in each] == [each for each in first if "delta" not in each]
