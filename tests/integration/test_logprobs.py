"""Log probabilities, bad words and allowed tokens through all three services, against transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.integration.conftest import DEMO

if TYPE_CHECKING:
    from blockyard import Client
    from blockyard.client.results import Completion
    from blockyard.contract.events import TokenLogprobs
    from tests.kit.processes.system import System

PROMPT = "def read_lines(path):\n"
NUM_TOKENS = 24
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def answer(client: Client) -> Completion:
    """What is held against the truth."""
    asked: Any = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    return client.generate(PROMPT, logprobs=3, prompt_logprobs=2, **asked)


@pytest.fixture(scope="module")
def truth(client: Client, answer: Completion) -> Any:
    """The log probabilities of every token behind each token of the prompt and the answer, by transformers."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    token_ids = torch.tensor([[*client.tokenize(PROMPT), *answer.token_ids]])
    with torch.inference_mode():
        return model(token_ids).logits[0].log_softmax(-1)


def check(place: TokenLogprobs, token_id: int, expected: Any, num_top: int) -> None:
    """Holds what is told of one token against the log probabilities of all tokens in its place."""
    assert place.chosen is not None
    assert place.chosen.token_id == token_id
    assert place.chosen.rank == 1 + int((expected > expected[token_id]).sum())
    best = expected.topk(num_top)
    assert [token.token_id for token in place.top] == best.indices.tolist()
    assert [token.rank for token in place.top] == list(range(1, num_top + 1))
    for token in (place.chosen, *place.top):
        assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=TOLERANCE)


def test_each_token_of_an_answer_is_as_likely_as_transformers_says(
    client: Client, answer: Completion, truth: Any
) -> None:
    start = len(client.tokenize(PROMPT)) - 1
    logprobs = answer.choices[0].logprobs
    assert len(logprobs) == NUM_TOKENS
    for at, (place, token_id) in enumerate(zip(logprobs, answer.token_ids, strict=True)):
        check(place, token_id, truth[start + at], 3)


def test_each_token_of_a_prompt_is_as_likely_as_transformers_says(
    client: Client, answer: Completion, truth: Any
) -> None:
    token_ids = client.tokenize(PROMPT)
    first, *others = answer.prompt_logprobs
    assert first.chosen is None and not first.top
    for at, (place, token_id) in enumerate(zip(others, token_ids[1:], strict=True)):
        check(place, token_id, truth[at], 2)


def test_they_are_the_same_to_the_bit_when_the_prompt_is_cached(client: Client, answer: Completion) -> None:
    long = PROMPT * 12
    asked: Any = {"max_tokens": 4, "temperature": 0.0, "logprobs": 20, "prompt_logprobs": 20}
    first = client.generate(long, **asked)
    again = client.generate(long, **asked)
    assert len(first.prompt_logprobs) == first.usage.num_prompt_tokens
    assert again.prompt_logprobs == first.prompt_logprobs
    assert again.choices[0].logprobs == first.choices[0].logprobs


def test_an_answer_of_one_token_comes_with_those_of_its_prompt(client: Client, answer: Completion) -> None:
    short = client.generate(PROMPT, max_tokens=1, temperature=0.0, logprobs=3, prompt_logprobs=2, timeout=20)
    assert short.prompt_logprobs == answer.prompt_logprobs
    assert len(short.choices[0].logprobs) == 1


def test_every_sample_has_its_own(client: Client) -> None:
    answer = client.generate(PROMPT, max_tokens=8, n=3, seed=5, logprobs=0, prompt_logprobs=0, return_token_ids=True)
    for choice in answer.choices:
        chosen = [place.chosen and place.chosen.token_id for place in choice.logprobs]
        assert chosen == list(choice.token_ids)
        assert not any(place.top for place in choice.logprobs)
    assert len(answer.prompt_logprobs) == answer.usage.num_prompt_tokens


def test_a_stop_string_cuts_them_with_the_tokens(client: Client) -> None:
    whole = client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0).text
    stop = whole[len(whole) // 2 :][:4]
    answer = client.generate(
        PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, stop=[stop], logprobs=0, return_token_ids=True
    )
    assert len(answer.choices[0].logprobs) == len(answer.token_ids) == answer.usage.num_completion_tokens


async def test_an_echo_over_http_says_where_each_token_stands(demo: System, answer: Completion) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo.http_url}/v1", api_key="none", max_retries=0) as http:
        asked: Any = {"model": "demo", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": 2}
        asked |= {"echo": True, "extra_body": {"ignore_eos": True}}
        [choice] = (await http.completions.create(**asked)).choices
        stream = await http.completions.create(**asked, stream=True)
        streamed = [chunk.choices[0] async for chunk in stream]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens and logprobs.token_logprobs and logprobs.text_offset
    for token, offset in zip(logprobs.tokens[1:], logprobs.text_offset[1:], strict=True):
        assert choice.text[offset : offset + len(token)] == token
    chosen = [place.chosen and place.chosen.logprob for place in (*answer.prompt_logprobs, *answer.choices[0].logprobs)]
    assert logprobs.token_logprobs == chosen
    assert [token for part in streamed if part.logprobs for token in part.logprobs.tokens or ()] == logprobs.tokens
    offsets = [at for part in streamed if part.logprobs for at in part.logprobs.text_offset or ()]
    assert offsets == logprobs.text_offset


async def test_the_bytes_of_a_chat_are_its_text(demo: System) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo.http_url}/v1", api_key="none", max_retries=0) as http:
        told = await http.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "日本 é 🎉"}],
            max_tokens=NUM_TOKENS,
            logprobs=True,
            top_logprobs=20,
            temperature=5.0,
            seed=3,
        )
    [choice] = told.choices
    assert choice.logprobs is not None and choice.logprobs.content
    raw = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
    assert raw.decode(errors="replace") == choice.message.content
    assert all(len(token.top_logprobs) == 20 for token in choice.logprobs.content)


def test_a_bad_word_is_not_written(client: Client) -> None:
    asked: Any = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
    text = client.generate(PROMPT, **asked).text
    word = next(word for word in text.split() if word.isalpha() and len(word) > 2)
    other = client.generate(PROMPT, bad_words=[word], **asked).text
    assert f" {word}" in text or text.startswith(word)
    assert word not in other.split()


def test_only_allowed_tokens_are_written(client: Client) -> None:
    allowed = [300, 400, 500]
    answer = client.generate(PROMPT, max_tokens=16, seed=1, allowed_token_ids=allowed, return_token_ids=True)
    assert set(answer.token_ids) <= set(allowed)
    assert len(answer.token_ids) == 16
