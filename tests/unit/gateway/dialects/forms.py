"""How each family writes its calls and its reasoning, by hand, and the answers that are told apart."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.dialects.table import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Form:
    """A family's. `calls` writes calls; `before` stands before a text, `reasoning` holds what is thought.

    `copies`: arguments come out as they were written, to the character; `speaks`: text may stand before calls.
    """

    dialect: str
    calls: Callable[[list[Call]], str]
    before: str = ""
    reasoning: str = "<think>\n%s\n</think>\n\n"
    copies: bool = True
    speaks: bool = True


def dumps(value: Any) -> str:
    # Not as anybody prints it, so that what is printed again shows.
    return json.dumps(value, ensure_ascii=False, separators=(" ,", " : "))


def objects(key: str, begin: str, between: str, end: str) -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        return begin + between.join(f'{{"name": "{name}", "{key}": {dumps(each)}}}' for name, each in calls) + end

    return write


def each(form: str, begin: str = "", between: str = "\n", end: str = "") -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        told = [form % {"name": name, "arguments": dumps(each), "number": n} for n, (name, each) in enumerate(calls)]
        return begin + between.join(told) + end

    return write


def bare(value: Any) -> str:
    """As templates print a value between tags."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tags(form: str, one: str, begin: str = "", end: str = "") -> Callable[[list[Call]], str]:
    def write(calls: list[Call]) -> str:
        told = [form % {"name": n, "all": "".join(one % (k, bare(v)) for k, v in a.items())} for n, a in calls]
        return begin + "\n".join(told) + end

    return write


def dsml(block: str) -> Callable[[list[Call]], str]:
    def argument(key: str, value: Any) -> str:
        is_text = isinstance(value, str)
        written = value if is_text else json.dumps(value, ensure_ascii=False)
        return f'<｜DSML｜parameter name="{key}" string="{str(is_text).lower()}">{written}</｜DSML｜parameter>\n'

    def write(calls: list[Call]) -> str:
        told = [
            f'<｜DSML｜invoke name="{name}">\n{"".join(argument(*each) for each in given.items())}</｜DSML｜invoke>\n'
            for name, given in calls
        ]
        return f"<｜DSML｜{block}>\n{''.join(told)}</｜DSML｜{block}>"

    return write


