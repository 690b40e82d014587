"""What a budget of reasoning becomes for the worker, by the model's dialect, its tokenizer and the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tokenizers import AddedToken

from blockyard.contract.request import Regex
from blockyard.contract.sampling import SamplingParams, ThinkingTokens
from blockyard.inference.v1 import inference_pb2
from gateway.dialects.answer_parser import ParsingRule
from gateway.request import GenerationRequest
from gateway.text.thinking import NO_END_TOKEN, UNKNOWN_REASONING, with_thinking
from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.demo_tokens import END_ID, THINK_ID, write_thinking_model
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.harness import DEMO_MODEL, demo_tokenizer, serving, spec
from tests.unit.gateway.text.test_fill_in_middle import backend_of, load

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.text.tokenizer import Tokenizer

HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
THINK = "{{ '<think>' }}"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_thinking_model(tmp_path_factory.mktemp("model") / "thinking"))


def prepared(prompt: str, tokenizer: Tokenizer, budget: int | None = 7, **fields: Any) -> GenerationRequest:
    sampling = SamplingParams(thinking_token_budget=budget, thinking_tokens=fields.pop("thinking_tokens", None))
    request = GenerationRequest(prompt, sampling=sampling, **fields)
    return with_thinking(request, tokenizer.encode(prompt), tokenizer)


def test_a_prompt_that_begins_reasoning_leaves_it_open(thinking: Tokenizer) -> None:
    for prompt in ("<|assistant|><think>\n", "<think>"):
        told = prepared(prompt, thinking)
        tokens = told.sampling.thinking_tokens
        assert tokens is not None
        assert (tokens.end_token_id, tokens.is_open, tokens.begins_anywhere) == (END_ID, True, False)
        assert not told.warnings


def test_reasoning_may_begin_behind_white_space(thinking: Tokenizer) -> None:
    tokens = prepared("<|assistant|>", thinking).sampling.thinking_tokens
    assert tokens is not None
    assert not tokens.is_open
    texts = [thinking.decode(begin, skip_special_tokens=False) for begin in tokens.begins]
    assert texts == ["<think>", "\n<think>", "\n\n<think>", " <think>"]
    assert all(begin[-1] == THINK_ID for begin in tokens.begins)


def test_behind_the_end_of_reasoning_there_is_nothing_to_limit(thinking: Tokenizer) -> None:
    told = prepared("<|assistant|><think>\n\n</think>\n\n", thinking)
    assert (told.sampling.thinking_tokens, told.warnings) == (None, ())


def test_tokens_of_a_client_are_replaced(thinking: Tokenizer) -> None:
    told = prepared("<think>", thinking, thinking_tokens=ThinkingTokens(5)).sampling.thinking_tokens
    assert told is not None
    assert told.end_token_id == END_ID


def test_a_form_of_an_answer_that_is_not_parsed_has_no_reasoning(thinking: Tokenizer) -> None:
    form = Regex("a")
    assert prepared("<think>", thinking, format=form).sampling.thinking_tokens is None
    assert prepared("<think>", thinking, format=form, parsing=ParsingRule("think")).sampling.thinking_tokens


def test_a_model_that_does_not_reason_needs_no_limit() -> None:
    template = "{{ '<tool_call>' }}arguments"
    plain = load_with(template)
    assert plain.dialect is not None
    told = prepared("Hi", plain)
    assert (told.sampling.thinking_tokens, told.warnings) == (None, ())


def load_with(template: str, folder: Path = DEMO_MODEL, backend: Any = None) -> Tokenizer:
    return load_tokenizer(folder).adapt(None, template, {}) if backend is None else load(folder, backend)


def test_what_cannot_be_limited_is_warned_of() -> None:
    assert prepared("Hi", demo_tokenizer()).warnings == (UNKNOWN_REASONING,)
    # The demo model has no tokens around reasoning.
    assert prepared("Hi", load_with(THINK)).warnings == (NO_END_TOKEN,)
    granite = load_with("Here is my thought process:")
    assert granite.dialect is not None
    assert prepared("Hi", granite).warnings == (NO_END_TOKEN,)


def test_harmony_may_begin_to_reason_anywhere(tmp_path: Path) -> None:
    backend = backend_of("Codestral")
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<|channel|>", "<|message|>", "<|end|>")])
    harmony = load(tmp_path, backend).adapt(None, "<|channel|>analysis<|message|>", {})
    tokens = prepared("Hi", harmony).sampling.thinking_tokens
    assert tokens is not None
    assert tokens.begins_anywhere
    assert harmony.piece(tokens.end_token_id) == "<|end|>"
    (begin,) = tokens.begins
    assert harmony.decode(begin, skip_special_tokens=False) == "<|channel|>analysis<|message|>"


async def test_each_front_has_a_name_for_it(thinking: Tokenizer) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": HI, "thinking_token_budget": 7}),
        ("/v1/completions", {"prompt": "<think>", "thinking_token_budget": 7}),
        (
            "/v1/messages",
            {
                "model": "demo",
                "max_tokens": 9,
                "messages": HI,
                "thinking": {"type": "enabled", "budget_tokens": 7},
            },
        ),
        ("/v2/models/demo/generate", {"text_input": "<think>", "thinking_token_budget": 7}),
    ]
    async with (
        FakeScheduler() as scheduler,
        serving(scheduler, tokenizer=thinking) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        for path, body in bodies:
            assert (await http.post(path, json={"max_tokens": 9, **body})).status_code == 200, path
        await front.generate(spec("<think>", sampling={"thinking_token_budget": 7}))
        conversation = {"messages": [{"role": "ROLE_USER", "content": [{"text": "Hi"}]}]}
        chat = inference_pb2.GenerationSpec(
            conversation=conversation, sampling={"thinking_token_budget": 7}, stop={"max_tokens": 9}
        )
        await front.stub.Chat(inference_pb2.ChatRequest(spec=chat))
        for added in front.scheduler.added:
            tokens = added.sampling.thinking_tokens
            assert tokens is not None
            assert (added.sampling.thinking_token_budget, tokens.end_token_id, tokens.is_open) == (7, END_ID, True)
        assert len(front.scheduler.added) == 6
        # Tokens of a client are dropped.
        given: Any = {"thinking_tokens": {"end_token_id": 5, "is_open": True}}
        await front.generate(spec("<think>", sampling=given))
        assert front.scheduler.added.pop().sampling.thinking_tokens is None
        none = {"messages": HI, "max_tokens": 2, "thinking_token_budget": -1}
        assert (await http.post("/v1/chat/completions", json=none)).status_code == 200
        disabled = {"thinking": {"type": "disabled"}, "model": "demo", "max_tokens": 9, "messages": HI}
        assert (await http.post("/v1/messages", json=disabled)).status_code == 200
        assert [each.sampling.thinking_token_budget for each in front.scheduler.added[6:]] == [None, None]
        wrong = {"type": "enabled", "budget_tokens": -3}
        error = (await http.post("/v1/messages", json=disabled | {"thinking": wrong})).json()["error"]
        assert [each["param"] for each in error["violations"]] == ["thinking.budget_tokens"]


async def test_a_warning_reaches_the_client() -> None:
    async with (
        FakeScheduler() as scheduler,
        serving(scheduler) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        answer = await http.post("/v1/completions", json={"prompt": "Hi", "thinking_token_budget": 7})
        assert answer.json()["warnings"] == [UNKNOWN_REASONING]
