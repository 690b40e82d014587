"""Text in, text out, against transformers on the same files, through every front and library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from blockyard import AsyncClient, Client
from blockyard.contract.events import Delta
from blockyard.contract.sampling import FinishReason
from tests.integration.conftest import DEMO

if TYPE_CHECKING:
    from tests.kit.processes.system import System

PROMPT = "def read_lines(path):\n"
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """What transformers gives for the prompt, greedily, in float32."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    token_ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        output = model.generate(token_ids, max_new_tokens=NUM_TOKENS, do_sample=False)[0, token_ids.shape[1] :].tolist()
    end = tokenizer.eos_token_id
    output = output[: output.index(end)] if end in output else output
    return {"prompt_ids": token_ids[0].tolist(), "ids": output, "text": tokenizer.decode(output)}


def test_client_library(demo: System, reference: dict[str, Any]) -> None:
    with Client(demo.grpc_target) as client:
        assert client.tokenize(PROMPT) == reference["prompt_ids"]
        answer = client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, return_token_ids=True)
        assert list(answer.token_ids)[: len(reference["ids"])] == reference["ids"]
        assert answer.text == reference["text"]
        assert answer.usage.num_prompt_tokens == len(reference["prompt_ids"])
        streamed = list(client.stream(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0))
        deltas = [event for event in streamed if isinstance(event, Delta)]
        assert "".join(delta.text for delta in deltas) == reference["text"]
        # How many pieces there are depends on how late their reader is; that each token is sent at once is a unit test.
        (model,) = client.list_models()
        assert (model.name, model.has_chat_template, model.batch_invariant) == ("demo", True, True)


async def test_async_client_and_several_samples(demo: System) -> None:
    async with AsyncClient(demo.grpc_target) as client:
        options = {"n": 3, "max_tokens": 24, "temperature": 0.8, "seed": 11}
        first = await client.generate(PROMPT, **options)
        again = await client.generate(PROMPT, **options)
        assert [choice.text for choice in first.choices] == [choice.text for choice in again.choices]
        assert len({choice.text for choice in first.choices}) == 3
        unseeded = await client.generate(PROMPT, max_tokens=24, request_id="a-name")
        repeated = await client.generate(PROMPT, max_tokens=24, seed=unseeded.seed)
        assert unseeded.text == repeated.text


async def test_stop_string_ends_the_text_before_it(demo: System, reference: dict[str, Any]) -> None:
    text: str = reference["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 5]
    async with AsyncClient(demo.grpc_target) as client:
        answer = await client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, stop=[stop])
    assert answer.text == text[: text.index(stop)]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.choices[0].matched_stop == stop


async def test_openai_package(demo: System, reference: dict[str, Any]) -> None:
    async with openai.AsyncOpenAI(base_url=f"{demo.http_url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in (await client.models.list()).data] == ["demo"]
        answer = await client.completions.create(model="demo", prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0)
        assert answer.choices[0].text == reference["text"]
        stream = await client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, stream=True
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == reference["text"]
        messages: Any = [{"role": "user", "content": "What is a list?"}]
        whole = await client.chat.completions.create(model="demo", messages=messages, max_tokens=32, temperature=0)
        parts = await client.chat.completions.create(
            model="demo", messages=messages, max_tokens=32, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in parts])
        assert text == whole.choices[0].message.content
        assert text.strip()
