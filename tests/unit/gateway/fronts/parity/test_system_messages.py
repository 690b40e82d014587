"""System messages behind others, on each front: templates get them in an order of roles that they take."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from blockyard.inference.v1 import inference_pb2
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.harness import DEMO_MODEL, END_OF_TURN, serving
from tests.unit.gateway.text.guarded_templates import TEMPLATES

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from tests.unit.gateway.harness import Front

Json = dict[str, Any]
SCHEMA: Json = {"type": "object", "properties": {}}
CALL_ID = "call12345"

# A system's message or field, one more, and others behind what the user and tools say.
TALK: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "Hi."},
    {"role": "system", "content": "It rains."},
    {"role": "assistant", "content": "Hello."},
    {"role": "developer", "content": "It snows."},
    {"role": "user", "content": "Well?"},
]
CALL: Json = {"id": CALL_ID, "type": "function", "function": {"name": "look", "arguments": "{}"}}
TASK: list[Json] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi."},
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": CALL_ID},
    {"role": "system", "content": "It rains."},
]
RAIN = "<system-reminder>\nIt rains.\n</system-reminder>"
SNOW = "<system-reminder>\nIt snows.\n</system-reminder>"

REMINDED = f"<user>Hi.</><user>{RAIN}</><assistant>Hello.</><user>{SNOW}</><user>Well?</><assistant>"
JOINED = f"Hi.\n\n{RAIN}</><assistant>Hello.</><user>{SNOW}\n\nWell?</><assistant>"
PROMPTS = {
    "plain": "<system>Be brief.</><system>Be kind.</><user>Hi.</><system>It rains.</><assistant>Hello.</>"
    "<system>It snows.</><user>Well?</><assistant>",
    "Qwen3.5": "<system>Be brief.\n\nBe kind.</>" + REMINDED,
    "Gemma 2": "<s><user>Be brief.\n\nBe kind.\n\n" + JOINED,
    "Gemma 3": "<user>Be brief.\n\nBe kind.\n\n" + JOINED,
    "Mistral 7B": "<user>Be brief.\n\nBe kind.\n\n" + JOINED,
    "Mistral Small": "<system>Be brief.\n\nBe kind.</><user>" + JOINED,
    "hoisting": "Be brief.\n\nBe kind." + REMINDED,
    "losing": "<system>Be brief.\n\nBe kind.</>" + REMINDED,
    "with tools": "<system>Be brief.\n\nBe kind.</>" + REMINDED,
}
CALLED = "<system>Be brief.</><user>Hi.</><assistant><call>look</><tool>42"
PROMPTS_OF_TASK = {
    "plain": f"{CALLED}</><system>It rains.</><assistant>",
    "losing": f"{CALLED}</><user>{RAIN}</><assistant>",
    "Qwen3.5": f"{CALLED}\n\n{RAIN}</><assistant>".replace("<call>", "<think>Hm.</think><call>"),
    "Mistral Small": f"{CALLED}\n\n{RAIN}</><assistant>",
}


def anthropic_body(messages: list[Json]) -> Json:
    """Writes a conversation as the Messages API does: the first system's message is a field."""
    told: list[Json] = []
    for message in messages[1:]:
        if message["role"] == "tool":
            block: Json = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            told.append({"role": "user", "content": [block]})
        elif "tool_calls" in message:
            thought: Json = {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
            call: Json = {"type": "tool_use", "id": CALL_ID, "name": "look", "input": {}}
            told.append({"role": "assistant", "content": [thought, call]})
        else:
            told.append(message | {"role": message["role"].replace("developer", "system")})
    tools = [{"name": "look", "input_schema": SCHEMA}]
    return {"model": "demo", "max_tokens": 8, "system": messages[0]["content"], "messages": told, "tools": tools}


def responses_body(messages: list[Json]) -> Json:
    """Writes a conversation as the Responses API does: the first system's message is a field."""
    items: list[Json] = []
    for message in messages[1:]:
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": CALL_ID, "output": message["content"]})
        elif "tool_calls" in message:
            thought: Json = {"type": "reasoning_text", "text": message["reasoning_content"]}
            items.append({"type": "reasoning", "summary": [], "content": [thought]})
            items.append({"type": "function_call", "call_id": CALL_ID, "name": "look", "arguments": "{}"})
        else:
            items.append(message)
    tool: Json = {"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}
    instructions = messages[0]["content"]
    return {"model": "demo", "instructions": instructions, "input": items, "tools": [tool], "max_output_tokens": 8}


def chat_body(messages: list[Json]) -> Json:
    tool: Json = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
    return {"model": "demo", "messages": messages, "tools": [tool], "max_tokens": 8}


def grpc_request(messages: list[Json]) -> inference_pb2.ChatRequest:
    conversation = inference_pb2.Conversation(tools=[inference_pb2.Tool(name="look", parameters='{"type": "object"}')])
    for each in messages:
        message = conversation.messages.add(role=f"ROLE_{each['role'].upper()}", content=[{"text": each["content"]}])
        if "tool_calls" in each:
            message.reasoning_content = each["reasoning_content"]
            message.tool_calls.add(id=CALL_ID, name="look", arguments="{}")
        if "tool_call_id" in each:
            message.tool_call_id = each["tool_call_id"]
    return inference_pb2.ChatRequest(spec=inference_pb2.GenerationSpec(conversation=conversation))


@asynccontextmanager
async def gateway_with(name: str, folder: Path) -> AsyncGenerator[tuple[Front, httpx.AsyncClient], None]:
    template = folder / "chat_template.jinja"
    template.write_text(TEMPLATES[name][0].replace("bos_token", "'<s>'"))
    tokenizer = load_tokenizer(DEMO_MODEL, chat_template_file=template)
    async with (
        FakeScheduler(script=scripted(then=END_OF_TURN)) as scheduler,
        serving(scheduler, tokenizer=tokenizer) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        yield front, http


async def prompts_of(name: str, messages: list[Json], folder: Path) -> dict[str, str]:
    """Returns the prompt that each front makes of a conversation."""
    bodies = {
        "/v1/chat/completions": chat_body(messages),
        "/v1/messages": anthropic_body(messages),
        "/v1/responses": responses_body(messages),
    }
    async with gateway_with(name, folder) as (front, http):
        for path, body in bodies.items():
            response = await http.post(path, json=body)
            assert response.status_code == 200, (path, response.text)
        await front.stub.Chat(grpc_request(messages))
        tokenizer = front.service.model_of("").tokenizer
        prompts = [
            tokenizer.decode(added.prompt_token_ids, skip_special_tokens=False) for added in front.scheduler.added
        ]
    return dict(zip((*bodies, "Chat"), prompts, strict=True))


@pytest.mark.parametrize("name", PROMPTS)
async def test_each_front_takes_system_messages_wherever_they_stand(name: str, tmp_path: Path) -> None:
    prompts = await prompts_of(name, TALK, tmp_path)
    assert prompts == dict.fromkeys(prompts, PROMPTS[name])


@pytest.mark.parametrize("name", PROMPTS_OF_TASK)
async def test_each_front_takes_a_system_message_behind_a_tools_result(name: str, tmp_path: Path) -> None:
    prompts = await prompts_of(name, TASK, tmp_path)
    assert prompts == dict.fromkeys(prompts, PROMPTS_OF_TASK[name])
