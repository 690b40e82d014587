"""/tokenize and /detokenize: vLLM's bodies and answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx

    from tests.unit.gateway.fronts.openai.scripted import ScriptedService

HELLO: Any = [{"role": "user", "content": "Hi"}]


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


async def test_tokenizes_a_prompt(http: httpx.AsyncClient) -> None:
    told = (await http.post("/tokenize", json={"model": "scripted", "prompt": "Hi"})).json()
    assert told == {"count": 3, "max_model_len": 64, "tokens": [1, 72, 105], "token_strs": None}


async def test_special_tokens_can_be_left_out(http: httpx.AsyncClient) -> None:
    told = (await http.post("/tokenize", json={"prompt": "Hi", "add_special_tokens": False})).json()
    assert (told["count"], told["tokens"]) == (2, [72, 105])


async def test_tokenizes_a_chat_as_it_would_be_answered(http: httpx.AsyncClient, service: ScriptedService) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": HELLO, "tools": [tool], "chat_template_kwargs": {"mood": "good"}}
    told = (await http.post("/tokenize", json=body)).json()
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert told["tokens"] == ids_of(str(service.requests[0].prompt))


async def test_whatever_a_chat_asks_for_it_has_the_same_tokens(http: httpx.AsyncClient) -> None:
    asked = {"temperature": 0.5, "max_tokens": 9, "stream": True, "n": 2, "user": "me", "stop": ["x"]}
    plain = (await http.post("/tokenize", json={"messages": HELLO})).json()
    assert (await http.post("/tokenize", json={"messages": HELLO, **asked})).json() == plain
    error = (await http.post("/tokenize", json={"messages": HELLO, "mood": "good"})).json()["error"]
    assert (error["code"], error["param"]) == ("FIELD_INVALID", "mood")


async def test_a_form_is_known_by_a_key_of_the_body_itself(http: httpx.AsyncClient) -> None:
    """A tool's schema may have the keys of other forms."""
    schema = {"type": "object", "properties": {"messages": {}, "input": {}, "prompt": {}}}
    chat = {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    response = {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": schema}]}
    for body in (chat, response):
        told = await http.post("/tokenize", json=body)
        assert told.status_code == 200, told.text
        assert told.json()["tokens"]


async def test_a_chat_may_end_where_its_final_message_does(http: httpx.AsyncClient) -> None:
    body = {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": False}
    assert (await http.post("/tokenize", json=body)).json()["tokens"] == ids_of("user:Hi")


async def test_tells_the_vocabularys_spelling_of_tokens(http: httpx.AsyncClient) -> None:
    body = {"prompt": "Hi", "add_special_tokens": False, "return_token_strs": True}
    assert (await http.post("/tokenize", json=body)).json()["token_strs"] == ["'H'", "'i'"]


async def test_a_prompt_that_speaks_of_messages_is_a_prompt(http: httpx.AsyncClient) -> None:
    prompt = '{"messages": []}'
    told = (await http.post("/tokenize", json={"prompt": prompt, "add_special_tokens": False})).json()
    assert told["tokens"] == ids_of(prompt)


async def test_no_length_is_told_before_it_is_known(http: httpx.AsyncClient, service: ScriptedService) -> None:
    service.ready = False
    assert (await http.post("/tokenize", json={"prompt": "Hi"})).json()["max_model_len"] is None


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({}, ["prompt"]),
        ({"prompt": 5, "x": 1}, ["prompt", "x"]),
        ({"prompt": ["a"]}, ["prompt"]),
        ({"prompt": "a", "messages": HELLO}, ["prompt"]),
        ({"prompt": "a", "tools": []}, ["tools"]),
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "pilot"}]}, ["messages[0].role"]),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, ["chat_template_kwargs"]),
        ([], [None]),
    ],
)
async def test_says_what_is_wrong(http: httpx.AsyncClient, body: Any, params: list[str | None]) -> None:
    response = await http.post("/tokenize", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("FIELD_INVALID", params[0])
    assert [violation["param"] for violation in error["violations"]] == params


@pytest.mark.parametrize("name", ["add_special_tokens", "chat_template", "mm_processor_kwargs"])
async def test_says_what_is_not_served(http: httpx.AsyncClient, name: str) -> None:
    error = (await http.post("/tokenize", json={"messages": HELLO, name: True})).json()["error"]
    assert (error["code"], error["param"]) == ("UNSUPPORTED_PARAMETER", name)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {"prompt": "a"}), ("/tokenize", {"messages": HELLO}), ("/detokenize", {"tokens": []})],
)
async def test_another_model_is_not_found(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    response = await http.post(path, json={**body, "model": "other"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "MODEL_NOT_FOUND")


@pytest.mark.parametrize("text", ["", "Hi", "日本 🎉", "long " * 1000])
async def test_detokenizes(http: httpx.AsyncClient, text: str) -> None:
    assert (await http.post("/detokenize", json={"tokens": ids_of(text)})).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("tokens", "param"),
    [([-1], "tokens[0]"), ([1, 2**32], "tokens[1]"), (["a"], "tokens[0]"), ("a", "tokens"), (None, "tokens")],
)
async def test_says_which_token_is_none(http: httpx.AsyncClient, tokens: Any, param: str) -> None:
    error = (await http.post("/detokenize", json={"tokens": tokens})).json()["error"]
    assert (error["code"], error["param"]) == ("FIELD_INVALID", param)
