"""Reads JSON Schemas, and finds the keyword in a schema that causes llguidance's error. Compiles nothing itself."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.errors import Reason, Violation, invalid
from blockyard.grammars.limits import MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Keywords whose value is a schema, a list of schemas or schemas by name.
_SCHEMA = frozenset({"items", "additionalItems", "additionalProperties", "not", "if", "then", "else", "contains"})
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*\])")
# A schema may have thousands of patterns: only the first keywords are compiled alone to find the error.
_MAX_PROBES = 200


class Place(NamedTuple):
    """A keyword of a schema. `path`: relative to the field that contains the schema."""

    path: str
    keyword: str
    value: Any


def read_schema(text: str, field: str) -> Any:
    """Reads a schema; raises BlockyardError FIELD_INVALID, or GRAMMAR_TOO_COMPLEX for one that is too large."""
    if (size := len(text.encode(errors="replace"))) > MAX_SCHEMA_BYTES:
        raise _too_complex(field, f"has {size} bytes, at most {MAX_SCHEMA_BYTES} are taken")
    try:
        schema: Any = json.loads(text)
    except RecursionError:
        raise _too_complex(field, f"is nested more than {MAX_SCHEMA_DEPTH} deep") from None
    except ValueError as error:
        raise invalid([Violation(field, f"is not JSON: {error}")]) from None
    check_schema(schema, field)
    return schema


def check_schema(schema: Any, field: str) -> None:
    """Raises BlockyardError for a value that is nested too deep, is no schema, or refers to other schemas."""
    if _depth(schema) > MAX_SCHEMA_DEPTH:
        raise _too_complex(field, f"is nested more than {MAX_SCHEMA_DEPTH} deep")
    if not isinstance(schema, dict | bool):
        raise invalid([Violation(field, "must be a JSON Schema: an object")])
    if found := list(_foreign(schema, field)):
        raise invalid(found)


def _foreign(schema: Any, field: str) -> Iterator[Violation]:
    for path, keyword, value in walk(schema):
        if keyword == "$ref" and not (isinstance(value, str) and value.startswith("#")):
            yield Violation(f"{field}{path}", "must refer to a place in this schema: other schemas are not fetched")
        elif keyword == "$id" and path != ".$id":
            yield Violation(
                f"{field}{path}", "is only allowed at the root of a schema, from which references are resolved"
            )


def _too_complex(field: str, description: str) -> Exception:
    return invalid([Violation(field, description, Reason.GRAMMAR_TOO_COMPLEX)])


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner: list[Any] = []
        for each in level:
            inner.extend(each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())
        level = [each for each in inner if isinstance(each, dict | list)]
    return depth


def walk(schema: Any, path: str = "") -> Iterator[Place]:
    """Yields the keywords of a schema and of all schemas in it."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        here = f"{path}.{keyword}"
        yield Place(here, keyword, value)
        if keyword in _NAMED and isinstance(value, dict):
            for name, each in value.items():
                yield from walk(each, f"{here}.{name}")
        elif keyword in _SCHEMAS and isinstance(value, list):
            for index, each in enumerate(value):
                yield from walk(each, f"{here}[{index}]")
        elif keyword in _SCHEMA:
            yield from walk(value, here)


def find_place(schema: Any, complaint: str, complain: Callable[[Any], str]) -> str:
    """Returns the path of the keyword that causes an error; an empty text if it is not found.

    Args:
        schema: the complete schema.
        complaint: llguidance's error about the schema.
        complain: returns llguidance's error for another schema, or an empty text.
    """
    places = list(walk(schema))
    if unimplemented := _UNIMPLEMENTED.search(complaint):
        names = json.loads(unimplemented[1])
        return next((place.path for place in places if place.keyword in names), "")
    inner = _SCHEMA | _SCHEMAS | _NAMED | {"$ref"}
    leaves = [place for place in places if place.keyword not in inner]
    for place in leaves[:_MAX_PROBES]:
        kind = {"pattern": {"type": "string"}, "format": {"type": "string"}}.get(place.keyword, {})
        if complain({**kind, place.keyword: place.value}) == complaint:
            return place.path
    # An error about a reference or about branches names the keyword, or the reference's target.
    for place in places:
        if place.keyword in ("$ref", "oneOf") and (place.keyword in complaint or str(place.value)[1:] in complaint):
            return place.path
    return ""
