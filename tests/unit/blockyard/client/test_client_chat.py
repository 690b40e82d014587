"""Chats by both clients, against gateways on sockets: whole, in streams, and over breaks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from blockyard import AsyncClient, BlockyardError, Client, FinishReason, Message, Reason, Tool
from blockyard.client.retry import RetryPolicy
from blockyard.inference.v1 import inference_pb2
from tests.kit.fakes.fake_gateway import Cut, FakeGateway, How

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.client.results import Completion

TWINS = ["Client", "AsyncClient"]
MESSAGES = [Message("system", "be kind"), Message("user", "one two three")]
QUICK = RetryPolicy(max_attempts=3, initial_delay_seconds=0.001, resume_seconds=0.0)


def chat(twin: str, targets: str | Sequence[str], **options: Any) -> Completion:
    """The whole answer, as one of the two clients gives it."""
    if twin == "Client":
        with Client(targets, retry=QUICK) as client:
            return client.chat(MESSAGES, **options)
    return asyncio.run(chat_async(targets, options))


async def chat_async(targets: str | Sequence[str], options: Any) -> Completion:
    async with AsyncClient(targets, retry=QUICK) as client:
        return await client.chat(MESSAGES, **options)


@pytest.mark.parametrize("twin", TWINS)
def test_a_chat_is_answered(gateway: FakeGateway, twin: str) -> None:
    answer = chat(twin, gateway.target, max_tokens=4, n=2, tools=[Tool("f")], request_id="r", seed=3)
    assert [choice.text for choice in answer.choices] == ["one two three one"] * 2
    assert (answer.request_id, answer.finish_reason) == ("r", FinishReason.LENGTH)
    (spec,) = gateway.specs
    assert (spec.n, spec.stop.max_tokens, spec.sampling.seed) == (2, 4, 3)
    assert [message.role for message in spec.conversation.messages] == [
        inference_pb2.ROLE_SYSTEM,
        inference_pb2.ROLE_USER,
    ]
    assert [tool.name for tool in spec.conversation.tools] == ["f"]


def test_a_chat_is_streamed(gateway: FakeGateway) -> None:
    with Client(gateway.target) as client, client.stream_chat(MESSAGES, max_tokens=3, return_token_ids=True) as stream:
        assert list(stream.text_deltas()) == ["one", " two", " three"]
        assert stream.result() == client.resume(stream.request_id).result()


async def test_a_chat_is_streamed_async(async_gateway: FakeGateway) -> None:
    async with AsyncClient(async_gateway.target) as client, client.stream_chat(MESSAGES, max_tokens=3) as stream:
        assert [text async for text in stream.text_deltas()] == ["one", " two", " three"]


@pytest.mark.parametrize("how", How)
@pytest.mark.parametrize("twin", TWINS)
def test_a_chat_outlives_a_break(twin: str, how: How) -> None:
    first, second = FakeGateway(), FakeGateway()
    second.memory = first.memory
    with first.in_thread(), second.in_thread():
        first.cuts.append(Cut(2, how))
        answer = chat(twin, [first.target, second.target], max_tokens=4)
        assert answer.text == "one two three one"
        assert len(first.resumes) + len(second.resumes) == 1
        (resume,) = first.resumes or second.resumes
        assert resume.spec.conversation == first.specs[0].conversation


@pytest.mark.parametrize("twin", TWINS)
def test_a_chat_that_nobody_remembers_goes_on_behind_what_has_come(twin: str) -> None:
    first, second = FakeGateway(), FakeGateway()
    with first.in_thread(), second.in_thread():
        first.cuts.append(Cut(3, How.DEATH))
        answer = chat(twin, [first.target, second.target], max_tokens=5)
        assert answer.text == "one two three one two"
        (resume,) = second.resumes
        assert resume.positions[0].num_tokens == 2
        assert resume.seed == answer.seed


@pytest.mark.parametrize("twin", TWINS)
def test_a_chat_that_is_refused_is_tried_again_where_that_helps(gateway: FakeGateway, twin: str) -> None:
    gateway.failures.append(BlockyardError(Reason.DRAINING, "stopping", retry_after_seconds=0.001))
    assert chat(twin, gateway.target, max_tokens=1).text == "one"
    assert len(gateway.specs) == 2
    gateway.failures.append(BlockyardError(Reason.FEATURE_DISABLED, "no template"))
    with pytest.raises(BlockyardError, match="no template"):
        chat(twin, gateway.target)
    assert len(gateway.specs) == 3


def test_leaving_a_chat_cancels_it(gateway: FakeGateway) -> None:
    gateway.hold_after = 2
    with Client(gateway.target) as client:
        with client.stream_chat(MESSAGES, request_id="r") as stream:
            next(stream)
        assert gateway.saw_cancel.wait(10)
    assert gateway.cancelled == ["r"]


@pytest.mark.parametrize("twin", TWINS)
def test_what_is_no_message_is_refused_before_it_is_sent(gateway: FakeGateway, twin: str) -> None:
    with pytest.raises(BlockyardError) as raised:
        chat(twin, gateway.target, tool_choice="sometimes")
    assert raised.value.violations[0].field == "conversation.tool_choice"
    assert gateway.specs == []


async def test_the_tokens_of_a_chat_can_be_counted(async_gateway: FakeGateway) -> None:
    async with AsyncClient(async_gateway.target) as client:
        assert await client.tokenize_chat(MESSAGES) == [0, 2, 4, 3, 3, 5]


def test_the_tokens_of_a_chat(gateway: FakeGateway) -> None:
    with Client(gateway.target) as client:
        assert client.tokenize_chat(MESSAGES, tools=[Tool("f")]) == [0, 2, 4, 3, 3, 5]
