"""Finds errors in a schema: first by checks that compile nothing, then by compiling it with llguidance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.errors import Reason, Violation
from blockyard.grammars.limits import is_limit
from gateway.grammars.expressions import json_expression
from gateway.grammars.intersections import find_intersection
from gateway.grammars.schemas import walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Check = Callable[[Any], Iterator[tuple[str, str]]]


def wrong_keywords(schema: Any, field: str) -> Iterator[Violation]:
    """Finds keywords with values of wrong types; paths begin with `field`. Skips keywords that llguidance ignores.

    llguidance's error quotes the beginning of such a value, and llguidance panics if the quote ends inside a character.
    """
    for path, keyword, value in walk(schema):
        if (check := _CHECKS.get(keyword)) is not None:
            for place, expected in check(value):
                yield Violation(f"{field}{path}{place}", f"must be {expected}")


def _is(expected: str, *types: type) -> Check:
    """Makes a check for some types. A boolean is not a number here."""

    def check(value: Any) -> Iterator[tuple[str, str]]:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            yield "", expected

    return check


def _list_of(inner: Check) -> Check:
    def check(value: Any) -> Iterator[tuple[str, str]]:
        yield from _LIST(value)
        for index, each in enumerate(value if isinstance(value, list) else ()):
            yield from ((f"[{index}]{place}", expected) for place, expected in inner(each))

    return check


def _by_name(inner: Check) -> Check:
    def check(value: Any) -> Iterator[tuple[str, str]]:
        yield from _OBJECT(value)
        for name, each in value.items() if isinstance(value, dict) else ():
            yield from ((f".{name}{place}", expected) for place, expected in inner(each))

    return check


def _one_or_list_of(one: Check) -> Check:
    several = _list_of(one)
    return lambda value: (several if isinstance(value, list) else one)(value)


def _check_count(value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        yield "", "a whole number, 0 or more"


_LIST, _OBJECT, _TEXT = _is("an array", list), _is("an object", dict), _is("a string", str)

_NUMBER = _is("a number", int, float)

# In draft 4 of JSON Schema, booleans say whether `minimum` and `maximum` are excluded themselves.
_BOUND = _is("a number", int, float, bool)

_SCHEMA = _is("a JSON Schema: an object, true or false", dict, bool)

_SCHEMAS, _NAMED_SCHEMAS = _list_of(_SCHEMA), _by_name(_SCHEMA)

_CHECKS: dict[str, Check] = {
    "$ref": _TEXT,
    "$defs": _NAMED_SCHEMAS,
    "definitions": _NAMED_SCHEMAS,
    "type": _one_or_list_of(_TEXT),
    "enum": _LIST,
    "anyOf": _SCHEMAS,
    "oneOf": _SCHEMAS,
    "allOf": _SCHEMAS,
    "items": _one_or_list_of(_SCHEMA),
    "additionalItems": _SCHEMA,
    "prefixItems": _SCHEMAS,
    "minItems": _check_count,
    "maxItems": _check_count,
    "properties": _NAMED_SCHEMAS,
    "additionalProperties": _SCHEMA,
    "patternProperties": _NAMED_SCHEMAS,
    "required": _list_of(_TEXT),
    "minProperties": _check_count,
    "maxProperties": _check_count,
    "minLength": _check_count,
    "maxLength": _check_count,
    "pattern": _TEXT,
    "format": _TEXT,
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _BOUND,
    "exclusiveMaximum": _BOUND,
    "multipleOf": _NUMBER,
}


class Problem(NamedTuple):
    """The reason why a schema is refused. `path`: the path in the schema; empty: unknown."""

    complaint: str
    reason: Reason
    path: str = ""


def wrong_schema(schema: Any, field: str) -> list[Violation]:
    """Finds the errors in a parsed schema that can be found without compiling it."""
    if found := list(wrong_keywords(schema, field)):
        return found
    return [violation] if (violation := find_intersection(schema, field)) else []


def complain_of(schema: Any, complain: Callable[[str], str]) -> Problem | None:
    """Returns the first problem of a parsed schema; None for a valid one.

    `complain`: returns the compiler's error for a grammar, or an empty text if the grammar is valid.
    """
    for violation in wrong_schema(schema, ""):
        return Problem(violation.description, violation.reason, violation.field)
    complaint = complain(schema_text(schema))
    return Problem(complaint, reason_of(complaint)) if complaint else None


def schema_text(schema: Any) -> str:
    """Returns the grammar of the JSON texts that a schema allows."""
    return f"start: {json_expression(json.dumps(schema))}"


def reason_of(complaint: str) -> Reason:
    return Reason.GRAMMAR_TOO_COMPLEX if is_limit(complaint) else Reason.FIELD_INVALID
