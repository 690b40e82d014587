"""What is told of a request to those who watch: its line in the log, and its span, which outlives processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.contract.request import JsonSchema, OnDisconnect, Position
from blockyard.contract.sampling import FinishReason, StopCriteria
from blockyard.contract.scheduling import Acceptance, Prefill, Recovery
from blockyard.errors import BlockyardError, Reason
from gateway import call_context as calls
from gateway.request import GenerationRequest
from tests.kit.processes.spans import CALLER, UNSAMPLED_CALLER, Recorder, recorded_spans
from tests.unit.gateway.core import Core

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.contract.trace import TraceContext
    from gateway.live.reader import Reader

MARKER = "a secret in a prompt"
METHOD = "InferenceService/StreamGenerate"


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recorded_spans() as recorder:
        yield recorder
        recorder.check_all_ended()


@contextlib.contextmanager
def called(context: TraceContext | None, method: str = METHOD) -> Iterator[None]:
    """As in a call that a front has noted."""
    headers = [] if context is None else list(context._asdict().items())
    token = calls._current.set(calls.Call(method, headers))
    yield
    calls._current.reset(token)


async def drained(reader: Reader) -> None:
    async for _ in reader:
        pass


def finish(core: Core, sequence_id: int, *token_ids: int) -> None:
    core.tokens(sequence_id, *token_ids, end=FinishReason.LENGTH)


def lines(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    """The fields of the events of this message."""
    return [record.fields for record in caplog.records if record.message == message]  # type: ignore[attr-defined]


# The log.


async def test_a_request_is_one_line_at_its_end(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with called(None):
        reader = await core.accepted("r", tenant="t", n=2)
    core.told(prefilled=[Prefill(10, 1)], sequence_ids=[10, 11], token_ids=[7, 8])
    finish(core, 10, 9)
    assert not caplog.records
    core.tokens(11, end=FinishReason.STOP)
    await drained(reader)
    [fields] = lines(caplog, "request finished")
    times = {name: fields.pop(name) for name in ("first_token_seconds", "seconds")}
    assert 0 <= times["first_token_seconds"] <= times["seconds"]
    assert fields == {
        "request_id": "t/r",
        "method": METHOD,
        "finish_reasons": "length,stop",
        "num_prompt_tokens": 2,
        "num_cached_tokens": 1,
        "num_completion_tokens": 3,
    }


async def test_a_recovery_is_counted_in_it(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    reader = await core.accepted()
    core.told(prefilled=[Prefill(10, 0)], sequence_ids=[10], token_ids=[7])
    core.told(recovered=(Recovery("r", "the worker was lost", 3, True),))
    core.lost()
    core.attached()
    core.told(accepted=[Acceptance(core.link.adds[-1].handle, 20)])
    finish(core, 20, 8)
    await drained(reader)
    [fields] = lines(caplog, "request finished")
    assert fields["num_recoveries"] == 2


async def test_what_is_wrong_with_a_long_name_or_many_is_told_in_a_short_line(
    core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    elsewhere = {"$ref": "elsewhere"}
    for properties in ({"x" * 5000: elsewhere}, {f"p{number}": elsewhere for number in range(50)}):
        with pytest.raises(BlockyardError):
            await core.start(format=JsonSchema(json.dumps({"properties": properties})))
    for fields in lines(caplog, "request refused"):
        assert 100 < len(fields["fields"]) < 2100


async def test_a_request_that_is_refused_says_why_without_a_word_of_it(
    core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with pytest.raises(BlockyardError):
        await core.start("no name " + "x" * 1000, prompt=MARKER, n=0)
    [fields] = lines(caplog, "request refused")
    assert fields["reason"] == "FIELD_INVALID"
    assert set(fields["fields"].split(",")) == {"request_id", "n"}
    assert len(fields["request_id"]) == 200
    assert MARKER not in caplog.text
    core.link.facts = None
    with pytest.raises(BlockyardError):
        await core.start("early")
    assert lines(caplog, "request refused")[1] == {"request_id": "early", "reason": "NO_READY_WORKER"}


@pytest.mark.parametrize(
    ("reason", "message", "level"),
    [
        (Reason.CLIENT_CANCELLED, "request cancelled", "INFO"),
        (Reason.QUEUE_FULL, "request failed", "INFO"),
        (Reason.NO_READY_WORKER, "request failed", "WARNING"),
        (Reason.GENERATION_DEADLINE, "request failed", "WARNING"),
        (Reason.POISON_REQUEST, "request failed", "ERROR"),
        (Reason.BUG, "request failed", "ERROR"),
    ],
)
async def test_a_failure_is_as_loud_as_it_is_bad(
    core: Core, caplog: pytest.LogCaptureFixture, reason: Reason, message: str, level: str
) -> None:
    caplog.set_level("INFO")
    reader = await core.accepted()
    core.told(failed=[core.failure(core.link.adds[0].handle, reason)])
    with pytest.raises(BlockyardError):
        await drained(reader)
    [record] = [record for record in caplog.records if record.message == message]
    assert record.levelname == level
    assert lines(caplog, message)[0]["reason"] == str(reason)


async def test_a_request_that_was_taken_over_says_so(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    submission = await core.submission_of("r")
    caplog.clear()
    resuming = asyncio.create_task(core.resume("r"))
    await asyncio.sleep(0)
    core.told(resumed=[core.resumed(core.link.resumes[0].handle, submission, (7,))])
    reader = await resuming
    finish(core, 50, 8)
    await drained(reader)
    [fields] = lines(caplog, "request finished")
    assert fields["taken_over"] is True
    assert fields["num_completion_tokens"] == 2


async def test_the_moments_between_are_for_developers(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    reader = await core.accepted("r")
    core.told(prefilled=[Prefill(10, 0)], sequence_ids=[10], token_ids=[7])
    again = await core.resume("r")
    finish(core, 10)
    await drained(reader)
    await drained(again)
    told = [record.message for record in caplog.records if record.name == "gateway.observe.request_log"]
    assert told == ["request submitted", "request accepted", "first token", "request resumed", "request finished"]


# Traces.


async def test_a_request_is_a_span_under_its_caller(core: Core, recorder: Recorder) -> None:
    with called(CALLER):
        reader = await core.accepted("r", n=2, stop=StopCriteria(max_tokens=5))
    [add] = core.link.adds
    core.told(prefilled=[Prefill(10, 1)], sequence_ids=[10, 11], token_ids=[7, 8])
    finish(core, 10)
    finish(core, 11, 9)
    await drained(reader)
    seen = recorder.seen
    request, tokenize = seen.one("request"), seen.one("tokenize")
    assert seen.trace_ids == {CALLER.trace_id}
    assert (request.kind, request.parent_id) == ("SERVER", CALLER.traceparent[36:52])
    assert tokenize.parent_id == request.span_id
    assert add.submission.trace_context is not None
    assert request.span_id in add.submission.trace_context.traceparent
    assert add.submission.trace_context.tracestate == CALLER.tracestate
    assert request.events == ("accepted", "first token")
    assert request.attributes == {
        "request_id": "r",
        "method": METHOD,
        "n": 2,
        "num_cached_tokens": 1,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }


async def test_the_lines_of_a_traced_request_name_its_trace(
    core: Core, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with called(CALLER):
        reader = await core.accepted()
    finish(core, 10, 7)
    await drained(reader)
    assert lines(caplog, "request finished")[0]["trace_id"] == CALLER.trace_id


@pytest.mark.parametrize("context", [None, UNSAMPLED_CALLER])
async def test_a_request_that_is_not_traced_carries_nothing(core: Core, context: TraceContext | None) -> None:
    with called(context), recorded_spans(ratio=0.0) as recorder:
        reader = await core.accepted()
        assert core.link.adds[0].submission.trace_context is None
        finish(core, 10, 7)
        await drained(reader)
        assert recorder.seen.spans == []


async def test_off_a_callers_span_is_not_looked_at(core: Core) -> None:
    with called(CALLER):
        reader = await core.accepted()
    assert core.link.adds[0].submission.trace_context is None
    finish(core, 10, 7)
    await drained(reader)


async def test_the_trace_goes_on_at_the_next_scheduler(core: Core, recorder: Recorder) -> None:
    with called(CALLER):
        reader = await core.accepted()
    core.told(prefilled=[Prefill(10, 0)], sequence_ids=[10], token_ids=[7])
    core.lost()
    core.lost()
    core.attached()
    first, second = core.link.adds
    assert first.submission.trace_context == second.submission.trace_context
    core.told(accepted=[Acceptance(second.handle, 20)])
    finish(core, 20, 8)
    await drained(reader)
    request, recovery = recorder.seen.one("request"), recorder.seen.one("recovery")
    assert (recovery.trace_id, recovery.parent_id) == (CALLER.trace_id, request.span_id)
    assert recovery.attributes["cause"] == "the scheduler was lost"
    assert request.events == ("accepted", "first token", "recovered", "accepted")


async def test_a_request_that_fails_while_it_waits_ends_all_its_spans(core: Core, recorder: Recorder) -> None:
    reader = await core.accepted()
    core.lost()
    core.live.end_all(BlockyardError(Reason.DRAINING, "the gateway stops"))
    with pytest.raises(BlockyardError):
        await drained(reader)
    assert recorder.seen.one("recovery").error == "DRAINING"
    request = recorder.seen.one("request")
    assert (request.error, request.attributes["reason"]) == ("DRAINING", "DRAINING")


async def test_a_cancelled_request_is_no_error(core: Core, recorder: Recorder) -> None:
    reader = await core.accepted("r")
    core.live.cancel(["r"])
    with pytest.raises(BlockyardError):
        await drained(reader)
    request = recorder.seen.one("request")
    assert (request.error, request.attributes["reason"]) == ("", "CLIENT_CANCELLED")


async def test_a_refused_request_is_one_with_its_reason(core: Core, recorder: Recorder) -> None:
    with pytest.raises(BlockyardError):
        await core.start("r", n=0)
    request = recorder.seen.one("request")
    assert (request.error, request.attributes["fields"]) == ("FIELD_INVALID", ("n",))
    assert recorder.seen.one("tokenize").parent_id == request.span_id


async def test_a_client_that_leaves_while_its_prompt_is_read_is_told_of(
    core: Core, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    begun = asyncio.Event()

    async def never(*_: object) -> tuple[int, ...]:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(core.service._encoding, "prompt_of", never)
    starting = asyncio.create_task(core.start())
    await begun.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert lines(caplog, "request refused")[0]["reason"] == "CLIENT_CANCELLED"
    assert {span.name for span in recorder.seen.spans} == {"request", "tokenize"}


async def test_the_same_request_again_is_a_span_of_its_own(core: Core, recorder: Recorder) -> None:
    first = await core.accepted("r")
    with called(CALLER):
        second = await core.start("r")
    finish(core, 10, 7)
    await drained(first)
    await drained(second)
    joined, whole = sorted(recorder.seen.named("request"), key=lambda span: "joined" not in span.attributes)
    assert joined.trace_id == CALLER.trace_id
    assert "joined" not in whole.attributes
    assert len(core.link.adds) == 1


async def test_a_trace_is_no_part_of_what_is_asked(core: Core, recorder: Recorder) -> None:
    for context in (CALLER, None):
        other = Core()
        with called(context):
            reader = await other.start("r")
        core.link.sent.extend(other.link.adds)
        other.live.on_reader_closed(reader)
    first, second = core.link.adds
    assert first.submission.trace_context != second.submission.trace_context
    assert first.submission.digest == second.submission.digest


async def test_another_gateway_goes_on_in_the_same_trace(core: Core, recorder: Recorder) -> None:
    before = Core()
    with called(CALLER):
        lost = await before.start("r", on_disconnect=OnDisconnect.KEEP)
    submission = before.link.adds[0].submission
    resuming = asyncio.create_task(core.resume("r"))
    await asyncio.sleep(0)
    core.told(resumed=[core.resumed(core.link.resumes[0].handle, submission, (7,))])
    reader = await resuming
    finish(core, 50, 8)
    await drained(reader)
    [taken] = [span for span in recorder.seen.named("request") if span.attributes.get("taken_over")]
    assert submission.trace_context is not None
    assert taken.trace_id == CALLER.trace_id
    assert taken.parent_id in submission.trace_context.traceparent
    assert "resumed" in taken.events
    before.live.cancel(["r"])
    await lost.aclose()


async def test_a_request_that_only_its_client_remembers_goes_on_in_its_clients_trace(
    core: Core, recorder: Recorder
) -> None:
    request = GenerationRequest(prompt=(5, 6), request_id="r")
    positions = {0: Position(num_tokens=1, num_text_bytes=1, token_ids=(7,))}
    with called(CALLER):
        resuming = asyncio.create_task(core.resume("r", positions=positions, request=request))
        await asyncio.sleep(0)
    core.told(failed=[core.failure(core.link.resumes[0].handle, Reason.REQUEST_EXPIRED)])
    reader = await resuming
    [add] = core.link.adds
    assert add.submission.trace_context is not None
    assert add.submission.trace_context.trace_id == CALLER.trace_id
    assert add.resubmission is not None
    assert [list(record.token_ids) for record in add.resubmission.sequences] == [[7]]
    core.told(accepted=[Acceptance(add.handle, 30)])
    finish(core, 30, 8)
    await drained(reader)
    assert recorder.seen.one("request").trace_id == CALLER.trace_id
