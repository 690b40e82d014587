"""Events of a request, to messages and back."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.chat import ToolCall
from blockyard.contract.codec.events import decode_event, encode_event
from blockyard.contract.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    Loading,
    PromptLogprobs,
    Recovered,
    TokenLogprob,
    TokenLogprobs,
    ToolCallDelta,
    Usage,
    join_calls,
)
from blockyard.contract.sampling import FinishReason
from blockyard.errors import BlockyardError, Reason, to_status
from blockyard.inference.v1 import inference_pb2

BEST, CHOSEN = TokenLogprob(7, "b", -0.25, 1), TokenLogprob(9, "a", -3.0, 4)
BEST_FIELDS = {"token_id": 7, "text": "b", "logprob": -0.25, "rank": 1}
CHOSEN_FIELDS = {"token_id": 9, "text": "a", "logprob": -3.0, "rank": 4}
FAILURE = BlockyardError(Reason.NOT_FINITE, "no numbers")
LENGTH_FIELDS: dict[str, Any] = {
    "reason": sampling_pb2.FINISH_REASON_LENGTH,
    "usage": {"num_prompt_tokens": 1, "num_completion_tokens": 1},
}


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            Accepted("r", 3, 2**64 - 1, "m"),
            {"accepted": {"request_id": "r", "num_prompt_tokens": 3, "seed": 2**64 - 1, "model": "m"}},
        ),
        (
            Delta(1, "ü", (4, 5), 7, 20),
            {"delta": {"index": 1, "text": "ü", "token_ids": [4, 5], "num_tokens": 7, "num_text_bytes": 20}},
        ),
        (
            Delta(0, "a", (), 1, 1, (TokenLogprobs(CHOSEN, (BEST, CHOSEN)),)),
            {
                "delta": {
                    "text": "a",
                    "num_tokens": 1,
                    "num_text_bytes": 1,
                    "logprobs": [{"chosen": CHOSEN_FIELDS, "top": [BEST_FIELDS, CHOSEN_FIELDS]}],
                }
            },
        ),
        (
            PromptLogprobs((TokenLogprobs(None), TokenLogprobs(BEST))),
            {"prompt_logprobs": {"logprobs": [{}, {"chosen": BEST_FIELDS}]}},
        ),
        (
            Finished(0, FinishReason.LENGTH, None, Usage(1, 0, 1), "", -0.5),
            {"finished": LENGTH_FIELDS | {"score": -0.5}},
        ),
        (Finished(0, FinishReason.LENGTH, None, Usage(1, 0, 1), ""), {"finished": LENGTH_FIELDS}),
        (
            Finished(0, FinishReason.LENGTH, None, Usage(1, 0, 1), "", error=FAILURE),
            {"finished": LENGTH_FIELDS | {"error": to_status(FAILURE)}},
        ),
        (
            Finished(2, FinishReason.STOP, "x", Usage(3, 1, 9), "d"),
            {
                "finished": {
                    "index": 2,
                    "reason": sampling_pb2.FINISH_REASON_STOP,
                    "matched_stop": {"stop_string": "x"},
                    "usage": {"num_prompt_tokens": 3, "num_cached_tokens": 1, "num_completion_tokens": 9},
                    "determinism_id": "d",
                }
            },
        ),
    ],
)
def test_events_are_written_field_by_field(event: Event, expected: dict[str, Any]) -> None:
    message = encode_event(event, 6)
    assert message == inference_pb2.GenerationEvent(seq=6, **expected)


def test_a_stop_token_with_id_0_is_told_and_an_end_token_is_not() -> None:
    told = encode_event(Finished(0, FinishReason.STOP, 0, Usage(1, 0, 1), ""), 0).finished
    assert told.matched_stop.WhichOneof("stop") == "stop_token_id"
    end = encode_event(Finished(0, FinishReason.STOP, None, Usage(1, 0, 1), ""), 0).finished
    assert not end.HasField("matched_stop")


@pytest.mark.parametrize(
    "event",
    [
        Accepted("r", 3, 2**64 - 1, "m", ("beware",), "v2"),
        Delta(1, "ü", (4, 5), 7, 20),
        Delta(0, "a", (), 1, 1, (TokenLogprobs(CHOSEN, (BEST, CHOSEN)),), "hm", (ToolCallDelta(2, "c", "f", "{"),)),
        PromptLogprobs((TokenLogprobs(None), TokenLogprobs(BEST))),
        Finished(2, FinishReason.STOP, "x", Usage(3, 1, 9, 4), "d", weight_versions=((0, ""), (5, "v2"))),
        Finished(2, FinishReason.STOP, 0, Usage(3, 1, 9), "d", calls_tools=True),
        Finished(0, FinishReason.ERROR, None, Usage(), "", 0.0, FAILURE),
        Recovered("lost", 7, True),
        Loading("the worker is loading the model: 17%"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_every_event_survives(event: Event) -> None:
    message = encode_event(event, 3)
    assert message.seq == 3
    assert decode_event(inference_pb2.GenerationEvent.FromString(message.SerializeToString())) == event


def test_calls_are_joined_of_their_pieces_by_index() -> None:
    pieces = [(ToolCallDelta(0, "a", "f", "{"), ToolCallDelta(1, "b", "g")), (ToolCallDelta(0, arguments="}"),)]
    deltas = [Delta(0, "", (), 0, 0, tool_calls=each) for each in pieces]
    assert join_calls(deltas) == (ToolCall("f", "{}", "a"), ToolCall("g", "", "b"))


def test_an_event_of_a_newer_server_is_not_known() -> None:
    assert decode_event(inference_pb2.GenerationEvent(seq=1)) is None


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (sampling_pb2.FINISH_REASON_STOP, FinishReason.STOP),
        (sampling_pb2.FINISH_REASON_LENGTH, FinishReason.LENGTH),
        (sampling_pb2.FINISH_REASON_ABORT, FinishReason.ABORT),
        (sampling_pb2.FINISH_REASON_ERROR, FinishReason.ERROR),
        (99, FinishReason.ERROR),
    ],
)
def test_finish_reasons(number: Any, reason: FinishReason) -> None:
    event = decode_event(inference_pb2.GenerationEvent(finished=inference_pb2.Finished(reason=number)))
    assert isinstance(event, Finished) and event.finish_reason is reason
