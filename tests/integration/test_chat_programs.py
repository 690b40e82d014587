"""Requests as Open WebUI, continue.dev and LangChain send them are served. The bodies are those that they write."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from tests.kit.processes.system import System

SYSTEM = {"role": "system", "content": "You write Python."}
USER = {"role": "user", "content": "What does os.path.join do?"}
# Continue's autocompletion stops at each mark of its templates, and at what begins the next definition.
STOPS = [
    *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>", "<|endoftext|>", "</fim_middle>", "</code>"),
    *("/src/", "#- coding: utf-8", "```", "\ndef ", "\nclass ", '\n"""#', "\n\n\n"),
]
STREAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "Open WebUI, a turn": (
        "chat/completions",
        {
            "stream": True,
            "messages": [SYSTEM, USER, {"role": "assistant", "content": "It joins."}, USER],
            "temperature": 0.8,
            "top_p": 0.9,
            "frequency_penalty": 0.1,
            "seed": 5,
            "stop": ["###"],
            "stream_options": {"include_usage": True},
            "max_tokens": 8,
        },
    ),
    "continue.dev, a turn": (
        "chat/completions",
        {
            "messages": [SYSTEM, {**USER, "content": [{"type": "text", "text": "Why?"}]}],
            "max_tokens": 8,
            "stream": True,
            "stream_options": {"include_usage": True},
            "parallel_tool_calls": False,
        },
    ),
    "continue.dev, a completion": (
        "completions",
        {
            "prompt": "<fim_prefix>def read(path):\n    <fim_suffix>\n<fim_middle>",
            "max_tokens": 8,
            "temperature": 0.01,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "stop": STOPS,
            "stream": True,
        },
    ),
    "LangChain, a stream": (
        "chat/completions",
        {"messages": [USER], "stream": True, "n": 1, "temperature": 0.7, "max_completion_tokens": 8, "logprobs": False},
    ),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "Open WebUI, a title": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "### Task:\nGenerate a title"}], "stream": False, "max_tokens": 8},
    ),
    "LangChain, a message with a name": (
        "chat/completions",
        {"messages": [{**USER, "name": "ann"}], "n": 1, "temperature": 0.7, "max_completion_tokens": 8, "stop": ["#"]},
    ),
}


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_is_served(demo: System, name: str) -> None:
    path, body = STREAMED[name]
    with httpx.stream("POST", f"{demo.http_url}/v1/{path}", json={"model": "demo", **body}, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert any(chunk["choices"] and chunk["choices"][0]["finish_reason"] for chunk in chunks)
    assert ("stream_options" in body) == any(chunk.get("usage") for chunk in chunks)


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_answer_is_served(demo: System, name: str) -> None:
    path, body = WHOLE[name]
    answer = httpx.post(f"{demo.http_url}/v1/{path}", json={"model": "demo", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_the_list_of_models_has_what_they_read(demo: System) -> None:
    listed = httpx.get(f"{demo.http_url}/v1/models", timeout=60).json()
    assert [model["id"] for model in listed["data"]] == ["demo"]
    assert listed["object"] == "list"
