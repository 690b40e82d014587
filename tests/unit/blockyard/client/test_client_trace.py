"""Both clients tell the span that their user is in, in every call of an answer, wherever it is read."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
from opentelemetry.sdk.trace import TracerProvider

from blockyard import AsyncClient, Client
from blockyard.client.retry import RetryPolicy
from tests.kit.fakes.fake_gateway import Cut, FakeGateway, How

if TYPE_CHECKING:
    from collections.abc import Iterator

POLICY = RetryPolicy(initial_delay_seconds=0.01)
TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("user")


@pytest.fixture
def cut_gateway() -> Iterator[FakeGateway]:
    """Breaks the first answer in its midst."""
    with FakeGateway().in_thread() as running:
        running.cuts.append(Cut(2, How.UNAVAILABLE))
        yield running


def test_a_stream_that_is_read_elsewhere_and_resumed_keeps_its_span(cut_gateway: FakeGateway) -> None:
    with Client(cut_gateway.target, retry=POLICY) as client:
        with TRACER.start_as_current_span("outer") as span:
            stream = client.stream("one two", max_tokens=3)
        reader = threading.Thread(target=stream.result)
        reader.start()
        reader.join(20)
        assert stream.num_resumes == 1
        client.generate("one", max_tokens=1)
    context = span.get_span_context()
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    assert cut_gateway.traceparents == [traceparent, traceparent, ""]


def test_the_asynchronous_client_does_the_same(cut_gateway: FakeGateway) -> None:
    async def read() -> str:
        async with AsyncClient(cut_gateway.target, retry=POLICY) as client:
            with TRACER.start_as_current_span("outer") as span:
                stream = client.stream("one two", max_tokens=3)
            await stream.result()
            return f"{span.get_span_context().trace_id:032x}"

    trace_id = asyncio.run(read())
    assert [trace_id in traceparent for traceparent in cut_gateway.traceparents] == [True, True]
