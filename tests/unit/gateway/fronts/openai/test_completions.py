"""/v1/completions by the real openai package: each parameter reaches the core, each answer has OpenAI's form."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.contract.events import Delta
from blockyard.contract.request import OnDisconnect
from blockyard.contract.sampling import BeamSearch, EarlyStopping, FinishReason, SamplingParams, StopCriteria
from blockyard.errors import BlockyardError, Reason, Violation
from gateway.request import GenerationRequest
from tests.unit.gateway.fronts.openai.scripted import accepted, answer, deltas, finished

if TYPE_CHECKING:
    import httpx
    import openai

    from tests.unit.gateway.fronts.openai.scripted import ScriptedService


async def test_answers_a_prompt(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    told = await client.completions.create(model="scripted", prompt="Hi")
    choice = told.choices[0]
    assert (choice.text, choice.index, choice.finish_reason) == ("Hello", 0, "stop")
    assert told.object == "text_completion"
    assert told.model == "scripted"
    assert told.system_fingerprint == "d-1"
    assert told.usage is not None
    assert (told.usage.prompt_tokens, told.usage.completion_tokens, told.usage.total_tokens) == (2, 5, 7)
    assert told.usage.prompt_tokens_details is not None
    assert told.usage.prompt_tokens_details.cached_tokens == 2
    assert told._request_id == told.id == service.requests[0].request_id
    assert service.generations[0].closed.is_set()


async def test_every_parameter_reaches_the_core(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    await client.completions.create(
        model="scripted",
        prompt="Hi",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        n=2,
        best_of=2,
        stop=["a", "b"],
        seed=11,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"65": -100},
        user="someone",
        extra_body={
            "top_k": 5,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [3, 4],
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "add_special_tokens": False,
            "request_id": "mine",
            "allowed_token_ids": [65, 66],
            "predicted_token_ids": [67, 68],
            "speculation": False,
            "bad_words": ["no", "never"],
            "truncate_prompt_tokens": 2,
            "prompt_logprobs": 0,
            "priority": -4,
            "max_queue_time": 2.5,
            "on_disconnect": "keep",
        },
        logprobs=2,
    )
    request = service.requests[0]
    assert request.sampling == SamplingParams(
        0.5,
        0.9,
        5,
        0.125,
        0.25,
        -0.5,
        1.5,
        11,
        {65: -100},
        (65, 66),
        ("no", "never"),
        (),
        2,
        0,
        predicted_token_ids=(67, 68),
        speculation=False,
    )
    assert (request.priority, request.max_queue_seconds) == (-4, 2.5)
    assert request.on_disconnect is OnDisconnect.KEEP
    assert request.stop == StopCriteria(7, 2, ("a", "b"), (3, 4), True, True)
    assert (request.n, request.request_id, request.model, request.prompt) == (2, "mine", "scripted", "Hi")
    assert (request.skip_special_tokens, request.add_special_tokens) == (False, False)
    assert request.truncate_prompt_tokens == 2


async def test_what_is_left_out_is_left_to_the_core(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    await client.completions.create(model="scripted", prompt="Hi")
    request = service.requests[0]
    assert request.sampling == SamplingParams()
    assert request.stop == StopCriteria(max_tokens=16)
    assert request == replace(
        GenerationRequest("Hi"),
        request_id=request.request_id,
        model="scripted",
        stop=request.stop,
        front_state=request.front_state,
    )
    assert request.n == 1
    assert request.skip_special_tokens
    assert request.add_special_tokens


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"n": 3}, BeamSearch(3)),
        ({"n": 2, "best_of": 4, "length_penalty": 0.5}, BeamSearch(4, 0.5)),
        ({"n": 2, "early_stopping": False}, BeamSearch(2)),
        ({"n": 2, "early_stopping": True}, BeamSearch(2, early_stopping=EarlyStopping.FIRST)),
        ({"n": 2, "early_stopping": "never"}, BeamSearch(2, early_stopping=EarlyStopping.NEVER)),
    ],
)
async def test_a_beam_search_reaches_the_core_under_vllms_names(
    http: httpx.AsyncClient, service: ScriptedService, asked: dict[str, Any], expected: BeamSearch
) -> None:
    bodies = {"completions": {"prompt": "Hi"}, "chat/completions": {"messages": [{"role": "user", "content": "Hi"}]}}
    for path, body in bodies.items():
        response = await http.post(f"/v1/{path}", json={**body, "use_beam_search": True, **asked})
        assert response.status_code == 200
    assert [request.beam_search for request in service.requests] == [expected, expected]
    assert {request.n for request in service.requests} == {asked["n"]}


async def test_a_beam_tells_its_score(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.script = lambda request: [accepted(request), *deltas("Hi"), replace(finished(2), score=-0.75)]
    told: Any = await client.completions.create(model="scripted", prompt="a")
    assert told.choices[0].score == -0.75
    stream: Any = await client.completions.create(model="scripted", prompt="a", stream=True)
    assert [chunk async for chunk in stream][-1].choices[0].score == -0.75


async def test_a_top_k_of_minus_one_is_off(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    await client.completions.create(model="scripted", prompt="Hi", extra_body={"top_k": -1})
    assert service.requests[0].sampling.top_k == 0


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("one", ["one"]),
        (["one", "two"], ["one", "two"]),
        ([5, 6, 7], [(5, 6, 7)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
async def test_takes_each_form_of_a_prompt(
    client: openai.AsyncOpenAI, service: ScriptedService, given: Any, prompts: list[Any]
) -> None:
    told = await client.completions.create(model="scripted", prompt=given, n=2)
    assert [request.prompt for request in service.requests] == prompts
    assert [choice.index for choice in told.choices] == list(range(2 * len(prompts)))
    assert told.usage is not None
    assert told.usage.prompt_tokens == sum(len(prompt) for prompt in prompts)
    assert told.usage.completion_tokens == 5 * 2 * len(prompts)


async def test_several_prompts_are_requests_under_names_of_their_own(
    client: openai.AsyncOpenAI, service: ScriptedService
) -> None:
    told = await client.completions.create(model="scripted", prompt=["a", "b"], extra_body={"request_id": "mine"})
    assert told.id == "mine"
    assert [request.request_id for request in service.requests] == ["mine-0", "mine-1"]


@pytest.mark.parametrize("stop", ["end", ["end"]])
async def test_takes_each_form_of_stop(client: openai.AsyncOpenAI, service: ScriptedService, stop: Any) -> None:
    await client.completions.create(model="scripted", prompt="Hi", stop=stop)
    assert service.requests[0].stop.stop_strings == ("end",)


async def test_streams_what_it_answers_whole(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    stream = await client.completions.create(
        model="scripted", prompt=["a", "bc"], n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = ["", "", "", ""]
    ends: dict[int, str] = {}
    for chunk in chunks[:-1]:
        assert chunk.id == chunks[0].id
        assert chunk.usage is None
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            ends[choice.index] = choice.finish_reason
    assert texts == ["Hello"] * 4
    assert ends == dict.fromkeys(range(4), "stop")
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 20)
    assert all(generation.closed.is_set() for generation in service.generations)


async def test_a_stream_tells_no_usage_unless_asked(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="scripted", prompt="a", stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(len(chunk.choices) == 1 and "usage" not in chunk.model_fields_set for chunk in chunks)


async def test_tells_what_stopped_it(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.script = lambda request: [accepted(request), *deltas("Hi"), finished(2, matched="###")]
    told = await client.completions.create(model="scripted", prompt="a")
    assert told.choices[0].stop_reason == "###"  # type: ignore[attr-defined]
    stream = await client.completions.create(model="scripted", prompt="a", stream=True)
    last = [chunk async for chunk in stream][-1]
    assert last.choices[0].stop_reason == "###"  # type: ignore[attr-defined]


async def test_tells_that_the_length_ended_it(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.script = lambda request: [accepted(request), *deltas("Hi"), finished(2, reason=FinishReason.LENGTH)]
    assert (await client.completions.create(model="scripted", prompt="a")).choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_echoes_the_prompt(client: openai.AsyncOpenAI, stream: bool) -> None:
    for prompt, text in (("Hi ", "Hi Hello"), ([72, 105], "HiHello")):
        told: Any = await client.completions.create(model="scripted", prompt=prompt, echo=True, stream=stream, n=2)
        texts = ["", ""]
        if stream:
            async for chunk in told:
                texts[chunk.choices[0].index] += chunk.choices[0].text
        else:
            texts = [choice.text for choice in told.choices]
        assert texts == [text, text]


async def test_returns_token_ids_when_asked(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    extra = {"return_token_ids": True}
    told: Any = await client.completions.create(model="scripted", prompt="Hi", extra_body=extra)
    assert told.choices[0].token_ids == [ord(character) for character in "Hello"]
    assert told.choices[0].prompt_token_ids == [1, 72, 105]
    # What is told is what is run.
    assert service.requests[0].prompt == (1, 72, 105)
    stream: Any = await client.completions.create(model="scripted", prompt="Hi", extra_body=extra, stream=True)
    chunks = [chunk.choices[0] async for chunk in stream]
    assert chunks[0].prompt_token_ids == [1, 72, 105]
    assert [i for choice in chunks[1:-1] for i in choice.token_ids] == [ord(character) for character in "Hello"]


async def test_a_delta_of_held_back_text_has_no_chunk(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    service.script = lambda request: [accepted(request), Delta(0, "", (), 1, 0), *deltas("a"), finished(2)]
    stream = await client.completions.create(model="scripted", prompt="a", stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["a", ""]


async def test_text_of_every_kind_survives_a_stream(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    text = 'a\n\n data: "q" \\ \r\n\u2028 é 日本 🎉 \x00\x7f'
    service.script = answer(text)
    stream = await client.completions.create(model="scripted", prompt="a", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == text
    assert (await client.completions.create(model="scripted", prompt="a")).choices[0].text == text


async def test_the_default_length_gives_way_to_the_models(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    def script(request: Any) -> Any:
        if request.stop.max_tokens is None:
            return answer("ok")(request)
        return [BlockyardError(Reason.FIELD_INVALID, "x", (Violation("stop.max_tokens", "is 16, and 3 fit"),))]

    service.script = script
    assert (await client.completions.create(model="scripted", prompt="a")).choices[0].text == "ok"
    with pytest.raises(Exception, match="max_tokens: is 16") as caught:
        await client.completions.create(model="scripted", prompt="a", max_tokens=16)
    assert caught.value.param == "max_tokens"  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_is_of_what_is_left_of_a_prompt(client: openai.AsyncOpenAI, stream: bool) -> None:
    told: Any = await client.completions.create(
        model="scripted", prompt="Oh, hi", echo=True, stream=stream, extra_body={"truncate_prompt_tokens": 2}
    )
    text = "".join([chunk.choices[0].text async for chunk in told]) if stream else told.choices[0].text
    assert text == "hiHello"


async def test_every_chunk_tells_the_usage_if_asked(client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(
        model="scripted", prompt=["a", "bc"], n=2, stream=True, stream_options=options
    )
    chunks = [chunk async for chunk in stream]
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    # Five tokens and an end of each of four choices, and what it cost in all.
    assert (len(counts), counts[0], counts[-1]) == (4 * 6 + 1, 1, 20)
    assert {chunk.usage.prompt_tokens for chunk in chunks if chunk.usage} == {3}
    # What was found in the cache is known at the end.
    details = [chunk.usage.prompt_tokens_details for chunk in chunks if chunk.usage]
    assert set(details[:-1]) == {None}
    assert details[-1] is not None


async def test_continuous_usage_is_only_told_with_usage(client: openai.AsyncOpenAI) -> None:
    options: Any = {"continuous_usage_stats": True}
    stream = await client.completions.create(model="scripted", prompt="a", stream=True, stream_options=options)
    assert all("usage" not in chunk.model_fields_set for chunk in [chunk async for chunk in stream])


async def test_a_chats_chunks_tell_the_usage_too(client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    messages: Any = [{"role": "user", "content": "Hi"}]
    stream = await client.chat.completions.create(
        model="scripted", messages=messages, stream=True, stream_options=options
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage]
    assert counts == [0, 1, 2, 3, 4, 5, 5, 5]