def gemma(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{gemma(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


def python(calls: list[Call]) -> str:
    told = [f"{name}({', '.join(f'{key}={value!r}' for key, value in each.items())})" for name, each in calls]
    return f"[{', '.join(told)}]"


FORMS = {
    "hermes": Form("hermes", each('<tool_call>\n{"name": "%(name)s", "arguments": %(arguments)s}\n</tool_call>')),
    "qwen3_coder": Form(
        "qwen3_coder",
        tags(
            "<tool_call>\n<function=%(name)s>\n%(all)s</function>\n</tool_call>",
            "<parameter=%s>\n%s\n</parameter>\n",
        ),
        copies=False,
    ),
    "llama3_json": Form("llama3_json", objects("parameters", "", "; ", ""), reasoning="", speaks=False),
    "llama3_json, marked": Form("llama3_json", objects("parameters", "<|python_tag|>", "; ", ""), reasoning=""),
    "mistral, a list": Form("mistral", objects("arguments", "[TOOL_CALLS] [", ", ", "]"), reasoning=""),
    "mistral": Form(
        "mistral", each("[TOOL_CALLS]%(name)s[ARGS]%(arguments)s", between=""), reasoning="[THINK]%s[/THINK]"
    ),
    "mistral, with ids": Form(
        "mistral", each("[TOOL_CALLS]%(name)s[CALL_ID]abc%(number)s[ARGS]%(arguments)s", between=""), reasoning=""
    ),
    "granite": Form(
        "granite",
        objects("arguments", "<|tool_call|>[", ", ", "]"),
        reasoning="Here is my thought process: %s Here is my response: ",
    ),
    "phi4": Form("phi4", objects("arguments", "<|tool_call|>[", ", ", "]<|/tool_call|>")),
    "phi4, as functools": Form("phi4", objects("arguments", "functools[", ", ", "]")),
    "deepseek": Form(
        "deepseek",
        each(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%(name)s\n```json\n%(arguments)s\n```<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek, 3.1": Form(
        "deepseek",
        each(
            "<｜tool▁call▁begin｜>%(name)s<｜tool▁sep｜>%(arguments)s<｜tool▁call▁end｜>",
            "<｜tool▁calls▁begin｜>",
            "",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v32": Form("deepseek_v32", dsml("function_calls"), copies=False),
    "deepseek_v32, without types": Form(
        "deepseek_v32",
        lambda calls: re.sub(r' string="(true|false)"', "", dsml("function_calls")(calls)),
        copies=False,
    ),
    "deepseek_v4": Form("deepseek_v4", dsml("tool_calls"), copies=False),
    "glm": Form(
        "glm",
        tags("<tool_call>%(name)s\n%(all)s</tool_call>", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n"),
        copies=False,
    ),
    "glm, 4.7": Form(
        "glm",
        tags("<tool_call>%(name)s%(all)s</tool_call>", "<arg_key>%s</arg_key><arg_value>%s</arg_value>"),
        copies=False,
    ),
    "kimi": Form(
        "kimi",
        each(
            "<|tool_call_begin|>functions.%(name)s:%(number)s<|tool_call_argument_begin|>%(arguments)s<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "",
            "<|tool_calls_section_end|>",
        ),
    ),
    "minimax": Form(
        "minimax",
        tags(
            '<invoke name="%(name)s">\n%(all)s</invoke>',
            '<parameter name="%s">%s</parameter>\n',
            "<minimax:tool_call>\n",
            "\n</minimax:tool_call>",
        ),
        copies=False,
    ),
    "minimax_m1": Form("minimax_m1", objects("arguments", "<tool_calls>\n", "\n", "\n</tool_calls>")),
    "gemma": Form(
        "gemma",
        lambda calls: "".join(f"<|tool_call>call:{name}{gemma(each)}<tool_call|>" for name, each in calls),
        reasoning="<|channel>thought\n%s<channel|>",
        copies=False,
    ),
    "function_gemma": Form(
        "function_gemma",
        lambda calls: "".join(
            f"<start_function_call>call:{name}{gemma(each)}<end_function_call>".replace('<|"|>', "<escape>")
            for name, each in calls
        ),
        reasoning="",
        copies=False,
    ),
    "pythonic": Form("pythonic", python, copies=False, speaks=False),
    "pythonic, marked": Form("pythonic", lambda calls: f"<|python_start|>{python(calls)}<|python_end|>", copies=False),
    "lfm2": Form("lfm2", lambda calls: f"<|tool_call_start|>{python(calls)}<|tool_call_end|>", copies=False),
    "olmo3": Form(
        "olmo3",
        lambda calls: "\n".join(["<function_calls>", *(python([call])[1:-1] for call in calls), "</function_calls>"]),
        copies=False,
    ),
    "harmony": Form(
        "harmony",
        each(
            "<|channel|>commentary to=functions.%(name)s <|constrain|>json<|message|>%(arguments)s<|call|>",
            between="<|start|>assistant",
        ),
        before="<|channel|>commentary<|message|>",
        reasoning="<|channel|>analysis<|message|>%s<|end|><|start|>assistant",
    ),
    "harmony, a prompt's rest": Form(
        "harmony",
        each(
            " to=functions.%(name)s<|channel|>commentary json<|message|>%(arguments)s<|call|>",
            between="<|start|>assistant",
        ),
        reasoning="",
        speaks=False,
    ),
    "harmony, as in templates": Form(
        "harmony",
        each(
            "<|start|>assistant to=functions.%(name)s<|channel|>commentary json<|message|>%(arguments)s<|call|>", "", ""
        ),
        before="<|channel|>final<|message|>",
        reasoning="<|channel|>analysis<|message|>%s<|end|>",
    ),
}


@dataclass(frozen=True)
class Answer:
    """An answer, and what comes out. `text` None: all of it is text."""

    dialect: str
    raw: str
    text: str | None = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    copies: bool = True


def answers_of(form: Form) -> Iterator[tuple[str, Answer]]:
    """The answers that each family is asked, by what is in them."""
    dialect = BY_NAME[form.dialect]
    assert dialect.calls is not None
    end = (*dialect.calls.ends, "]")[0]
    texts = {
        "no arguments": {},
        "a text": {"text": "東京 é"},
        "escapes": {"text": 'a "b" \\ \n\t 😀 \\u00e9 {[('},
        "an end within": {"text": f"東 {end} 京"},
        "nested": {"obj": {"a": [1, 2.5, {"b": None}], "c": True, "d": {}, "e": []}},
        "types": {"num": -1.5, "flag": False, "maybe": None, "text": "5"},
        "one that the schema has not": {"other": "5 apples", "third": [1]},
    }
    for name, arguments in texts.items():
        calls: list[Call] = [("f", arguments)]
        yield name, Answer(form.dialect, form.calls(calls), calls=tuple(calls), copies=form.copies)
    two: list[Call] = [("f", {"text": "東"}), ("g", {})]
    yield "two", Answer(form.dialect, form.calls(two), calls=tuple(two), copies=form.copies)
    yield "text alone", Answer(form.dialect, f"{form.before}東京.\n", "東京.\n")
    if form.speaks:
        raw = f"{form.before}東京.\n{form.calls(two)}"
        yield "text before", Answer(form.dialect, raw, "東京.", calls=tuple(two), copies=form.copies)
    if form.reasoning:
        raw = f"{form.reasoning % '思 [TOOL'}{form.calls(two)}"
        yield "reasoning", Answer(form.dialect, raw, "", "思 [TOOL", tuple(two), form.copies)
        yield "reasoning and text", Answer(form.dialect, f"{form.reasoning % '思'}{form.before}東", "東", "思")


ANSWERS = {f"{name}: {what}": answer for name, form in FORMS.items() for what, answer in answers_of(form)}
