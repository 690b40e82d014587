"""Calls of tools and reasoning over HTTP and gRPC, whole and streamed, as the clients of these APIs read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from blockyard.client import AsyncClient, Message, Tool
from blockyard.errors import BlockyardError
from tests.kit.fakes.fake_scheduler import FakeScheduler, scripted
from tests.unit.gateway.fronts.openai.test_real_core import HELLO, Both, both_of
from tests.unit.gateway.harness import END_TOKEN, demo_tokenizer, ids_of
from tests.unit.gateway.live.test_parsed_answers import ANSWER, hermes_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ASKED: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 200}
ARGUMENTS = '{"x": "é"}'


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    async with FakeScheduler() as scheduler, both_of(scheduler, hermes_tokenizer()) as both:
        scheduler.script = scripted(*ids_of(ANSWER), END_TOKEN)
        yield both


async def test_a_whole_answer_and_a_stream_say_the_same(both: Both) -> None:
    whole = await both.openai.chat.completions.create(**ASKED, tools=TOOLS)
    (choice,) = whole.choices
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("f", ARGUMENTS)
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert (choice.message.model_extra or {}) == {"reasoning_content": "Hm.", "reasoning": "Hm."}

    text = reasoning = arguments = ""
    heads: list[tuple[str | None, str | None, str | None]] = []
    reasons: list[str | None] = []
    async for chunk in await both.openai.chat.completions.create(
        **ASKED, tools=TOOLS, stream=True, extra_body={"request_id": whole.id}
    ):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reasoning += (delta.model_extra or {}).get("reasoning_content", "")
        for piece in delta.tool_calls or ():
            assert piece.function
            if piece.function.name:
                heads.append((piece.id, piece.type, piece.function.name))
            arguments += piece.function.arguments or ""
        reasons.append(chunk.choices[0].finish_reason)
    assert (text, reasoning, arguments) == ("Let me see.", "Hm.", ARGUMENTS)
    assert heads == [(call.id, "function", "f")]
    assert reasons[-1] == "tool_calls"


async def test_tokens_of_reasoning_are_counted(both: Both) -> None:
    for hidden in ({}, {"include_reasoning": False}):
        whole: Any = await both.openai.chat.completions.create(**ASKED, extra_body=hidden)
        chunks: list[Any] = [
            chunk
            async for chunk in await both.openai.chat.completions.create(
                **ASKED, stream=True, stream_options={"include_usage": True}, extra_body=hidden
            )
        ]
        assert chunks[-1].usage == whole.usage
        assert whole.usage.completion_tokens_details.reasoning_tokens == len(ids_of("Hm."))
    both.scheduler.script = scripted(*ids_of("Let me see."), END_TOKEN)
    whole = await both.openai.chat.completions.create(**ASKED)
    assert whole.usage.completion_tokens_details is None


async def test_a_client_of_ours_reads_the_same(both: Both) -> None:
    async with AsyncClient(both.front.address) as client:
        answer = await client.chat([Message("user", "Hi")], tools=[Tool("f")], max_tokens=200)
        as_text = await client.chat([Message("user", "Hi")], tools=[Tool("f")], max_tokens=200, parse_answer=False)
    (choice,) = answer.choices
    assert (choice.text, choice.reasoning_text, choice.calls_tools) == ("Let me see.", "Hm.", True)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("f", ARGUMENTS)]
    assert answer.warnings == ()
    assert (as_text.text, as_text.tool_calls) == (ANSWER, ())
    assert len(as_text.warnings) == 1


async def test_a_call_without_text_has_no_content(both: Both) -> None:
    both.scheduler.script = scripted(*ids_of('<tool_call>{"name": "f"}</tool_call>'), END_TOKEN)
    answer = await both.openai.chat.completions.create(**ASKED, tools=TOOLS)
    assert answer.choices[0].message.content is None


async def test_reasoning_that_is_not_wanted_is_left_out(both: Both) -> None:
    extra = {"extra_body": {"include_reasoning": False}}
    whole = await both.openai.chat.completions.create(**ASKED, **extra)
    assert whole.choices[0].message.model_extra == {}
    async for chunk in await both.openai.chat.completions.create(**ASKED, stream=True, **extra):
        assert not chunk.choices[0].delta.model_extra


async def test_without_tools_calls_are_text(both: Both) -> None:
    answer = await both.openai.chat.completions.create(**ASKED)
    assert answer.choices[0].message.tool_calls is None
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (
        ANSWER[ANSWER.index("Let") :],
        "stop",
    )


async def test_an_answer_that_is_cut_within_a_call_ends_by_its_length(both: Both) -> None:
    num_tokens = len(ids_of(ANSWER)) - 8
    answer = await both.openai.chat.completions.create(**{**ASKED, "max_tokens": num_tokens}, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert ARGUMENTS.startswith((choice.message.tool_calls or ())[0].function.arguments)  # type: ignore[union-attr]


async def test_one_call_alone_if_asked(both: Both) -> None:
    both.scheduler.script = scripted(*ids_of('<tool_call>{"name": "f"}</tool_call>' * 2), END_TOKEN)
    for parallel, count in ((True, 2), (False, 1)):
        answer = await both.openai.chat.completions.create(**ASKED, tools=TOOLS, parallel_tool_calls=parallel)
        assert len(answer.choices[0].message.tool_calls or ()) == count


NAMED: Any = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(("choice", "strict"), [("required", False), (NAMED, False), ("auto", True)])
async def test_calls_that_must_have_a_form_get_a_grammar(both: Both, choice: Any, strict: bool) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"const": 7}}}, "strict": strict}
    others = [{"type": "function", "function": {"name": "g"}}]
    asked = {**ASKED, "tools": [{"type": "function", "function": function}, *others]}
    await both.openai.chat.completions.create(**asked, tool_choice=choice)
    grammar = both.scheduler.added[-1].sampling.grammar
    assert "<tool_call>" in grammar
    assert '"const": 7' in grammar
    assert "</think>" in grammar, "it may think first"
    assert ('"g\\"' in grammar) == (choice is not NAMED)
    await both.openai.chat.completions.create(**{**asked, "tools": others})
    assert both.scheduler.added[-1].sampling.grammar == ""


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_of_several_tools_that_are_shown_some_may_be_called(mode: str) -> None:
    template = "{{ tools | tojson }}{{ messages[0].content }}{# <tool_call> arguments #}"
    tools: Any = [{"type": "function", "function": {"name": name}} for name in "fgh"]
    async with FakeScheduler() as scheduler, both_of(scheduler, demo_tokenizer().adapt(None, template, {})) as both:
        scheduler.script = scripted(*ids_of('<tool_call>{"name": "g"}</tool_call><tool_call>{"name": "h"}'), END_TOKEN)

        async def ask(choice: Any) -> Any:
            answer = await both.openai.chat.completions.create(**ASKED, tools=tools, tool_choice=choice)
            return answer.choices[0].message

        called = [call.function.name for call in (await ask(mode)).tool_calls]
        assert called == ["g", "h"]
        message = await ask(allowed(mode, "g", "f"))
        assert [call.function.name for call in message.tool_calls] == ["g"]
        assert message.content == '<tool_call>{"name": "h"}'
        every, some = scheduler.added
        assert list(some.prompt_token_ids) == list(every.prompt_token_ids)
        assert [f'"{name}\\"' in some.sampling.grammar for name in "fgh"] == [True, True, False]
        assert ("TEXT" in some.sampling.grammar) == (mode == "auto")
        await ask(allowed(mode, *"fgh"))
        assert bool(scheduler.added[-1].sampling.grammar) == (mode == "required")


@pytest.mark.parametrize(
    ("choice", "code"),
    [
        (allowed("auto", "f", "nope"), "FIELD_INVALID"),
        (allowed("auto"), "FIELD_INVALID"),
        (allowed("sometimes", "f"), "FIELD_INVALID"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}, "FIELD_INVALID"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": 5}}, "FIELD_INVALID"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED, {"type": "custom"}]}},
            "UNSUPPORTED_PARAMETER",
        ),
    ],
)
async def test_tools_that_cannot_be_allowed_are_refused(both: Both, choice: Any, code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await both.openai.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice)
    assert (caught.value.param, caught.value.code) == ("tool_choice", code)


async def test_a_schema_that_cannot_be_followed_is_refused_if_it_is_strict(both: Both) -> None:
    function: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "not": {"required": ["x"]}}}
    tools: Any = [{"type": "function", "function": function}]
    await both.openai.chat.completions.create(**ASKED, tools=tools, tool_choice="required")
    assert "not" not in both.scheduler.added[-1].sampling.grammar
    tools[0]["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match=r"of 'f'.*not") as caught:
        await both.openai.chat.completions.create(**ASKED, tools=tools)
    assert caught.value.param == "tools[0].function.parameters.not"


async def test_a_format_begins_behind_what_is_thought(both: Both) -> None:
    asked: dict[str, Any] = {**ASKED, "response_format": {"type": "json_object"}}
    await both.openai.chat.completions.create(**asked)
    assert "</think>" in both.scheduler.added[-1].sampling.grammar
    await both.openai.chat.completions.create(**asked, tools=TOOLS)
    assert "<tool_call>" in both.scheduler.added[-1].sampling.grammar


@pytest.mark.parametrize(
    ("template", "thinks"),
    [
        ("{# <tool_call> arguments #}", False),
        ("{# <tool_call> arguments #}<think>\n", True),
        ("{# <tool_call> arguments #}<think>\n\n</think>\n\n", False),
        ("{# <tool_call> arguments <think> #}", True),
    ],
)
async def test_only_who_thinks_may_think_before_a_call_that_must_come(template: str, thinks: bool) -> None:
    tokenizer = demo_tokenizer().adapt(None, "{{ messages[0].content }}" + template, {})
    async with FakeScheduler() as scheduler, both_of(scheduler, tokenizer) as both:
        await both.openai.chat.completions.create(**ASKED, tools=TOOLS, tool_choice="required")
        assert ("</think>" in scheduler.added[-1].sampling.grammar) == thinks


async def test_what_has_no_form_cannot_be_forced() -> None:
    async with FakeScheduler() as scheduler, both_of(scheduler) as both:
        with pytest.raises(openai.BadRequestError, match="cannot be constrained") as caught:
            await both.openai.chat.completions.create(**ASKED, tools=TOOLS, tool_choice="required")
        assert (caught.value.param, caught.value.code) == ("tool_choice", "UNSUPPORTED_PARAMETER")
        tools: Any = [*TOOLS, {"type": "function", "function": {"name": "g"}}]
        with pytest.raises(openai.BadRequestError, match="cannot be constrained") as caught:
            await both.openai.chat.completions.create(**ASKED, tools=tools, tool_choice=allowed("auto", "g"))
    assert (caught.value.param, caught.value.code) == ("tool_choice", "UNSUPPORTED_PARAMETER")


async def test_a_schema_that_is_no_object_is_refused_of_calls_that_must_come_too(both: Both) -> None:
    tools: Any = [Tool("f", parameters=True)]  # type: ignore[arg-type]
    async with AsyncClient(both.front.address) as client:
        with pytest.raises(BlockyardError) as caught:
            await client.chat([Message("user", "Hi")], tools=tools, tool_choice="required")
    assert [violation.field for violation in caught.value.violations] == ["conversation.tools[0].parameters"]
