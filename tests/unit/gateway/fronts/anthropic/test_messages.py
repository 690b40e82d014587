"""The Anthropic front with the real client, on a script."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anthropic
import pytest

from blockyard.contract.events import Delta, ToolCallDelta
from blockyard.contract.request import OnDisconnect
from blockyard.contract.sampling import FinishReason
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from tests.unit.gateway.fronts.openai.scripted import (
    ARGUMENTS,
    SAID,
    THOUGHT,
    accepted,
    answer,
    calling,
    deltas,
    finished,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import httpx

    from gateway.request import GenerationRequest
    from tests.unit.gateway.fronts.openai.scripted import ScriptedService

HELLO: Any = [{"role": "user", "content": "Hi"}]
ASKED: dict[str, Any] = {"model": "scripted", "max_tokens": 5, "messages": HELLO}


def ending(text: str, reason: FinishReason, matched: str | int | None = None) -> Callable[..., Sequence[Any]]:
    return lambda request: [accepted(request), *deltas(text), finished(len(text), 0, reason, matched)]


async def test_a_whole_and_a_streamed_message_are_the_same(
    client: anthropic.AsyncAnthropic, service: ScriptedService
) -> None:
    whole = await client.messages.create(**ASKED)
    async with client.messages.stream(**ASKED) as stream:
        streamed = await stream.get_final_message()
    assert whole.model_dump(exclude={"id"}) == streamed.model_dump(exclude={"id", "parsed_output"})
    assert [(block.type, getattr(block, "text", None)) for block in whole.content] == [("text", "Hello")]
    assert (whole.stop_reason, whole.stop_sequence, whole.role, whole.model) == (
        "end_turn",
        None,
        "assistant",
        "scripted",
    )
    # Of the prompt's tokens two were cached, which this API counts apart.
    num_prompt_tokens = len(service.requests[0].prompt)  # type: ignore[arg-type]
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (num_prompt_tokens - 2, 2)
    assert whole.usage.output_tokens == 5
    assert whole.id.startswith("msg_")


async def test_the_events_of_a_stream_come_in_their_order(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/messages", json={**ASKED, "stream": True})
    lines = response.text.splitlines()
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert kinds == [each["type"] for each in data]
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 5,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert response.headers["request-id"] == data[0]["message"]["id"]


@pytest.mark.parametrize(
    ("script", "stop_reason", "stop_sequence"),
    [
        (ending("Hi", FinishReason.STOP, "."), "stop_sequence", "."),
        (ending("Hi", FinishReason.STOP, 7), "end_turn", None),
        (ending("Hello", FinishReason.LENGTH), "max_tokens", None),
        (ending("Hell", FinishReason.LENGTH), "model_context_window_exceeded", None),
    ],
)
async def test_why_a_message_ended(
    client: anthropic.AsyncAnthropic, service: ScriptedService, script: Any, stop_reason: str, stop_sequence: str | None
) -> None:
    service.script = script
    message = await client.messages.create(**ASKED, stop_sequences=["."])
    assert (message.stop_reason, message.stop_sequence) == (stop_reason, stop_sequence)
    assert service.requests[0].stop.stop_strings == (".",)


async def test_every_parameter_gets_to_the_core(http: httpx.AsyncClient, service: ScriptedService) -> None:
    body = {**ASKED, "temperature": 0.5, "top_p": 0.75, "top_k": 3}
    await http.post("/v1/messages?beta=true", json=body, headers={"x-blockyard-tenant": "t", "anthropic-beta": "any"})
    request = service.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.75, 3)
    assert (request.stop.max_tokens, request.tenant, request.on_disconnect) == (5, "t", OnDisconnect.ABORT)


async def test_a_length_that_does_not_fit_gives_way(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    too_long = invalid([Violation("stop.max_tokens", "is too long", Reason.PROMPT_TOO_LONG)])

    def script(request: GenerationRequest) -> Sequence[Any]:
        return [too_long] if request.stop.max_tokens is not None else answer("Hi")(request)

    service.script = script
    message = await client.messages.create(**ASKED)
    assert [request.stop.max_tokens for request in service.requests] == [5, None]
    assert message.content[0].text == "Hi"  # type: ignore[union-attr]


async def test_an_error_has_the_apis_form(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    service.script = lambda _: [invalid([Violation("prompt", "has 70 tokens", Reason.PROMPT_TOO_LONG)])]
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client.messages.create(**ASKED)
    assert caught.value.body == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": "prompt is too long: messages: has 70 tokens",
            "reason": "PROMPT_TOO_LONG",
            "violations": [{"param": "messages", "message": "has 70 tokens", "code": "PROMPT_TOO_LONG"}],
        },
    }


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.MODEL_NOT_FOUND, "not_found_error"),
        (Reason.QUEUE_FULL, "rate_limit_error"),
        (Reason.NO_READY_WORKER, "overloaded_error"),
        (Reason.MESSAGE_TOO_LARGE, "request_too_large"),
        (Reason.BUG, "api_error"),
        (Reason.QUEUE_DEADLINE, "timeout_error"),
    ],
)
async def test_the_type_of_an_error_follows_the_table(
    http: httpx.AsyncClient, service: ScriptedService, reason: Reason, kind: str
) -> None:
    service.script = lambda _: [BlockyardError(reason, "no", retry_after_seconds=2.0)]
    response = await http.post("/v1/messages", json=ASKED)
    assert response.json()["error"]["type"] == kind
    assert (response.headers["x-should-retry"], response.headers["retry-after-ms"]) == ("true", "2000")


async def test_a_stream_that_fails_ends_with_its_error(
    client: anthropic.AsyncAnthropic, service: ScriptedService
) -> None:
    failure = BlockyardError(Reason.NO_READY_WORKER, "gone")
    service.script = lambda request: [accepted(request), *deltas("He"), failure]
    with pytest.raises(anthropic.APIStatusError, match="gone"):
        async with client.messages.stream(**ASKED) as stream:
            await stream.get_final_message()


async def test_a_sequence_that_fails_by_itself_fails_the_message(
    client: anthropic.AsyncAnthropic, service: ScriptedService
) -> None:
    error = BlockyardError(Reason.NOT_FINITE, "not a number")
    end = replace(finished(2, 0, FinishReason.ERROR), error=error)
    service.script = lambda request: [accepted(request), *deltas("He"), end]
    with pytest.raises(anthropic.InternalServerError, match="not a number"):
        await client.messages.create(**ASKED)
    with pytest.raises(anthropic.APIStatusError, match="not a number"):
        async with client.messages.stream(**ASKED) as stream:
            await stream.get_final_message()


async def test_tokens_are_counted(client: anthropic.AsyncAnthropic, service: ScriptedService) -> None:
    prompt: dict[str, Any] = {"model": "scripted", "messages": HELLO, "system": "Be kind."}
    counted = await client.messages.count_tokens(**prompt)
    await client.messages.create(max_tokens=1, **prompt)
    assert counted.input_tokens == len(service.requests[0].prompt)  # type: ignore[arg-type]


async def test_what_else_the_api_has_is_refused_by_name(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/messages/batches", json={})
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"
    assert "/v1/messages/batches is not supported" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_another_method_of_its_paths_is_refused(http: httpx.AsyncClient, path: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        response = await http.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        assert response.json()["error"]["type"] == "invalid_request_error"
        assert f"{method} {path} is not supported" in response.json()["error"]["message"]


async def test_what_is_wrong_with_a_message_has_its_place_in_the_body(http: httpx.AsyncClient) -> None:
    use = {"type": "tool_use", "id": "a", "input": {}}
    body: dict[str, Any] = {
        "model": "scripted",
        "system": "Be kind.",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, {"name": "f", **use}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}, {"type": "text", "text": "So?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hm."}, {"name": "", **use}]},
            {"role": "user", "content": [{"name": "f", **use}]},
        ],
    }
    for path, more in (("/v1/messages", {"max_tokens": 5}), ("/v1/messages/count_tokens", {})):
        response = await http.post(path, json=body | more)
        assert response.status_code == 400
        violations = response.json()["error"]["violations"]
        assert [each["param"] for each in violations] == ["messages[3].content[1].name", "messages[4].content"]


async def test_somebody_is_there(http: httpx.AsyncClient) -> None:
    assert (await http.head("/")).status_code == 200


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_thinking_and_calls_of_tools_are_blocks(
    client: anthropic.AsyncAnthropic, service: ScriptedService, size: int
) -> None:
    service.script = lambda request: calling(request, size=size)
    whole = await client.messages.create(**ASKED)
    async with client.messages.stream(**ASKED) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [block.model_dump(exclude_none=True) for block in message.content] == [
            {"type": "thinking", "thinking": THOUGHT, "signature": ""},
            {"type": "text", "text": SAID},
            {"type": "tool_use", "id": "call_1", "name": "read", "input": json.loads(ARGUMENTS)},
            {"type": "tool_use", "id": "call_2", "name": "list", "input": {}},
        ]
        assert message.stop_reason == "tool_use"


async def test_thinking_is_left_out_where_nobody_wants_it(
    client: anthropic.AsyncAnthropic, service: ScriptedService
) -> None:
    service.script = calling
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    whole = await client.messages.create(**ASKED, thinking=thinking)
    async with client.messages.stream(**ASKED, thinking=thinking) as stream:
        streamed = await stream.get_final_message()
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert message.content[0].thinking == ""  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [('{"x": "\\ud83d", "y": "é"}', {"x": "\ud83d", "y": "é"}), ('{"x": NaN}', {}), ('{"x": 1e999}', {}), ("[1]", {})],
)
async def test_arguments_that_json_can_hardly_say_are_no_failure(
    http: httpx.AsyncClient, service: ScriptedService, arguments: str, read: dict[str, Any]
) -> None:
    call = Delta(0, "", (), 1, 1, tool_calls=(ToolCallDelta(0, "call_1", "f", arguments),))
    service.script = lambda request: [accepted(request), call, replace(finished(1), calls_tools=True)]
    response = await http.post("/v1/messages", json=ASKED)
    assert response.status_code == 200
    assert json.loads(response.content)["content"][0]["input"] == read
