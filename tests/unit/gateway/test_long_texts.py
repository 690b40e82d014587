"""Texts that no model has room for, over each API: refused with their size, and no token is made of them."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from blockyard.contract.models import Task
from blockyard.contract.pooling import PoolingKind
from blockyard.contract.sampling import StopCriteria
from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2
from blockyard.model_config.pooling.rule import PoolingRule
from gateway.fronts.openai.schema.requests import CompletionBody
from gateway.fronts.openai.tokenization import _write_tokens
from gateway.pooling import checks, inputs
from gateway.pooling.inputs import InputEncoder
from gateway.pooling.model import PooledModel
from gateway.pooling_calls import CallOptions
from gateway.request import GenerationRequest
from gateway.text import encoding, vocabulary
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.refusals import refused
from tests.unit.gateway.core import FACTS, Core
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.harness import Front, demo_tokenizer, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    import tokenizers


NUM_CHARACTERS = 200_000
TEXT = "once upon a time " * (NUM_CHARACTERS // 17)
CHAT = [{"role": "user", "content": TEXT}]
HTTP: dict[str, tuple[str, dict[str, Any], str]] = {
    "completions": ("/v1/completions", {"prompt": TEXT}, "prompt"),
    "completions of several": ("/v1/completions", {"prompt": ["Hi", TEXT]}, "prompt"),
    "completions with ids": ("/v1/completions", {"prompt": TEXT, "return_token_ids": True}, "prompt"),
    "an echo": ("/v1/completions", {"prompt": TEXT, "echo": True, "logprobs": 1}, "prompt"),
    "chat": ("/v1/chat/completions", {"messages": CHAT}, "messages"),
    "tokenize": ("/tokenize", {"prompt": TEXT}, "prompt"),
    "tokenize a chat": ("/tokenize", {"messages": CHAT}, "prompt"),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": 5}, "messages"),
    "count_tokens": ("/v1/messages/count_tokens", {"messages": CHAT}, "messages"),
    "responses": ("/v1/responses", {"input": TEXT}, "input"),
    "input_tokens": ("/v1/responses/input_tokens", {"input": TEXT}, "input"),
}


class Calls:
    """What the tokenizer was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: list[str] = []
        encode_text = vocabulary.encode_text

        def encode(backend: tokenizers.Tokenizer, text: str, specials: bool = False) -> tokenizers.Encoding:
            self.texts.append(text)
            return encode_text(backend, text, specials)

        monkeypatch.setattr(vocabulary, "encode_text", encode)


def cut_slices(monkeypatch: pytest.MonkeyPatch, num_characters: int) -> None:
    """Makes slices shorter than they are."""
    for module in (vocabulary, encoding):
        monkeypatch.setattr(module, "SLICE_CHARACTERS", num_characters)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        FakeScheduler() as scheduler,
        serving(scheduler) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=60, verify=False) as client,
    ):
        yield client


@pytest.mark.parametrize("name", HTTP)
async def test_over_http_no_token_is_made(http: httpx.AsyncClient, calls: Calls, name: str) -> None:
    path, body, place = HTTP[name]
    answer = await http.post(path, json={"model": "demo", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["reason"] == Reason.PROMPT_TOO_LONG, error
    assert [violation["param"] for violation in error["violations"]] == [place]
    assert "characters, which are at least" in error["message"]
    assert "maximum context length is 1024 tokens" in error["message"]
    assert not [text for text in calls.texts if len(text) > 100]


GRPC: dict[str, Callable[[Front], Any]] = {
    "Generate": lambda front: front.stub.Generate(
        inference_pb2.GenerateRequest(spec=inference_pb2.GenerationSpec(text=TEXT))
    ),
    "Chat": lambda front: front.stub.Chat(
        inference_pb2.ChatRequest(
            spec={"conversation": {"messages": [{"role": "ROLE_USER", "content": [{"text": TEXT}]}]}},  # type: ignore[arg-type]
        )
    ),
    "Tokenize": lambda front: front.stub.Tokenize(inference_pb2.TokenizeRequest(text=TEXT)),
}


@pytest.mark.parametrize("name", GRPC)
async def test_over_grpc_no_token_is_made(front: Front, calls: Calls, name: str) -> None:
    error = await refused(GRPC[name](front))
    assert error.reason is Reason.PROMPT_TOO_LONG
    assert "characters, which are at least" in error.message
    assert not [text for text in calls.texts if len(text) > 100]


async def test_more_ids_than_the_model_takes_are_no_text(front: Front, http: httpx.AsyncClient) -> None:
    ids = [9] * (FACTS.max_model_len + 1)
    error = await refused(front.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=ids)))
    assert error.reason is Reason.PROMPT_TOO_LONG
    told = (await http.post("/detokenize", json={"tokens": ids})).json()["error"]
    assert (told["reason"], told["param"]) == ("PROMPT_TOO_LONG", "tokens")
    assert (await http.post("/detokenize", json={"tokens": ids[1:]})).status_code == 200


async def refusal(request: GenerationRequest) -> str:
    with pytest.raises(BlockyardError) as raised:
        await Core().service.start(request)
    (violation,) = raised.value.violations
    assert violation.reason is Reason.PROMPT_TOO_LONG
    return violation.description


