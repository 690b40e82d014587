"""Which call a request came by, noted by both fronts and gone with the call."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from blockyard.inference.v1 import inference_pb2
from gateway.call_context import current_call, with_http_call
from tests.kit.processes.spans import CALLER, recorded_spans
from tests.unit.gateway.harness import spec

if TYPE_CHECKING:
    from tests.unit.gateway.harness import Front


def test_without_a_call_there_is_nothing_to_tell() -> None:
    assert current_call().method == ""
    assert current_call().trace_context is None


async def test_a_grpc_call_is_known_by_its_method_and_its_callers_span(front: Front) -> None:
    front.scheduler.script = lambda request, index, position: 7
    metadata = list(CALLER._asdict().items())
    with recorded_spans() as recorder:
        stream = front.stream(spec(max_tokens=2), metadata=metadata)
        assert len([message async for message in stream]) >= 3
        await front.generate(spec(max_tokens=2))
        await front.wait_until_unread()
        first, second = recorder.seen.named("request")
    assert first.attributes["method"] == "InferenceService/StreamGenerate"
    assert first.trace_id == CALLER.trace_id
    assert second.attributes["method"] == "InferenceService/Generate"
    assert second.parent_id == ""
    [traced, root] = front.scheduler.added[-2:]
    assert traced.trace_context.tracestate == CALLER.tracestate
    assert CALLER.trace_id in traced.trace_context.traceparent
    assert second.trace_id in root.trace_context.traceparent


async def test_a_broken_traceparent_does_not_break_a_call(front: Front) -> None:
    metadata = [("traceparent", "00-nonsense"), ("tracestate", "x" * 600)]
    with recorded_spans() as recorder:
        request = inference_pb2.GenerateRequest(spec=spec(max_tokens=1))
        await front.stub.Generate(request, metadata=metadata)
        await front.wait_until_unread()
        assert recorder.seen.one("request").parent_id == ""


async def test_an_http_call_is_known_by_its_path() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        # What a call begins in tasks of its own is its own too.
        await asyncio.create_task(note())

    async def note() -> None:
        seen.append((current_call().method, current_call().trace_context))

    async def nothing(*_: Any) -> Any:
        raise AssertionError

    headers = [(name.encode(), value.encode()) for name, value in CALLER._asdict().items()]
    http = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    await asyncio.create_task(with_http_call(app)(http, nothing, nothing))
    await asyncio.create_task(with_http_call(app)({"type": "lifespan"}, nothing, nothing))
    assert seen == [("POST /v1/completions", CALLER), ("", None)]
    assert current_call().method == ""
