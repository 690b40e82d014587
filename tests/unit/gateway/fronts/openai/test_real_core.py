"""The OpenAI front on the gateway's real core, attached to a fake scheduler over a socket."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.harness import Front, demo_tokenizer, ids_of, serving, spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from gateway.text.tokenizer import Tokenizer

HELLO: Any = [{"role": "user", "content": "Hi"}]


@dataclass
class Both:
    """A gateway with both fronts."""

    front: Front
    scheduler: FakeScheduler
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient


@asynccontextmanager
async def both_of(scheduler: FakeScheduler, tokenizer: Tokenizer | None = None) -> AsyncIterator[Both]:
    async with (
        serving(scheduler, tokenizer=tokenizer) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)
        yield Both(front, scheduler, client, http)


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    async with FakeScheduler() as scheduler, both_of(scheduler) as both:
        yield both


async def texts_of(stream: Any, count: int) -> list[str]:
    texts = [""] * count
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return texts


async def test_whole_streamed_and_grpc_answers_are_the_same(both: Both) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": "Once upon a time", "n": 3, "seed": 5, "max_tokens": 40}
    whole = await both.openai.completions.create(**asked)
    streamed = await texts_of(await both.openai.completions.create(**asked, stream=True), 3)
    request = spec("Once upon a time", max_tokens=40, n=3, sampling={"seed": 5})
    grpc_texts = [choice.text for choice in (await both.front.generate(request)).choices]
    assert [choice.text for choice in whole.choices] == streamed == grpc_texts
    assert len(set(streamed)) == 3
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 120
    assert whole.system_fingerprint == "fake"


async def test_several_prompts_are_answered_each_as_alone(both: Both) -> None:
    prompts = ["one", "two three", "four"]
    asked: dict[str, Any] = {"model": "demo", "n": 2, "seed": 3, "max_tokens": 20}
    alone = [await both.openai.completions.create(prompt=prompt, **asked) for prompt in prompts]
    expected = [choice.text for answer in alone for choice in answer.choices]
    together = await both.openai.completions.create(prompt=prompts, **asked)
    assert [choice.text for choice in together.choices] == expected
    streamed = await both.openai.completions.create(prompt=prompts, stream=True, **asked)
    assert await texts_of(streamed, 6) == expected
    assert together.usage is not None
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone if answer.usage)


async def test_every_parameter_gets_to_the_scheduler(both: Both) -> None:
    await both.openai.completions.create(
        model="demo",
        prompt=[7, 8],
        max_tokens=5,
        temperature=0.5,
        top_p=0.75,
        seed=9,
        presence_penalty=0.25,
        frequency_penalty=-0.25,
        logit_bias={"65": -2},
        extra_body={
            "top_k": 5,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [33],
        },
    )
    (added,) = both.scheduler.added
    assert list(added.prompt_token_ids) == [7, 8]
    assert (added.max_tokens, added.min_tokens, list(added.stop_token_ids)) == (5, 2, [33])
    sampling = added.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.75, 5, 0.125)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.25, -0.25, 1.5)
    assert (sampling.seed, dict(sampling.logit_bias)) == (9, {65: -2.0})


async def test_a_completion_has_16_tokens_unless_told_otherwise(both: Both) -> None:
    answer = await both.openai.completions.create(model="demo", prompt="a")
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


async def test_the_default_length_gives_way_to_the_models(both: Both) -> None:
    prompt = [10] * (both.scheduler.facts.max_model_len - 3)
    answer = await both.openai.completions.create(model="demo", prompt=prompt)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        await both.openai.completions.create(model="demo", prompt=prompt, max_tokens=16)
    assert caught.value.param == "max_tokens"


async def test_a_chat_may_be_as_long_as_the_model(both: Both) -> None:
    answer = await both.openai.chat.completions.create(model="demo", messages=HELLO)
    assert answer.usage is not None
    assert answer.usage.total_tokens == both.scheduler.facts.max_model_len


async def test_a_chat_is_what_the_template_makes_of_it(both: Both) -> None:
    await both.openai.chat.completions.create(model="demo", messages=HELLO, max_tokens=1)
    rendered = demo_tokenizer().apply_chat_template(HELLO)
    assert list(both.scheduler.added[0].prompt_token_ids) == ids_of(rendered)


async def test_a_stop_string_ends_a_choice(both: Both) -> None:
    both.scheduler.script = scripted(*ids_of("one two END three"))
    asked: dict[str, Any] = {"model": "demo", "prompt": "a", "stop": "END", "max_tokens": 50}
    answer = await both.openai.completions.create(**asked)
    choice: Any = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one two ", "stop", "END")
    assert await texts_of(await both.openai.completions.create(**asked, stream=True), 1) == ["one two "]
    kept = await both.openai.completions.create(**asked, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == "one two END"


async def test_an_end_token_ends_a_choice_unless_ignored(both: Both) -> None:
    both.scheduler.script = scripted(*ids_of("one"), 0, *ids_of(" two"))
    asked: dict[str, Any] = {"model": "demo", "prompt": "a", "max_tokens": 3}
    choice: Any = (await both.openai.completions.create(**asked)).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("one", "stop", None)
    longer = await both.openai.completions.create(**asked, extra_body={"ignore_eos": True})
    assert longer.choices[0].text == "one two"
    special = await both.openai.completions.create(
        **asked, extra_body={"ignore_eos": True, "skip_special_tokens": False}
    )
    assert special.choices[0].text == "one<|endoftext|> two"


async def test_token_ids_are_those_of_the_scheduler(both: Both) -> None:
    extra = {"return_token_ids": True}
    answer: Any = await both.openai.completions.create(model="demo", prompt="Hi", seed=1, extra_body=extra)
    (added,) = both.scheduler.added
    choice = answer.choices[0]
    assert choice.prompt_token_ids == list(added.prompt_token_ids) == demo_tokenizer().encode("Hi")
    assert choice.token_ids == [both.scheduler.script(added, 0, position) for position in range(16)]
    chat: Any = await both.openai.chat.completions.create(model="demo", messages=HELLO, max_tokens=2, extra_body=extra)
    assert chat.prompt_token_ids == list(both.scheduler.added[1].prompt_token_ids)


async def test_a_prompt_is_echoed(both: Both) -> None:
    plain = await both.openai.completions.create(model="demo", prompt="Hi there", seed=1)
    echoed = await both.openai.completions.create(model="demo", prompt="Hi there", seed=1, echo=True)
    assert echoed.choices[0].text == "Hi there" + plain.choices[0].text


async def test_every_wrong_value_is_told_at_once_under_names_of_this_api(both: Both) -> None:
    wrong = {
        "n": 0,
        "temperature": -1,
        "top_p": 0,
        "top_k": -2,
        "min_p": 2,
        "presence_penalty": 3,
        "frequency_penalty": -3,
        "repetition_penalty": 0,
        "seed": -1,
        "max_tokens": 0,
        "min_tokens": -1,
        "logit_bias": {"9999": 1},
        "stop": ["", "x"],
        "stop_token_ids": [-1],
        "request_id": "no blanks",
    }
    for path, body, kind in (
        ("/v1/completions", {"prompt": [[]]}, CompletionBody),
        ("/v1/chat/completions", {"messages": HELLO}, ChatBody),
    ):
        error = (await both.http.post(path, json={**body, **wrong})).json()["error"]
        told = {violation["param"] for violation in error["violations"]}
        assert told == set(wrong) | ({"prompt"} if "prompt" in body else set())
        assert told <= set(kind.model_fields)
        assert error["code"] == "FIELD_INVALID"
    assert both.scheduler.added == []


async def test_a_prompt_that_is_too_long_is_told_under_its_name(both: Both) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await both.openai.completions.create(model="demo", prompt=[10] * 5000)
    assert told_as_too_long(caught.value) == "prompt"
    with pytest.raises(openai.BadRequestError) as caught:
        await both.openai.chat.completions.create(model="demo", messages=[{"role": "user", "content": "word " * 5000}])
    assert told_as_too_long(caught.value) == "messages"


async def test_an_answer_that_a_shorter_prompt_would_leave_room_for_is_told_as_too_long(both: Both) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await both.openai.completions.create(model="demo", prompt=[10] * 1000, max_tokens=100)
    assert told_as_too_long(caught.value) == "max_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        await both.openai.chat.completions.create(model="demo", messages=HELLO, max_completion_tokens=1020)
    assert told_as_too_long(caught.value) == "max_completion_tokens"


async def test_a_length_that_no_prompt_leaves_room_for_is_a_wrong_field(both: Both) -> None:
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 1024 tokens") as caught:
        await both.openai.completions.create(model="demo", prompt="a", max_tokens=1024)
    assert (caught.value.code, caught.value.param) == ("FIELD_INVALID", "max_tokens")


def told_as_too_long(error: openai.BadRequestError) -> str | None:
    """Checks what client libraries look for in an error, and gives its parameter."""
    # langchain and many agents; litellm and its routers; what reads the length out of the sentence.
    assert "context_length_exceeded" in str(error)
    assert "this model's maximum context length is" in str(error).lower()
    length = re.search(r"maximum context length is (\d+) tokens", str(error))
    assert length is not None and length[1] == "1024"
    assert isinstance(error.body, dict)
    assert (error.code, error.body["reason"]) == ("context_length_exceeded", "PROMPT_TOO_LONG")
    return error.param


async def test_an_unknown_model_is_named(both: Both) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await both.openai.completions.create(model="gpt-4", prompt="a")
    assert (caught.value.code, caught.value.param) == ("MODEL_NOT_FOUND", "model")


async def test_what_the_scheduler_refuses_has_a_status_line(both: Both) -> None:
    both.scheduler.refusals = {"big": BlockyardError(Reason.NEVER_FITS, "at most 100 tokens fit")}
    with pytest.raises(openai.BadRequestError, match="at most 100 tokens fit"):
        await both.openai.completions.create(model="demo", prompt="a", stream=True, extra_body={"request_id": "big"})


async def test_a_running_id_cannot_be_taken_twice(both: Both) -> None:
    both.scheduler.pause()
    extra = {"request_id": "mine"}
    stream = await both.openai.completions.create(model="demo", prompt="a", stream=True, extra_body=extra)
    with pytest.raises(openai.ConflictError) as caught:
        await both.openai.completions.create(model="demo", prompt="b", extra_body=extra)
    assert caught.value.code == "REQUEST_ID_CONFLICT"
    await stream.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_is_cancelled_over_grpc_by_its_id(both: Both, stream: bool) -> None:
    both.scheduler.pause()
    asked = both.openai.completions.create(model="demo", prompt="a", stream=stream, extra_body={"request_id": "mine"})
    call: asyncio.Task[Any] = asyncio.create_task(asked)
    await both.scheduler.wait_until(lambda: len(both.scheduler.added) == 1)
    if stream:
        events = await call
        call = asyncio.create_task(texts_of(events, 1))
    request = inference_pb2.CancelGenerateRequest(request_ids=["mine"])
    assert (await both.front.stub.CancelGenerate(request)).cancelled_request_ids == ["mine"]
    with pytest.raises(openai.APIError) as caught:
        await call
    assert caught.value.code == "CLIENT_CANCELLED"
    if not stream:
        assert caught.value.status_code == 499  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_scheduler(both: Both, stream: bool) -> None:
    both.scheduler.pause()
    body = {"prompt": ["a", "b"], "stream": stream, "n": 2}
    call = asyncio.create_task(both.http.post("/v1/completions", json=body))
    await both.scheduler.wait_until(lambda: both.scheduler.num_sequences == 4)
    call.cancel()
    await both.scheduler.wait_until(lambda: len(both.scheduler.aborted) == 2)
    assert both.scheduler.num_sequences == 0


async def test_a_scheduler_that_dies_is_a_pause(both: Both) -> None:
    asked: dict[str, Any] = {"model": "demo", "prompt": "a", "seed": 5}
    expected = (await both.openai.completions.create(**asked)).choices[0].text
    both.scheduler.pause()
    stream = await both.openai.completions.create(**asked, stream=True)
    await both.scheduler.step()
    first = await anext(stream)
    await both.scheduler.restart()
    both.scheduler.go_on()
    assert [first.choices[0].text + text for text in await texts_of(stream, 1)] == [expected]


async def test_a_system_that_was_never_ready_says_when_to_come_again(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    scheduler.address = f"unix:{tmp_path}/nobody"
    async with (
        serving(scheduler, attached=False) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        response = await http.post("/v1/completions", json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "NO_READY_WORKER")
    assert response.headers["x-should-retry"] == "true"
    assert int(response.headers["retry-after"]) >= 1


async def test_without_a_worker_it_is_not_healthy_and_takes_requests(both: Both) -> None:
    await both.scheduler.tell_readiness(False, "the worker loads")
    await both.front.link.wait_until(lambda: not both.front.link.is_ready)
    health = await both.http.get("/health")
    assert (health.status_code, health.json()["error"]["message"]) == (503, "the worker loads")
    assert (await both.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_many_calls_run_beside_each_other(both: Both) -> None:
    async def ask(number: int) -> list[str]:
        asked = both.openai.completions.create(
            model="demo", prompt=f"prompt {number}", seed=number, stream=number % 2 == 0, max_tokens=30
        )
        answer: Any = await asked
        return await texts_of(answer, 1) if number % 2 == 0 else [answer.choices[0].text]

    together = await asyncio.gather(*(ask(number) for number in range(24)))
    assert together == [await ask(number) for number in range(24)]


@pytest.mark.parametrize("prompt", [[-1], [2**32], [2**70], [4999], [[5], [-1]]])
@pytest.mark.parametrize(
    "asked",
    [
        {"echo": True},
        {"echo": True, "logprobs": 1},
        {"echo": True, "truncate_prompt_tokens": 1},
        {"return_token_ids": True},
        {},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_ids_that_no_model_has_are_told_whatever_is_shown_of_them(
    both: Both, prompt: Any, asked: dict[str, Any], stream: bool
) -> None:
    response = await both.http.post("/v1/completions", json={"prompt": prompt, "stream": stream, **asked})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "FIELD_INVALID", "prompt")


async def test_ids_that_no_model_has_have_no_text(both: Both) -> None:
    told = (await both.http.post("/detokenize", json={"tokens": [*ids_of("one"), 2**32 - 1, 99_999]})).json()
    assert told == {"prompt": "one"}


TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]


async def test_tools_are_warned_of_in_a_whole_answer_and_over_grpc(both: Both) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 4}
    whole = await both.openai.chat.completions.create(**asked, tools=TOOLS)
    (warning,) = (whole.model_extra or {})["warnings"]
    assert "tool_calls" in warning
    for silent in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = await both.openai.chat.completions.create(**asked, **silent)
        assert "warnings" not in (answer.model_extra or {})
    shown = await both.openai.chat.completions.create(**asked, tools=TOOLS, extra_body={"return_token_ids": True})
    assert (shown.model_extra or {})["warnings"] == [warning]
    conversation = inference_pb2.Conversation(tools=[inference_pb2.Tool(name="look_up")])
    conversation.messages.add(role=inference_pb2.ROLE_USER).content.add(text="Hi")
    told = inference_pb2.GenerationSpec(conversation=conversation, stop={"max_tokens": 4})
    answer = await both.front.stub.Chat(inference_pb2.ChatRequest(spec=told))
    assert list(answer.accepted.warnings) == [warning]


@pytest.mark.parametrize("usage", [False, True])
async def test_tools_are_warned_of_in_the_last_chunk_of_a_stream_and_no_other(both: Both, usage: bool) -> None:
    asked: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 4, "n": 2, "tools": TOOLS}
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    stream = await both.openai.chat.completions.create(**asked, stream=True, **options)
    chunks = [chunk async for chunk in stream]
    warned = ["warnings" in (chunk.model_extra or {}) for chunk in chunks]
    assert warned == [False] * (len(chunks) - 1) + [True]
    assert bool(chunks[-1].usage) is usage