async def test_everything_else_that_is_wrong_is_told_with_it() -> None:
    with pytest.raises(BlockyardError) as raised:
        await Core().start(prompt=TEXT, n=0, stop=StopCriteria(max_tokens=0))
    assert {violation.field for violation in raised.value.violations} == {"prompt", "n", "stop.max_tokens"}


@pytest.mark.parametrize("excess", [1, 500])
async def test_a_little_too_much_is_counted(excess: int) -> None:
    text = "a" + " a" * (FACTS.max_model_len - 2 + excess)
    assert len(demo_tokenizer().encode(text)) == FACTS.max_model_len - 1 + excess + 1
    assert f"has {FACTS.max_model_len + excess} tokens" in await refusal(GenerationRequest(text))


async def test_no_more_is_counted_than_two_lengths(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_slices(monkeypatch, 512)
    text = "a" + " a" * 10_000
    assert demo_tokenizer().min_tokens(text) < FACTS.max_model_len
    assert f"has {len(text)} characters, which are at least 2" in await refusal(GenerationRequest(text))
    assert sum(map(len, calls.texts)) < 3 * 2 * FACTS.max_model_len


async def test_the_longest_prompt_that_fits_is_served(calls: Calls) -> None:
    longest = max(demo_tokenizer().backend.get_vocab(with_added_tokens=False), key=len).replace("Ġ", " ")
    # Runs of spaces, and what ends each of them: nothing else has as many characters.
    text = (longest + "\n") * ((FACTS.max_model_len - 2) // 2)
    core = Core()
    await core.start(prompt=text)
    assert len(core.link.adds[0].submission.prompt_token_ids) < FACTS.max_model_len
    assert len(text) > 10 * FACTS.max_model_len


async def test_a_text_that_is_cut_has_its_last_tokens(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tuple(demo_tokenizer().encode(TEXT))
    cut_slices(monkeypatch, 1000)
    for limit, kept in ((5, 5), (-1, FACTS.max_model_len - 8)):
        core = Core()
        calls.texts.clear()
        await core.start(prompt=TEXT, truncate_prompt_tokens=limit, stop=StopCriteria(max_tokens=8))
        assert tuple(core.link.adds[0].submission.prompt_token_ids) == whole[-kept:]
        assert sum(map(len, calls.texts)) < 10_000


async def test_a_cut_above_the_models_length_helps_nothing(calls: Calls) -> None:
    assert "characters" in await refusal(GenerationRequest(TEXT, truncate_prompt_tokens=10**9))
    assert calls.texts == []


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing is collected during the test, and what other tests left is not seen."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.usefixtures("no_collector")
async def test_a_call_that_was_refused_leaves_nothing_to_the_collector(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_slices(monkeypatch, 512)
    # The last one is refused by a thread.
    bodies: list[dict[str, Any]] = [{"prompt": TEXT}, {"messages": CHAT}, {"prompt": " a" * 10_000}]
    for body in bodies:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        assert (await http.post(path, json=body)).status_code == 400
    await asyncio.sleep(0)
    assert [each for each in gc.get_objects() if isinstance(each, CompletionBody | GenerationRequest)] == []


@pytest.mark.usefixtures("no_collector")
async def test_over_grpc_too_nothing_is_left_to_the_collector(front: Front) -> None:
    for name in GRPC:
        await refused(GRPC[name](front))
    assert [each for each in gc.get_objects() if isinstance(each, GenerationRequest)] == []


@pytest.fixture
def model() -> PooledModel:
    rule = PoolingRule(task=Task.EMBED, kind=PoolingKind.MEAN, rows=PoolingKind.MEAN)
    return PooledModel(Task.EMBED, rule, InputEncoder(demo_tokenizer(), rule, 64), 64, 4096, (), 8)


def test_an_input_is_too_long_by_its_characters(model: PooledModel) -> None:
    inputs = ("short", TEXT, (5,) * 1000, "a" * 64)
    (violation,) = checks.check_characters("inputs", inputs, CallOptions(), model)
    assert (violation.field, violation.reason) == ("inputs[1]", Reason.PROMPT_TOO_LONG)
    assert f"has {len(TEXT)} characters" in violation.description and "64 tokens of an input" in violation.description
    assert list(checks.check_characters("inputs", inputs, CallOptions(truncate_prompt_tokens=-1), model)) == []


def test_an_input_is_encoded_as_far_as_it_matters(model: PooledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a cat sat on a mat " * 1000
    whole = encoding.run_steps(inputs.encode_pair(demo_tokenizer().vocabulary, text))
    cut_slices(monkeypatch, 100)
    some = encoding.run_steps(model.encoder.encode(text, CallOptions()))
    assert not some.is_whole
    assert 128 <= len(some.token_ids) < 200
    cut = encoding.run_steps(model.encoder.encode(text, CallOptions(truncate_prompt_tokens=20)))
    assert cut == (whole.token_ids[:20], 0, True)


@pytest.mark.parametrize("count", [0, 1, 4096, 4097, 10_000])
def test_a_list_of_ids_is_written_in_parts(count: int) -> None:
    token_ids = list(range(count))
    parts = list(_write_tokens(token_ids, None, [f'„{number}"' for number in token_ids]))
    assert max(map(len, parts)) < 100_000
    told = httpx.Response(200, content=b"".join(parts)).json()
    assert told == {
        "count": count,
        "max_model_len": None,
        "tokens": token_ids,
        "token_strs": [f'„{number}"' for number in token_ids],
    }
