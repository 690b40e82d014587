"""The Responses front with the real client, on a script."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import openai
import pytest

from blockyard.contract.request import OnDisconnect
from blockyard.contract.sampling import FinishReason
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from tests.unit.gateway.fronts.openai.scripted import (
    ARGUMENTS,
    SAID,
    THOUGHT,
    accepted,
    calling,
    deltas,
    finished,
    likely,
)

if TYPE_CHECKING:
    import httpx

    from tests.unit.gateway.fronts.openai.scripted import ScriptedService

ASKED: dict[str, Any] = {"model": "scripted", "input": "Hi"}


async def final_of(stream: Any) -> Any:
    return [event async for event in stream][-1].response


async def test_a_whole_and_a_streamed_response_are_the_same(
    client: openai.AsyncOpenAI, service: ScriptedService
) -> None:
    whole = await client.responses.create(**ASKED)
    streamed = await final_of(await client.responses.create(**ASKED, stream=True))
    assert whole.output_text == streamed.output_text == "Hello"
    assert (whole.status, whole.model, whole.store) == ("completed", "scripted", False)
    assert whole.usage == streamed.usage
    assert whole.usage is not None
    num_prompt_tokens = len(service.requests[0].prompt)  # type: ignore[arg-type]
    assert (whole.usage.input_tokens, whole.usage.input_tokens_details.cached_tokens) == (num_prompt_tokens, 2)
    assert (whole.usage.output_tokens, whole.usage.total_tokens) == (5, num_prompt_tokens + 5)
    assert service.requests[0].on_disconnect is OnDisconnect.ABORT


async def test_the_events_of_a_stream_come_in_their_order(client: openai.AsyncOpenAI) -> None:
    events: list[Any] = [event async for event in await client.responses.create(**ASKED, stream=True)]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 5,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"
    assert events[2].item.id == events[4].item_id == events[-1].response.output[0].id


async def test_an_answer_that_is_cut_is_incomplete(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.script = lambda request: [accepted(request), *deltas("Hel"), finished(3, 0, FinishReason.LENGTH)]
    whole = await client.responses.create(**ASKED, max_output_tokens=3)
    streamed = await final_of(await client.responses.create(**ASKED, max_output_tokens=3, stream=True))
    for response in (whole, streamed):
        assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
        assert response.incomplete_details.reason == "max_output_tokens"
    assert service.requests[0].stop.max_tokens == 3


async def test_log_probabilities_come_if_included(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    pieces = [replace(delta, logprobs=(entry,)) for delta, entry in zip(deltas("Hi"), likely("Hi"), strict=True)]  # type: ignore[type-var]
    service.script = lambda request: [accepted(request), *pieces, finished(2)]
    asked: dict[str, Any] = {**ASKED, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole: Any = await client.responses.create(**asked)
    events: list[Any] = [event async for event in await client.responses.create(**asked, stream=True)]
    told = whole.output[0].content[0].logprobs
    assert [(entry.token, entry.logprob, entry.top_logprobs[0].token) for entry in told] == [
        ("H", -1.0, "?"),
        ("i", -2.0, "?"),
    ]
    streamed = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.logprob for entry in streamed] == [-1.0, -2.0]
    assert service.requests[0].sampling.logprobs == 1


async def test_an_error_has_the_apis_form_and_names(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    wrong = [Violation("conversation.messages[0].role", "is wrong"), Violation("stop.max_tokens", "is too long")]
    service.script = lambda _: [invalid(wrong)]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**ASKED)
    assert [each["param"] for each in caught.value.body["violations"]] == ["input[0].role", "max_output_tokens"]  # type: ignore[index]


async def test_a_stream_that_fails_says_so_in_its_last_event(
    client: openai.AsyncOpenAI, service: ScriptedService
) -> None:
    failure = BlockyardError(Reason.NO_READY_WORKER, "gone")
    service.script = lambda request: [accepted(request), *deltas("He"), failure]
    response = await final_of(await client.responses.create(**ASKED, stream=True))
    assert (response.status, response.error.code, response.error.message) == ("failed", "NO_READY_WORKER", "gone")
    with pytest.raises(openai.InternalServerError, match="gone"):
        await client.responses.create(**ASKED)


async def test_the_body_is_told_again_with_the_apis_defaults(client: openai.AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    told: dict[str, Any] = {"temperature": 0.5, "metadata": {"a": "b"}, "reasoning": {"effort": "low"}}
    response = await client.responses.create(**ASKED, instructions="Be kind.", tools=[tool], **told)
    assert (response.instructions, response.temperature, response.metadata) == ("Be kind.", 0.5, {"a": "b"})
    assert response.tools[0].name == "f"  # type: ignore[union-attr]
    assert (response.tool_choice, response.parallel_tool_calls, response.top_p) == ("auto", True, None)
    assert response.reasoning is not None
    assert response.reasoning.effort == "low"


async def test_the_tokens_of_an_input_are_counted(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    asked: dict[str, Any] = {**ASKED, "instructions": "Be kind.", "reasoning": {"effort": "low"}}
    counted = await client.responses.input_tokens.count(**asked)
    await client.responses.create(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == len(service.requests[0].prompt)  # type: ignore[arg-type]
    assert (await client.responses.input_tokens.count(model="scripted", instructions="Be kind.")).input_tokens


async def test_what_is_wrong_with_an_item_has_its_place_in_the_body(http: httpx.AsyncClient) -> None:
    call = {"type": "function_call", "call_id": "a", "arguments": "{}"}
    items: list[Any] = [
        {"role": "developer", "content": "The directory is /src."},
        {"role": "user", "content": "Hi"},
        {"type": "reasoning", "summary": []},
        {"role": "assistant", "content": "I look."},
        {"name": "f", **call},
        {"name": "", **call},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"name": "", **call},
    ]
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        response = await http.post(path, json={"input": items, "instructions": "Be kind."})
        assert response.status_code == 400
        violations = response.json()["error"]["violations"]
        assert [each["param"] for each in violations] == ["input[5].name", "input[7].name"]


async def test_what_else_the_api_has_is_refused_by_name(http: httpx.AsyncClient) -> None:
    refusal = await http.get("/v1/responses/resp_1/input_items")
    assert refusal.status_code == 400
    assert "GET /v1/responses/resp_1/input_items is not supported" in refusal.json()["error"]["message"]


async def test_other_methods_of_its_paths_are_refused(http: httpx.AsyncClient) -> None:
    for method, path, allowed in (
        ("DELETE", "resp_1", "GET"),
        ("POST", "compact", "GET"),
        ("GET", "a/cancel", "POST"),
        ("GET", "input_tokens", "POST"),
    ):
        refusal = await http.request(method, f"/v1/responses/{path}")
        assert (refusal.status_code, refusal.headers["allow"]) == (405, allowed)
        message = refusal.json()["error"]["message"]
        assert message == f"Not supported, since answers are not stored: {method} /v1/responses/{path}"


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_reasoning_and_calls_of_tools_are_items(
    client: openai.AsyncOpenAI, service: ScriptedService, size: int
) -> None:
    service.script = lambda request: calling(request, size=size)
    whole: Any = await client.responses.create(**ASKED)
    events: list[Any] = [event async for event in await client.responses.create(**ASKED, stream=True)]
    for response in (whole, events[-1].response):
        thought, said, first, second = response.output
        assert (thought.type, thought.content[0].text, said.content[0].text) == ("reasoning", THOUGHT, SAID)
        assert (first.type, first.call_id, first.name, first.arguments) == (
            "function_call",
            "call_1",
            "read",
            ARGUMENTS,
        )
        assert (second.call_id, second.name, second.arguments) == ("call_2", "list", "{}")
        assert response.usage.output_tokens_details.reasoning_tokens == len(THOUGHT)
    done = [item for item in events if item.type == "response.output_item.done"]
    assert [event.item for event in done] == events[-1].response.output
    arguments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(arguments) == ARGUMENTS + "{}"
