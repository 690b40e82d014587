"""Bodies of very many values: they are refused before anything is made of them, and long texts are not among them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockyard.contract import chat
from blockyard.errors import BlockyardError, Reason
from gateway.chat import MAX_VALUES as MAX_SCHEMA_VALUES
from gateway.chat import find_violations, prompt_of
from gateway.fronts.anthropic.schema import MessagesBody
from gateway.fronts.http_calls.bodies import BODY, MAX_VALUES, parse_body
from gateway.fronts.openai.pooling.schema import EmbeddingBody
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody
from gateway.fronts.responses.schema import ResponseBody

HI: Any = [{"role": "user", "content": "Hi"}]
TOO_MANY: dict[str, tuple[Any, dict[str, Any]]] = {
    "messages": (ChatBody, {"messages": HI * (MAX_VALUES // 2)}),
    "numbers": (ChatBody, {"messages": HI, "chat_template_kwargs": {"a": [1] * MAX_VALUES}}),
    "lists of ids": (CompletionBody, {"prompt": [[1]] * MAX_VALUES}),
    "lists of inputs": (EmbeddingBody, {"input": [[1]] * MAX_VALUES}),
    "blocks": (MessagesBody, {"model": "", "max_tokens": 1, "messages": HI * (MAX_VALUES // 2)}),
    "items": (ResponseBody, {"input": HI * (MAX_VALUES // 2)}),
    "texts with quotes": (ChatBody, {"messages": HI, "chat_template_kwargs": {"a": ['"', "\\"] * MAX_VALUES}}),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_values_are_refused_unread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, body = TOO_MANY[name]
    raw = json.dumps(body).encode()
    monkeypatch.delattr("pydantic.BaseModel.model_validate_json")
    with pytest.raises(BlockyardError) as raised:
        parse_body(kind, raw)
    (violation,) = raised.value.violations
    assert (violation.field, violation.reason) == (BODY, Reason.FIELD_INVALID)
    assert str(MAX_SCHEMA_VALUES) in violation.description


@pytest.mark.parametrize("text", [",", "[", "{,", '",[', '\\",[', '\\\\",', ',"\\'])
@pytest.mark.parametrize("behind", ["", "\\", '"'])
def test_a_text_may_have_whatever_it_has(text: str, behind: str) -> None:
    text = text * (MAX_VALUES + 10) + behind
    messages = [{"role": "user", "content": text}]
    assert parse_body(ChatBody, json.dumps({"messages": messages, "user": text}).encode()).user == text


def test_long_lists_of_ids_and_texts_are_read() -> None:
    ids = list(range(MAX_VALUES + 10))
    assert parse_body(CompletionBody, json.dumps({"prompt": ids}).encode()).prompt == [tuple(ids)]
    assert parse_body(EmbeddingBody, json.dumps({"input": ids}).encode()).input == ids


def test_arguments_of_too_many_values_are_a_text_and_such_schemas_are_none() -> None:
    many = json.dumps({"a": [1] * (MAX_VALUES + 1)})
    called = chat.Message(chat.Role.ASSISTANT, "", tool_calls=(chat.ToolCall("f", many),))
    seen: list[Any] = []

    class Renderer:
        def apply_chat_template(self, messages: list[dict[str, Any]], /, **_: Any) -> str:
            seen.extend(messages)
            return ""

    prompt_of(chat.Conversation((called,)), Renderer())
    assert seen[0]["tool_calls"][0]["function"]["arguments"] == many
    tool = chat.Tool("f", parameters=many)
    (violation,) = find_violations(chat.Conversation((chat.Message(chat.Role.USER, "Hi"),), (tool,)))
    assert violation.field == "conversation.tools[0].parameters"
    assert str(MAX_SCHEMA_VALUES) in violation.description
