"""Makes the grammar of a request, and has llguidance check it, in threads: what a worker gets it can compile.

Without a tokenizer: what is wrong with a grammar does not depend on one, but for the names of special tokens.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.grammars.limits import (
    HINT,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    PARSER_LIMITS,
    library_version,
)
from blockyard.grammars.threads import make_executor
from gateway.grammars.calls import write_answer, write_calls
from gateway.grammars.expressions import expression_of, grammar_of
from gateway.grammars.intersections import find_intersection
from gateway.grammars.larks import check_lark
from gateway.grammars.problems import reason_of, schema_text
from gateway.grammars.schemas import find_place, read_schema
from gateway.grammars.tools import followed, schema_places
from gateway.request import Choices, JsonSchema, Lark, Regex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.dialects.answer_parser import ParsingRule
    from gateway.dialects.dialect import Dialect, Speech
    from gateway.request import GenerationRequest, OutputFormat

# At once, of one tenant: two threads do the work of all.
MAX_CHECKS = 64
RETRY_SECONDS = 1.0
# Texts whose check is not made again: clients send the same few.
_MAX_KNOWN = 64
_MAX_COMPLAINT = 400


class GrammarChecks:
    """Threads in which grammars are checked. One for each process; its maker closes it."""

    def __init__(self) -> None:
        self._executor = make_executor(2, "grammars")
        self._running: Counter[str] = Counter()

    def close(self) -> None:
        """Stops its threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def grammar_of(self, request: GenerationRequest, speech: Speech | None = None) -> str:
        """Returns the grammar that a request's answers have to have; empty: none.

        `speech`: how the model speaks whose answer is parsed.

        Raises BlockyardError: FIELD_INVALID with the path of what is wrong; GRAMMAR_TOO_COMPLEX; TENANT_QUOTA;
        FEATURE_DISABLED where llguidance is not installed; UNSUPPORTED_PARAMETER for calls whose form is not known.
        """
        output, given, rule = request.format, request.sampling.grammar, request.parsing
        needs_calls = rule is not None and rule.needs_grammar
        if output is None and not given and not needs_calls:
            return ""
        if not library_version():
            raise BlockyardError(Reason.FEATURE_DISABLED, f"this gateway checks no grammars: {HINT}")
        if output is not None and given:
            raise invalid([Violation("sampling.grammar", "is not allowed beside a format")])
        if self._running[request.tenant] >= MAX_CHECKS:
            message = f"{MAX_CHECKS} grammars of yours are being checked: try again"
            raise BlockyardError(Reason.TENANT_QUOTA, message, retry_after_seconds=RETRY_SECONDS)
        self._running[request.tenant] += 1
        try:
            work = functools.partial(_check_given, given)
            if output is not None or needs_calls:
                work = functools.partial(_check_said, output, rule, speech, schema_places(request))
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._running[request.tenant] -= 1
            self._running += Counter()


def _check_given(text: str) -> str:
    check_lark(text, "sampling.grammar")
    _require(text, "sampling.grammar")
    return text


def _check_said(
    output: OutputFormat | None, rule: ParsingRule | None, speech: Speech | None, places: Sequence[str]
) -> str:
    """Checks the form of an answer and that of calls each by itself, and joins them behind what the model thinks.

    `places`: of the tools' schemas in the request.
    """
    text = "" if output is None else check_format(output)
    answer = "" if output is None else expression_of(output)
    if rule is not None and rule.tools and (output is not None or rule.needs_grammar):
        dialect = speech.dialect if speech else None
        if dialect is not None and dialect.calls is not None:
            assert speech is not None
            if output is not None and dialect.calls.bare and not rule.must_call:
                description = f"is not supported beside tools of models that speak {dialect.name}"
                raise invalid([Violation("format", description, Reason.UNSUPPORTED_PARAMETER)])
            tools = [followed(tool, _complaint, place) for tool, place in zip(rule.tools, places, strict=True)]
            text = write_calls(speech, tools, must_call=rule.must_call, one_call=rule.one_call, answer=answer)
        elif rule.needs_grammar:
            raise _no_form(rule, dialect)
    elif speech is not None and (speech.may_think or speech.dialect.before_text):
        text = write_answer(speech, answer)
    # None is made where no tool is left to call, which is told elsewhere.
    if text and (complaint := _complaint(text)):
        raise _refusal("conversation.tools" if rule is not None and rule.tools else "format", complaint)
    return text


def _no_form(rule: ParsingRule, dialect: Dialect | None) -> BlockyardError:
    field = "conversation.tool_choice" if rule.must_call or rule.is_limited else "conversation.tools"
    why = f"models that speak {dialect.name}" if dialect else "this model, or of an answer that is not parsed"
    description = f"calls of tools have no form to be held to of {why}: give auto, all tools, and no strict ones"
    return invalid([Violation(field, description, Reason.UNSUPPORTED_PARAMETER)])


def check_format(output: OutputFormat) -> str:
    """Makes the grammar of a format; raises BlockyardError as `GrammarChecks.grammar_of` does."""
    match output:
        case JsonSchema():
            schema = read_schema(output.schema, "format.json_schema.schema")
            if violation := find_intersection(schema, "format.json_schema.schema"):
                raise invalid([violation])
            text = grammar_of(output)
            if complaint := _complaint(text):
                raise _refusal("format.json_schema.schema", complaint, schema)
            return text
        case Choices():
            _check_choices(output.texts)
            field = "format.choices.texts"
        case Regex():
            field = "format.regex"
        case Lark():
            field = "format.grammar"
            check_lark(output.text, field)
        case _:
            field = "format"
    text = grammar_of(output)
    _require(text, field)
    return text


def _check_choices(texts: tuple[str, ...]) -> None:
    field = "format.choices.texts"
    if not texts or not all(texts):
        raise invalid([Violation(field, "must be at least one text, and none of them empty")])
    if len(texts) > MAX_CHOICES:
        raise invalid([Violation(field, f"at most {MAX_CHOICES}, not {len(texts)}", Reason.GRAMMAR_TOO_COMPLEX)])


def _require(text: str, field: str) -> None:
    if complaint := _complaint(text):
        raise _refusal(field, complaint)


def _refusal(field: str, complaint: str, schema: Any = None) -> BlockyardError:
    path = "" if schema is None else find_place(schema, complaint, lambda part: _complaint(schema_text(part)))
    return invalid([Violation(f"{field}{path}", complaint, reason_of(complaint))])


@lru_cache(_MAX_KNOWN)
def _complaint(text: str) -> str:
    """Returns what is wrong with a grammar, as llguidance says it; empty: nothing."""
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  an extra

    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "must be Unicode text, and has half a surrogate pair"
    if size > MAX_GRAMMAR_BYTES:
        return f"too large: it has {size} bytes, at most {MAX_GRAMMAR_BYTES} are taken"
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, limits=LLParserLimits(**PARSER_LIMITS))
    return _shorten(messages[0]) if is_wrong else ""


def _shorten(message: str) -> str:
    """Leaves out where in the text it is, which nobody who sent a schema has seen, and the text itself."""
    first = message.split("\n   1 | ")[0].split("<state>")[0]
    said = first.split("failed to compile JSON schema: ")[-1]
    return " ".join(said.split())[:_MAX_COMPLAINT]
