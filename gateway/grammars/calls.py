"""Writes the grammar of a whole answer: optional reasoning, then tool calls in the model's dialect or a format.

start: (begin thought)? calls
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from gateway.dialects.dialect import AnswerContext, Calls, CallTemplate, Style
from gateway.dialects.schemas import read_schema
from gateway.grammars.expressions import json_expression, quote
from gateway.grammars.grammar import Grammar, pattern_of
from gateway.grammars.literals import Literals
from gateway.grammars.tags import Tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.dialects.answer_parser import ToolSchema


def write_answer(context: AnswerContext, expression: str) -> str:
    """Writes the grammar of optional reasoning followed by an answer that `expression` describes."""
    grammar = Grammar(context, "format")
    grammar.add("start", f"{grammar.thought()}{grammar.before_text} answer")
    grammar.add("answer", expression)
    return grammar.text


def write_calls(
    context: AnswerContext, tools: Sequence[ToolSchema], *, must_call: bool, one_call: bool, answer: str = ""
) -> str:
    """Writes the grammar of optional reasoning followed by tool calls.

    Args:
        context: the context of the answer; its dialect must have calls.
        tools: the tools that may be called; llguidance must be able to read their schemas.
        must_call: the model must call a tool; false: it may write text around calls, or no call at all.
        one_call: the model may call one tool at most.
        answer: the Lark expression for an answer without calls; empty: any text.
    """
    calls = context.dialect.calls
    assert calls is not None
    template, grammar = calls.template, Grammar(context, "conversation.tools")
    grammar.add(
        "named", " | ".join(_add_call(grammar, number, tool, calls, template) for number, tool in enumerate(tools))
    )
    before = grammar.literal(template.before)
    several = (
        "" if one_call or template.separator is None else f" ({grammar.literal(template.separator)} {before} named)*"
    )
    grammar.add("behind", f"named{several} {grammar.literal(template.shuts)}")
    grammar.add("calls", f"{grammar.literal(template.opens + template.before)} behind")
    said = "calls" if must_call else _choice(grammar, calls, template, answer)
    grammar.add("start", f"{grammar.thought()}{said}")
    return grammar.text


def _choice(grammar: Grammar, calls: Calls, template: CallTemplate, answer: str) -> str:
    """Returns the expression for calls or an answer without calls: `answer`, or any text."""
    if answer:
        grammar.add("answer", answer)
        return f"(calls | {grammar.before_text} answer)"
    markers = (*calls.begins, *calls.dropped)
    begin = next((each for each in markers if (template.opens or template.before).startswith(each)), "")
    if not begin:
        # The calls have no marker: they begin the answer. A text may begin with anything but a bracket.
        grammar.add("TEXT", r"/(?s:\s*[^\s{\[].*)?/")
        return "(calls | TEXT)"
    if grammar.is_special(begin):
        # Only the special token begins calls: no other tokens can spell it, so the text needs no restriction.
        grammar.add("TEXT", "/(?s:.+)/")
        return f"({grammar.before_text} TEXT)? (calls ({grammar.before_text} TEXT)?)*"
    spelled, rest = grammar.split(template.opens + template.before)
    if rest:
        # The marker begins with characters before its special token: the text before a call ends with them.
        grammar.add("BEFORE", f"/(?s:.*){pattern_of(spelled)}/")
        grammar.add("TEXT", "/(?s:.+)/")
        return f"({grammar.before_text} BEFORE {grammar.literal(rest)} behind)* ({grammar.before_text} TEXT)?"
    others = [pattern_of(each) for each in calls.begins if each != begin and not begin.startswith(each)]
    text = f" & ~/(?s:.*)({'|'.join(others)})(?s:.*)/" if others else ""
    grammar.add("TEXT", f"/(?s:.*)/{text}")
    grammar.add("LAST", f"/(?s:.*)/ & ~/(?s:.*)({'|'.join([pattern_of(begin), *others])})(?s:.*)/")
    grammar.add(f"before[suffix={quote(begin)}]", "TEXT")
    rest = grammar.literal((template.opens + template.before).removeprefix(begin))
    return grammar.add("said", f"before {rest} behind said | LAST")


def _add_call(grammar: Grammar, number: int, tool: ToolSchema, calls: Calls, template: CallTemplate) -> str:
    """Adds the rule for a call of one tool, and returns the rule's name."""
    name = quote(tool.name)[1:-1] if calls.style is Style.OBJECT else tool.name
    # The arguments of a call must be an object, even if the schema allows other types: the scanner reads nothing else.
    schema = {**read_schema(tool.parameters), "type": "object"}
    if calls.style is Style.TAGS:
        arguments = Tags(grammar, calls, number, tool, schema).arguments()
    elif calls.style in (Style.PYTHONIC, Style.GEMMA):
        arguments = Literals(grammar, calls, f"literal_{number}", tool, schema).arguments()
    else:
        arguments = grammar.add(f"arguments_{number}", json_expression(json.dumps(schema)))
    head, tail = grammar.literal(f"{name}{template.middle}"), grammar.literal(template.after)
    return grammar.add(f"named_{number}", f"{head} {arguments} {tail}")
