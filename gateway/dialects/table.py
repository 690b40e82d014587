"""Lists the dialects, and chooses one by a model's chat template. A new family of models needs one entry."""

from __future__ import annotations

from blockyard.errors import BlockyardError, Reason
from gateway.dialects.dialect import Calls, CallTemplate, Dialect, Span, Style, TypedEnds

_THINK = Span(("<think>",), ("</think>",))
_NAME_KEY, _ARGUMENTS_KEY = '{"name": "', '", "arguments": '
# The request's tools decide which names exist.
_NAME = r"(?P<name>.+?)"


def _dsml(name: str, block: str) -> Dialect:
    """Describes a dialect of DeepSeek's markup language, whose keys say whether a text or JSON follows.

    Only the part `｜DSML｜` of a marker is a token of the vocabulary.
    """
    begins, ends = "<｜DSML｜", "</｜DSML｜"
    invoke, parameter = f'{begins}invoke name="', f'{begins}parameter name="'
    typed = TypedEnds('" string="true">', '" string="false">')
    return Dialect(
        name,
        seen_in=(("｜DSML｜", f"{block}>"),),
        reasoning=_THINK,
        calls=Calls(
            (invoke,),
            (f"{ends}invoke>",),
            Style.TAGS,
            name_ends=('">',),
            key=Span((parameter,), (*typed, '">')),
            value=Span((), (f"{ends}parameter>",)),
            typed=typed,
            dropped=(f"{begins}{block}>", f"{ends}{block}>"),
            template=CallTemplate(
                invoke, '">\n', f"{ends}invoke>\n", "", f"{begins}{block}>\n", f"{ends}{block}>", parameter="\n"
            ),
        ),
    )


