"""Checks a client's grammar in llguidance's variant of Lark for costs that llguidance does not limit itself.

start: WORD %json {"type": "integer"}
WORD: /[a-z]{1,9}/ & ~/stop/
"""

from __future__ import annotations

import json
import re
from typing import Any

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.grammars.limits import MAX_GRAMMAR_BYTES, MAX_INTERSECTION, MAX_RULES
from gateway.grammars.compiling.lark_tokens import cut_lark
from gateway.grammars.intersections import pattern_size
from gateway.grammars.problems import wrong_schema
from gateway.grammars.schemas import check_schema

_REPETITIONS = frozenset("*+?{")
# The beginning of a rule, at the beginning of a line.
_RULE = re.compile(r"(?:^|\n)[ \t]*[!?_A-Za-z]")


def check_lark(text: str, field: str) -> None:
    """Raises BlockyardError GRAMMAR_TOO_COMPLEX, or FIELD_INVALID for an invalid JSON Schema in the grammar.

    `text`: Lark, or llguidance's JSON form, which holds several grammars.
    """
    # Check the size first: reading a large text takes seconds.
    if len(text) > MAX_GRAMMAR_BYTES:
        size = len(text.encode(errors="replace"))
        raise _too_complex(field, f"too large: {size} bytes, and at most {MAX_GRAMMAR_BYTES} are taken")
    if not text.lstrip().startswith("{"):
        _check_rules(text, field)
        _check_tokens(text, field)
        return
    try:
        tree: Any = json.loads(text)
    except (ValueError, RecursionError):
        # llguidance reports the error later.
        return
    grammars: Any = tree.get("grammars") if isinstance(tree, dict) else None
    for place, each in enumerate(grammars if isinstance(grammars, list) else ()):
        _check_one(each, field, place)


def _check_one(grammar: Any, field: str, place: int) -> None:
    if not isinstance(grammar, dict):
        return
    inner: Any = grammar.get("lark_grammar")
    if isinstance(inner, str):
        _check_rules(inner, field)
        _check_tokens(inner, field)
    if "json_schema" in grammar:
        _check_json(grammar["json_schema"], f"{field}.grammars[{place}].json_schema")


def _check_rules(text: str, field: str) -> None:
    if (count := len(_RULE.findall(text))) > MAX_RULES:
        raise _too_complex(field, f"has {count} rules, at most {MAX_RULES} are taken")


def _check_tokens(text: str, field: str) -> None:
    """Allows & only before ~, and ~ only before a text or a pattern; limits the product of these patterns' sizes."""
    product, before = 1, ""
    try:
        for kind, value, _, schema in cut_lark(text):
            if value in ("%json", "%llguidance"):
                _check_json(schema, field)
            if before == "&" and value != "~":
                raise _too_complex(field, "may have & only before ~: other intersections are too complex")
            if before == "~" and kind != "number":
                if kind not in ("text", "pattern"):
                    raise _too_complex(field, "may have ~ only before a text or a pattern: others are too complex")
                product *= pattern_size(value[1:-1]) if kind == "pattern" else len(value)
            if product > MAX_INTERSECTION:
                raise _too_complex(field, f"too complex: the pattern behind ~ has more than {MAX_INTERSECTION} states")
            before = value if kind == "other" else kind
    except ValueError as error:
        raise invalid([Violation(field, f"must have JSON behind %json: {error}")]) from None


def _check_json(schema: Any, field: str) -> None:
    check_schema(schema, field)
    if violations := wrong_schema(schema, field):
        raise invalid(violations)


def _too_complex(field: str, description: str) -> BlockyardError:
    return invalid([Violation(field, description, Reason.GRAMMAR_TOO_COMPLEX)])


def may_be_ambiguous(text: str) -> bool:
    """Returns whether a text may have more parses the longer it is: true with several rules or several repetitions.

    With a single rule and a single repetition, a part can begin in few places. Terminals do not count, since the lexer
    reads them.
    """
    try:
        words = [token.text for token in cut_lark(text) if token.kind == "other"]
    except ValueError:
        return True
    num_rules = sum(word.lstrip("_!?")[:1].islower() for word in words)
    return num_rules > 1 or sum(word in _REPETITIONS for word in words) > 1
