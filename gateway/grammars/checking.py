"""Makes the grammar of a request, and has llguidance check it, in threads: what a worker gets it can compile.

Without a tokenizer: what is wrong with a grammar does not depend on one, but for the names of special tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.grammars.limits import (
    HINT,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    PARSER_LIMITS,
    is_limit,
    library_version,
)
from gateway.grammars.expressions import grammar_of, json_expression
from gateway.grammars.schemas import find_place, read_schema
from gateway.request import Choices, JsonSchema, Lark, Regex

if TYPE_CHECKING:
    from gateway.request import GenerationRequest, OutputFormat

# At once, of one tenant: two threads do the work of all.
MAX_CHECKS = 64
RETRY_SECONDS = 1.0
# Texts whose check is not made again: clients send the same few.
_MAX_KNOWN = 256
_MAX_COMPLAINT = 400


class GrammarChecks:
    """Threads in which grammars are checked. One for each process; its maker closes it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(2, "grammars")
        self._running: Counter[str] = Counter()

    def close(self) -> None:
        """Stops its threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def grammar_of(self, request: GenerationRequest) -> str:
        """Returns the grammar that a request's answers have to have; empty: none.

        Raises BlockyardError: FIELD_INVALID with the path of what is wrong; GRAMMAR_TOO_COMPLEX; TENANT_QUOTA;
        FEATURE_DISABLED where llguidance is not installed.
        """
        output, given = request.format, request.sampling.grammar
        if output is None and not given:
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
            work = check_format if output is not None else _check_given
            argument: Any = output if output is not None else given
            return await asyncio.get_running_loop().run_in_executor(self._executor, work, argument)
        finally:
            self._running[request.tenant] -= 1
            self._running += Counter()


def _check_given(text: str) -> str:
    _require(text, "sampling.grammar")
    return text


def check_format(output: OutputFormat) -> str:
    """Makes the grammar of a format; raises BlockyardError as `GrammarChecks.grammar_of` does."""
    match output:
        case JsonSchema():
            schema = read_schema(output.schema, "format.json_schema.schema")
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
    reason = Reason.GRAMMAR_TOO_COMPLEX if is_limit(complaint) else Reason.FIELD_INVALID
    path = "" if schema is None else find_place(schema, complaint, lambda part: _complaint(_schema_text(part)))
    return invalid([Violation(f"{field}{path}", complaint, reason)])


def _schema_text(schema: Any) -> str:
    return f"start: {json_expression(json.dumps(schema))}"


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