# A template may contain the texts of several dialects: the first one counts, so specific ones come first.
DIALECTS = (
    Dialect(
        "harmony",
        seen_in=(("<|channel|>", "<|message|>"),),
        reasoning=Span(("<|channel|>analysis<|message|>",), ("<|end|>",)),
        reasons_anywhere=True,
        behind_reasoning="<|start|>assistant",
        before_text="<|channel|>final<|message|>",
        dropped=(
            *("<|start|>assistant", "<|end|>", "<|return|>", "<|call|>"),
            *("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
            "<|channel|>final <|constrain|>json<|message|>",
        ),
        calls=Calls(
            (
                "<|channel|>commentary to=functions.",
                "<|channel|>analysis to=functions.",
                "<|start|>assistant to=functions.",
            ),
            ("<|call|>",),
            Style.HEADED,
            starts=("to=functions.",),
            header=rf"{_NAME}(\s*<\|channel\|>\w+)?((\s*<\|constrain\|>\s*|\s+)(json)?)?\s*<\|message\|>",
            template=CallTemplate("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
        ),
    ),
    Dialect(
        "kimi",
        seen_in=(("<|tool_call_argument_begin|>",),),
        reasoning=_THINK,
        calls=Calls(
            ("<|tool_call_begin|>",),
            ("<|tool_call_end|>",),
            Style.HEADED,
            header=rf"(?P<id>(functions\.)?{_NAME}(:\d+)?)\s*<\|tool_call_argument_begin\|>",
            inner=("<|tool_call_argument_begin|>",),
            dropped=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            template=CallTemplate(
                "<|tool_call_begin|>functions.",
                ":0<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                opens="<|tool_calls_section_begin|>",
                shuts="<|tool_calls_section_end|>",
            ),
        ),
        call_id="functions.{name}:{index}",
    ),
    Dialect(
        "deepseek",
        seen_in=(("<｜tool▁call▁begin｜>",),),
        reasoning=_THINK,
        calls=Calls(
            ("<｜tool▁call▁begin｜>",),
            ("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
            Style.HEADED,
            header=rf"(function<｜tool▁sep｜>)?{_NAME}\s*(<｜tool▁sep｜>|```(json)?)",
            inner=("<｜tool▁sep｜>",),
            dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            template=CallTemplate(
                "<｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜>",
                "",
                opens="<｜tool▁calls▁begin｜>",
                shuts="<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    Dialect(
        "minimax",
        seen_in=(("<minimax:tool_call>",),),
        reasoning=_THINK,
        calls=Calls(
            ('<invoke name="',),
            ("</invoke>",),
            Style.TAGS,
            name_ends=('">',),
            key=Span(('<parameter name="',), ('">',)),
            value=Span((), ("</parameter>",)),
            dropped=("<minimax:tool_call>", "</minimax:tool_call>"),
            template=CallTemplate(
                '<invoke name="', '">\n', "</invoke>\n", "", "<minimax:tool_call>\n", "</minimax:tool_call>", "\n"
            ),
        ),
    ),
    Dialect(
        "minimax_m1",
        # The model's own template and vLLM's ask for objects in these tags; templates of other models put lists there.
        seen_in=(("<tool_calls>\\n{",), ("<tool_calls>\n{",), ("<tool_calls></tool_calls>",)),
        reasoning=_THINK,
        calls=Calls(
            ("<tool_calls>",),
            ("</tool_calls>",),
            Style.OBJECT,
            template=CallTemplate(_NAME_KEY, _ARGUMENTS_KEY, "}", "\n", "<tool_calls>\n", "\n</tool_calls>"),
        ),
    ),
    Dialect(
        "gemma",
        seen_in=(("<|tool_call>", "call:"),),
        reasoning=Span(("<|channel>thought",), ("<channel|>",)),
        calls=Calls(
            ("<|tool_call>",),
            ("<tool_call|>",),
            Style.GEMMA,
            header=rf"call:{_NAME}",
            quote='<|"|>',
            template=CallTemplate("<|tool_call>call:", "{", "}<tool_call|>", ""),
        ),
    ),
    Dialect(
        "function_gemma",
        seen_in=(("<start_function_call>",),),
        calls=Calls(
            ("<start_function_call>",),
            ("<end_function_call>",),
            Style.GEMMA,
            header=rf"call:{_NAME}",
            quote="<escape>",
            template=CallTemplate("<start_function_call>call:", "{", "}<end_function_call>", ""),
        ),
    ),
    Dialect(
        "glm",
        seen_in=(("<arg_key>",),),
        reasoning=_THINK,
        calls=Calls(
            ("<tool_call>",),
            ("</tool_call>",),
            Style.TAGS,
            key=Span(("<arg_key>",), ("</arg_key>",)),
            value=Span(("<arg_value>",), ("</arg_value>",)),
            template=CallTemplate("<tool_call>", "\n", "</tool_call>", "\n", parameter="\n"),
        ),
    ),
    Dialect(
        "qwen3_coder",
        seen_in=(("<function=", "<parameter="),),
        reasoning=_THINK,
        calls=Calls(
            ("<function=",),
            ("</function>",),
            Style.TAGS,
            name_ends=(">",),
            key=Span(("<parameter=",), (">",)),
            value=Span((), ("</parameter>",)),
            trims_lines=True,
            dropped=("<tool_call>", "</tool_call>"),
            template=CallTemplate("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", parameter="\n"),
        ),
    ),
    Dialect(
        "mistral",
        seen_in=(("[TOOL_CALLS]",),),
        reasoning=Span(("[THINK]",), ("[/THINK]",)),
        calls=Calls(
            ("[TOOL_CALLS]",),
            (),
            Style.HEADED,
            header=rf"{_NAME}\s*(\[CALL_ID\]\s*(?P<id>\w+)\s*)?\[ARGS\]",
            inner=("[CALL_ID]", "[ARGS]"),
            template=CallTemplate("[TOOL_CALLS]", "[ARGS]", separator=""),
        ),
        # Mistral's templates refuse call ids of any other length.
        call_id="{digest:.9}",
    ),
    Dialect(
        "phi4",
        seen_in=(("<|/tool_call|>",), ("<|tool|>", "functools")),
        reasoning=_THINK,
        calls=Calls(
            ("<|tool_call|>", "functools"),
            ("<|/tool_call|>",),
            Style.OBJECT,
            template=CallTemplate(_NAME_KEY, _ARGUMENTS_KEY, "}", ", ", "<|tool_call|>[", "]<|/tool_call|>"),
        ),
    ),
    Dialect(
        "lfm2",
        seen_in=(("<|tool_call_start|>",),),
        reasoning=_THINK,
        calls=Calls(
            ("<|tool_call_start|>",),
            ("<|tool_call_end|>",),
            Style.PYTHONIC,
            template=CallTemplate("", "(", ")", ", ", "<|tool_call_start|>[", "]<|tool_call_end|>"),
        ),
    ),
    Dialect(
        "olmo3",
        seen_in=(("<function_calls>",),),
        reasoning=_THINK,
        calls=Calls(
            ("<function_calls>",),
            ("</function_calls>",),
            Style.PYTHONIC,
            template=CallTemplate("", "(", ")", "\n", "<function_calls>\n", "\n</function_calls>"),
        ),
    ),
    Dialect(
        "pythonic",
        seen_in=(("<|python_start|>",), ("[func_name1(",)),
        reasoning=_THINK,
        calls=Calls(
            ("<|python_start|>",),
            ("<|python_end|>",),
            Style.PYTHONIC,
            bare=True,
            template=CallTemplate("", "(", ")", ", ", "[", "]"),
        ),
    ),
    Dialect(
        "llama3_json",
        seen_in=(
            ("<|python_tag|>",),
            ('"parameters": dictionary of argument name and its value',),
            ("ipython", '"parameters":'),
        ),
        calls=Calls(
            ("<|python_tag|>",),
            (),
            Style.OBJECT,
            bare=True,
            template=CallTemplate(_NAME_KEY, '", "parameters": ', "}", "; "),
        ),
    ),
    Dialect(
        "granite",
        seen_in=(
            ("<|tool_call|>", "<|start_of_role|>"),
            ("<tool_call>[", "<|start_of_role|>"),
            ("Here is my thought process:",),
        ),
        reasoning=Span(
            ("Here is my thought process:", "Here's my thought process:"),
            ("Here is my response:", "Here's my response:"),
        ),
        calls=Calls(
            ("<|tool_call|>", "<tool_call>"),
            ("</tool_call>",),
            Style.OBJECT,
            template=CallTemplate(_NAME_KEY, _ARGUMENTS_KEY, "}", ", ", "<|tool_call|>[", "]"),
        ),
    ),
    Dialect(
        "hermes",
        seen_in=(("<tool_call>", "arguments"),),
        reasoning=_THINK,
        calls=Calls(
            ("<tool_call>",),
            ("</tool_call>",),
            Style.OBJECT,
            template=CallTemplate(f"<tool_call>\n{_NAME_KEY}", _ARGUMENTS_KEY, "}\n</tool_call>", "\n"),
        ),
    ),
    # For models of which only the reasoning markers are known.
    Dialect("think", seen_in=(("<think>",), ("</think>",)), reasoning=_THINK),
)
BY_NAME = {dialect.name: dialect for dialect in DIALECTS}
"""The dialects by their names."""


AUTO, NONE = "auto", "none"


def choose_dialect(name: str, template: str) -> Dialect | None:
    """Finds a dialect by its name. "auto" chooses by the chat template; "none" gives None.

    Raises BlockyardError MODEL_NOT_LOADED for an unknown name.
    """
    if name == AUTO:
        return find_dialect(template)
    if name not in {*BY_NAME, NONE}:
        message = f"--dialect must be one of {', '.join((AUTO, NONE, *BY_NAME))}, not {name}"
        raise BlockyardError(Reason.MODEL_NOT_LOADED, message)
    return BY_NAME.get(name)


def find_dialect(template: str) -> Dialect | None:
    """Finds the dialect of a chat template; None if the template has none of the known dialects."""
    for dialect in DIALECTS:
        if any(all(text in template for text in texts) for texts in dialect.seen_in):
            return dialect
    return None
