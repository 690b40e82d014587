"""Finds errors in a schema: first by checks that compile nothing, then by compiling it with llguidance."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.errors import Reason, Violation
from blockyard.grammars.limits import is_limit
from gateway.grammars.expressions import json_expression
from gateway.grammars.intersections import find_intersection
from gateway.grammars.keywords import wrong_keywords

if TYPE_CHECKING:
    from collections.abc import Callable


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
