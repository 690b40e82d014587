"""Positions of clients over gRPC: those that cannot be, and those that are ahead."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard.errors import Reason
from blockyard.inference.v1.inference_pb2 import ResumeGenerateRequest
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.kit.refusals import refused
from tests.unit.gateway.harness import END_TOKEN, Front, demo_tokenizer, ids_of, rest_of, spec
from tests.unit.gateway.live.test_resume import SAME_OR_OTHER, Position, answer_of_texts, reader_of

POSITIONS: list[tuple[dict[str, Any], str]] = [
    ({"index": 1}, "positions[1].index"),
    ({"num_tokens": 6}, "positions[0].num_tokens"),
    ({"num_tokens": 5}, "positions[0].num_tokens"),
    ({"num_tokens": 2, "num_text_bytes": 999}, "positions[0].num_text_bytes"),
    ({"num_tokens": 2, "num_text_bytes": 2}, "positions[0].num_text_bytes"),
    ({"num_tokens": 2, "token_ids": [1]}, "positions[0].token_ids"),
    ({"num_tokens": 2, "token_ids": [1, 4096]}, "positions[0].token_ids"),
    ({"num_tokens": 1, "token_ids": [2**30]}, "positions[0].token_ids"),
]
MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"positions": [Position(), Position()]}, "positions[0].index"),
    ({"spec": spec(request_id="other")}, "spec.request_id"),
    ({"request_id": "a/b"}, "request_id"),
    ({"request_id": ""}, "request_id"),
    (
        {
            "spec": spec(max_tokens=5),
            "positions": [Position(num_tokens=1, token_ids=[20], finished=True)],
        },
        "positions[0].finished",
    ),
    ({"spec": spec(max_tokens=5), "positions": [Position(index=1)]}, "positions[1].index"),
    (
        {"spec": spec(max_tokens=5), "positions": [Position(num_tokens=2, token_ids=[1, 4096])]},
        "positions[0].token_ids",
    ),
    (
        {"spec": spec(max_tokens=5), "positions": [Position(num_tokens=1, token_ids=[2**32 - 1])]},
        "positions[0].token_ids",
    ),
    ({"positions": [Position(index=index) for index in range(10**5)]}, "positions"),
    ({"spec": spec(on_update=7)}, "on_update"),
    ({"spec": spec(beam_search={"width": 2, "early_stopping": 9})}, "beam_search.early_stopping"),
    ({"spec": spec(sampling={"top_p": 2.0})}, "sampling.top_p"),
]


def test_every_field_of_a_resume_has_a_wrong_value_here() -> None:
    """What a spec may hold is tried as that of a new request."""
    wrong = {name for fields, _ in MESSAGES for name in fields}
    wrong |= {f"positions.{name}" for fields, _ in POSITIONS for name in fields}
    wrong |= {f"positions.{field.rpartition('.')[2]}" for _, field in MESSAGES if field.startswith("positions[")}
    position = {f"positions.{field.name}" for field in Position.DESCRIPTOR.fields}
    harmless = {"seed"}
    assert wrong | harmless == position | {field.name for field in ResumeGenerateRequest.DESCRIPTOR.fields}


@SAME_OR_OTHER
@pytest.mark.parametrize(("position", "field"), POSITIONS)
async def test_positions_that_cannot_be_are_refused(
    scheduler: FakeScheduler, front: Front, position: dict[str, Any], field: str, is_other: bool
) -> None:
    scheduler.script = scripted(*ids_of("wö"), END_TOKEN)
    await front.generate(spec(request_id="mine", max_tokens=5))
    async with reader_of(scheduler, front, is_other=is_other) as reader:
        error = await refused(reader.resume("mine", positions=[Position(**position)]))
    assert (error.reason, error.violations[0].field) == (Reason.FIELD_INVALID, field)


async def test_a_position_ahead_of_a_running_answer_is_waited_for(scheduler: FakeScheduler, front: Front) -> None:
    scheduler.pause()
    scheduler.script = scripted(*ids_of("wörld there was"))
    call = front.stream(spec(request_id="mine", max_tokens=5))
    await call.read()
    text = demo_tokenizer().decode(ids_of("wörld there was")[:3])
    ahead = front.resume("mine", positions=[Position(num_tokens=3, num_text_bytes=len(text.encode()))])
    beyond = front.resume("mine", positions=[Position(num_tokens=3, num_text_bytes=999)])
    assert (await ahead.read()).event.HasField("accepted")
    assert (await beyond.read()).event.HasField("accepted")
    scheduler.go_on()
    assert text + answer_of_texts(await rest_of(ahead)) == answer_of_texts(await rest_of(call))
    error = await refused(beyond)
    assert (error.reason, error.violations[0].field) == (Reason.FIELD_INVALID, "positions[0].num_text_bytes")


@pytest.mark.parametrize(("fields", "field"), MESSAGES)
async def test_messages_that_contradict_themselves_are_refused(
    front: Front, fields: dict[str, Any], field: str
) -> None:
    error = await refused(front.resume(**{"request_id": "mine", **fields}))
    assert (error.reason, error.violations[0].field) == (Reason.FIELD_INVALID, field)
