"""Beam search through all three services and both fronts, against transformers on the same files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from blockyard import BeamSearch, Client
from tests.integration.conftest import DEMO

if TYPE_CHECKING:
    from tests.kit.processes.system import System

PROMPT = "def read_lines(path):\n"
NUM_TOKENS = 20
EARLY_STOPPING = {"heuristic": False, "first": True, "never": "never"}


def by_transformers(search: BeamSearch, n: int) -> list[tuple[str, float]]:
    """The texts of the best beams with their scores."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    token_ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    found = model.generate(
        token_ids,
        num_beams=search.width,
        num_return_sequences=n,
        length_penalty=search.length_penalty,
        early_stopping=EARLY_STOPPING[search.early_stopping],
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = tokenizer.batch_decode(found.sequences[:, token_ids.shape[1] :], skip_special_tokens=True)
    return list(zip(texts, found.sequences_scores.tolist(), strict=True))


@pytest.mark.parametrize(
    ("search", "n"),
    [(BeamSearch(2), 1), (BeamSearch(4, length_penalty=0.5), 3), (BeamSearch(8, early_stopping="first"), 2)],
    ids=["two", "a penalty for length", "the first eight"],
)
async def test_both_fronts_tell_the_beams_of_transformers(demo: System, search: BeamSearch, n: int) -> None:
    expected = by_transformers(search, n)
    with Client(demo.grpc_target) as client:
        answer = client.generate(PROMPT, n=n, beam_search=search, max_tokens=NUM_TOKENS)
    assert [choice.text for choice in answer.choices] == [text for text, _ in expected]
    assert [choice.score for choice in answer.choices] == pytest.approx([score for _, score in expected], abs=1e-4)

    asked = {"use_beam_search": True, "best_of": search.width, "length_penalty": search.length_penalty}
    asked["early_stopping"] = EARLY_STOPPING[search.early_stopping]
    async with openai.AsyncOpenAI(base_url=f"{demo.http_url}/v1", api_key="none", max_retries=0) as http:
        body: Any = {"model": "demo", "prompt": PROMPT, "n": n, "max_tokens": NUM_TOKENS, "extra_body": asked}
        whole: Any = await http.completions.create(**body)
        streamed: Any = [chunk.choices[0] async for chunk in await http.completions.create(**body, stream=True)]
    told = [(choice.text, choice.score) for choice in whole.choices]
    assert told == [(choice.text, choice.score) for choice in answer.choices]
    texts = ["".join(part.text for part in streamed if part.index == index) for index in range(n)]
    assert list(zip(texts, [part.score for part in streamed if part.finish_reason], strict=True)) == told
