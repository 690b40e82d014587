"""Log probabilities by the real openai package: in each call's form, whole and streamed, of answers and of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from blockyard.contract.events import Delta, PromptLogprobs, TokenLogprobs
from gateway.fronts.openai.logprobs import MIN_LOGPROB, TextOffsets, chat_logprobs, completion_logprobs
from gateway.request import ReturnedLogprob
from tests.unit.gateway.fronts.openai.scripted import accepted, finished, likely, token

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx
    import openai

    from blockyard.contract.events import Event
    from gateway.request import GenerationRequest
    from tests.unit.gateway.fronts.openai.scripted import ScriptedService

HELLO: Any = [{"role": "user", "content": "Hi"}]


def likely_answer(text: str) -> Callable[[GenerationRequest], list[Event]]:
    """Answers each sequence with a text of which two tokens make a delta."""

    def script(request: GenerationRequest) -> list[Event]:
        steps: list[Event] = [accepted(request)]
        if request.sampling.prompt_logprobs is not None:
            told = likely("".join(map(chr, request.prompt[1:])), num_top=request.sampling.prompt_logprobs)
            steps.append(PromptLogprobs((TokenLogprobs(None), *told)))
        entries = () if request.sampling.logprobs is None else likely(text, num_top=request.sampling.logprobs)
        for index in range(request.n):
            for at in range(0, len(text), 2):
                piece = text[at : at + 2]
                ids = tuple(map(ord, piece))
                num_bytes = len(text[: at + 2].encode())
                steps.append(Delta(index, piece, ids, at + len(piece), num_bytes, entries[at : at + 2]))
            steps.append(finished(len(text), index))
        return steps

    return script


@pytest.fixture(autouse=True)
def script(service: ScriptedService) -> None:
    service.script = likely_answer("Höi")


async def test_a_completion_tells_columns(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    told = await client.completions.create(model="scripted", prompt="a", logprobs=1)
    assert service.requests[0].sampling.logprobs == 1
    logprobs = told.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["H", "ö", "i"]
    assert logprobs.token_logprobs == [-1.0, -2.0, -3.0]
    assert logprobs.top_logprobs == [{"?": -0.25, "H": -1.0}, {"?": -0.25, "ö": -2.0}, {"?": -0.25, "i": -3.0}]
    assert logprobs.text_offset == [0, 1, 2]


async def test_without_a_number_there_are_none(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    assert (await client.completions.create(model="scripted", prompt="a")).choices[0].logprobs is None
    assert (await client.chat.completions.create(model="scripted", messages=HELLO)).choices[0].logprobs is None
    assert [request.sampling.logprobs for request in service.requests] == [None, None]


async def test_none_beside_the_chosen_is_a_number_too(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    told = await client.completions.create(model="scripted", prompt="a", logprobs=0)
    assert service.requests[0].sampling.logprobs == 0
    logprobs = told.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs == [{"H": -1.0}, {"ö": -2.0}, {"i": -3.0}]


@pytest.mark.parametrize("echo", [False, True])
async def test_a_streamed_completion_tells_the_same(client: openai.AsyncOpenAI, echo: bool) -> None:
    whole = await client.completions.create(model="scripted", prompt=["ab", "c"], logprobs=2, n=2, echo=echo)
    stream = await client.completions.create(
        model="scripted", prompt=["ab", "c"], logprobs=2, n=2, echo=echo, stream=True
    )
    texts = [""] * 4
    columns: list[dict[str, list[Any]]] = [{} for _ in range(4)]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            for name, column in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                columns[choice.index].setdefault(name, []).extend(column)
    assert texts == [choice.text for choice in whole.choices]
    assert columns == [choice.logprobs and choice.logprobs.model_dump() for choice in whole.choices]


async def test_an_echo_has_those_of_the_prompt(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    told = await client.completions.create(model="scripted", prompt="ab", logprobs=1, echo=True)
    assert service.requests[0].sampling.prompt_logprobs == 1
    # What is told of is what is run.
    assert service.requests[0].prompt == (1, ord("a"), ord("b"))
    choice = told.choices[0]
    assert choice.text == "abHöi"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["<s>", "a", "b", "H", "ö", "i"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -2.0, -1.0, -2.0, -3.0]
    assert choice.logprobs.top_logprobs is not None
    assert choice.logprobs.top_logprobs[:2] == [None, {"?": -0.25, "a": -1.0}]
    # The begin token is left out of the text.
    assert choice.logprobs.text_offset == [0, 0, 1, 2, 3, 4]
    assert "prompt_logprobs" not in choice.model_fields_set


async def test_a_chat_tells_rows(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    told = await client.chat.completions.create(model="scripted", messages=HELLO, logprobs=True, top_logprobs=2)
    assert service.requests[0].sampling.logprobs == 2
    logprobs = told.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [(row.token, row.logprob, row.bytes) for row in logprobs.content] == [
        ("H", -1.0, [72]),
        ("ö", -2.0, [0xC3, 0xB6]),
        ("i", -3.0, [105]),
    ]
    assert [(row.token, row.logprob, row.bytes) for row in logprobs.content[0].top_logprobs] == [
        ("?", -0.25, [63]),
        ("!", -0.5, [33]),
    ]


async def test_a_streamed_chat_tells_the_same(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": HELLO, "logprobs": True, "top_logprobs": 1}
    whole = (await client.chat.completions.create(**asked)).choices[0].logprobs
    rows: list[Any] = []
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        logprobs = chunk.choices[0].logprobs
        rows += [] if logprobs is None else [row.model_dump() for row in logprobs.content or ()]
    assert whole is not None and whole.content is not None
    assert rows == [row.model_dump() for row in whole.content]
    # The client's own reader joins them as well.
    async with client.chat.completions.stream(**asked) as stream:
        joined = (await stream.get_final_completion()).choices[0].logprobs
    assert joined is not None and [row.model_dump() for row in joined.content or ()] == rows


async def test_a_chat_without_a_number_tells_the_chosen(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    told = await client.chat.completions.create(model="scripted", messages=HELLO, logprobs=True)
    assert service.requests[0].sampling.logprobs == 0
    logprobs = told.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [row.top_logprobs for row in logprobs.content] == [[], [], []]


async def test_token_ids_stand_beside_them(client: openai.AsyncOpenAI) -> None:
    extra = {"return_token_ids": True}
    stream: Any = await client.completions.create(
        model="scripted", prompt="a", logprobs=0, stream=True, extra_body=extra
    )
    choices = [chunk.choices[0] async for chunk in stream]
    assert [token_id for choice in choices[1:-1] for token_id in choice.token_ids] == [ord(c) for c in "Höi"]
    assert [text for choice in choices[1:-1] for text in choice.logprobs.tokens] == list("Höi")


PROMPT_LOGPROBS = [
    None,
    {
        "97": {"logprob": -1.0, "rank": 3, "decoded_token": "a"},
        "63": {"logprob": -0.25, "rank": 1, "decoded_token": "?"},
    },
    {
        "98": {"logprob": -2.0, "rank": 4, "decoded_token": "b"},
        "63": {"logprob": -0.25, "rank": 1, "decoded_token": "?"},
    },
]


async def test_a_completion_tells_those_of_its_prompt_in_each_choice(http: httpx.AsyncClient) -> None:
    body = {"prompt": [[1, 97, 98]], "prompt_logprobs": 1, "n": 2}
    told = (await http.post("/v1/completions", json=body)).json()
    assert [choice["prompt_logprobs"] for choice in told["choices"]] == [PROMPT_LOGPROBS] * 2
    assert [choice["logprobs"] for choice in told["choices"]] == [None, None]


async def test_a_chat_tells_those_of_its_prompt_once(http: httpx.AsyncClient, service: ScriptedService) -> None:
    prompt = PromptLogprobs((TokenLogprobs(None), *likely("ab")))
    service.script = lambda request: [accepted(request), prompt, finished(1)]
    told = (await http.post("/v1/chat/completions", json={"messages": HELLO, "prompt_logprobs": 1})).json()
    assert told["prompt_logprobs"] == PROMPT_LOGPROBS
    assert "prompt_logprobs" not in told["choices"][0]


async def test_a_streamed_completion_tells_those_of_its_prompt_before_its_text(client: openai.AsyncOpenAI) -> None:
    extra = {"prompt_logprobs": 1}
    stream: Any = await client.completions.create(
        model="scripted", prompt=[1, 97, 98], n=2, stream=True, extra_body=extra
    )
    first, *others = [chunk async for chunk in stream]
    assert [(choice.index, choice.text, choice.prompt_logprobs) for choice in first.choices] == [
        (0, "", PROMPT_LOGPROBS),
        (1, "", PROMPT_LOGPROBS),
    ]
    assert not any("prompt_logprobs" in choice.model_fields_set for chunk in others for choice in chunk.choices)


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_chat_tells_those_of_its_prompt_before_its_text(
    client: openai.AsyncOpenAI, service: ScriptedService, include_usage: bool
) -> None:
    prompt = PromptLogprobs((TokenLogprobs(None), *likely("ab")))
    service.script = lambda request: [accepted(request), prompt, finished(1)]
    stream: Any = await client.chat.completions.create(
        model="scripted",
        messages=HELLO,
        stream=True,
        stream_options={"include_usage": include_usage},
        extra_body={"prompt_logprobs": 1},
    )
    _, second, *others = [chunk async for chunk in stream]
    assert second.prompt_logprobs == PROMPT_LOGPROBS
    assert len(second.choices) == 1
    assert not any("prompt_logprobs" in chunk.model_fields_set for chunk in others)


@pytest.mark.parametrize(
    ("path", "asked", "param"),
    [
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": 2}, "logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"top_logprobs": 1}, "top_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 1.5}, "prompt_logprobs"),
    ],
)
async def test_their_shape_is_checked(http: httpx.AsyncClient, path: str, asked: dict[str, Any], param: str) -> None:
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "a"}
    response = await http.post(path, json={**prompt, **asked})
    assert response.status_code == 400
    assert (response.json()["error"]["code"], response.json()["error"]["param"]) == ("FIELD_INVALID", param)


def test_offsets_are_those_of_characters() -> None:
    offsets = TextOffsets()
    text = "aö日🎉b".encode()
    assert [offsets.add(text[i : i + 1]) for i in range(len(text))] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4]
    assert offsets.add(b"") == 5
    assert TextOffsets(7).add("日本".encode()) == 7


def test_a_token_that_begins_within_a_character_and_goes_on_begins_there() -> None:
    offsets = TextOffsets()
    assert [offsets.add(piece) for piece in (b"a\xe6\x97", b"\xa5b", b"c")] == [0, 1, 3]


def test_of_several_tokens_with_one_text_the_likeliest_is_told() -> None:
    part = [ReturnedLogprob(i, "\ufffd", -float(i), i, bytes([0xE0 + i])) for i in (1, 2, 3)]
    told = completion_logprobs([TokenLogprobs(part[2], (part[0], part[1]))], TextOffsets())
    assert told["top_logprobs"] == [{"\ufffd": -1.0}]
    assert told["token_logprobs"] == [-3.0]


def test_what_json_cannot_say_is_told_as_vllm_does() -> None:
    never = TokenLogprobs(token(5, float("-inf"), 9))
    assert completion_logprobs([never], TextOffsets())["token_logprobs"] == [MIN_LOGPROB]
    assert chat_logprobs([never])["content"][0]["logprob"] == MIN_LOGPROB


def test_a_token_that_adds_nothing_has_no_bytes() -> None:
    [row] = chat_logprobs([TokenLogprobs(token(1, -1.0, 1))])["content"]
    assert (row["token"], row["bytes"]) == ("<s>", None)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_named_by_their_ids_if_asked(client: openai.AsyncOpenAI, stream: bool) -> None:
    extra = {"return_tokens_as_token_ids": True}
    told: Any = await client.completions.create(
        model="scripted", prompt="Hi", logprobs=1, echo=True, stream=stream, extra_body=extra
    )
    parts = [chunk.choices[0].logprobs async for chunk in told] if stream else [told.choices[0].logprobs]
    names = [name for part in parts if part for name in part.tokens]
    assert names == [f"token_id:{token_id}" for token_id in (1, *map(ord, "HiHöi"))]
    tops = [top for part in parts if part for top in part.top_logprobs]
    assert tops[0] is None
    assert all(set(top) == {f"token_id:{ord('?')}", name} for top, name in zip(tops[1:], names[1:], strict=True))
    # Where tokens begin is counted in characters of the text all the same.
    assert [offset for part in parts if part for offset in part.text_offset] == [0, 0, 1, 2, 3, 4]


async def test_a_chats_tokens_are_too(client: openai.AsyncOpenAI) -> None:
    told: Any = await client.chat.completions.create(
        model="scripted",
        messages=HELLO,
        logprobs=True,
        top_logprobs=1,
        extra_body={"return_tokens_as_token_ids": True},
    )
    content = told.choices[0].logprobs.content
    assert [token.token for token in content] == [f"token_id:{ord(character)}" for character in "Höi"]
    assert bytes(byte for token in content for byte in token.bytes).decode() == "Höi"
    assert {top.token for token in content for top in token.top_logprobs} == {f"token_id:{ord('?')}"}
