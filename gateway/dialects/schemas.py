"""Reads the types of arguments from a tool's schema, as the scanner needs them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, cast

from blockyard.grammars.limits import MAX_SCHEMA_BYTES

Schema = Mapping[str, Any]
NO_TOOLS: Mapping[str, str] = MappingProxyType({})
_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
# The depth to which branches and references are followed.
_MAX_DEPTH = 8


@lru_cache(64)
def read_schema(text: str) -> Schema:
    """Reads the schema of a tool's parameters; returns an empty one if it is missing, invalid or too large.

    The result is cached for later answers and takes many times the memory of its text. Grammars have the same limit.
    """
    if len(text) > MAX_SCHEMA_BYTES:
        return {}
    try:
        schema = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return cast("Schema", schema) if isinstance(schema, dict) else {}


def types_of(schema: Schema, key: str) -> frozenset[str]:
    """Returns the JSON types that an argument may have; empty if the schema names none."""
    properties = schema.get("properties")
    return _Types(schema).find(cast("Schema", properties).get(key) if isinstance(properties, dict) else None)


class _Types:
    """Finds types in one schema. Follows each reference once, so that circular references end."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._known: dict[str, frozenset[str]] = {}

    def find(self, found: object, depth: int = 0) -> frozenset[str]:
        """Returns the types of a part of the schema; empty if it names none."""
        if not isinstance(found, dict) or depth == _MAX_DEPTH:
            return frozenset()
        part = cast("Schema", found)
        told = part.get("type")
        if isinstance(told, str):
            return frozenset({told})
        if isinstance(told, list):
            return frozenset(each for each in cast("list[object]", told) if isinstance(each, str))
        values = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(values, list):
            return frozenset(type_of(value) for value in cast("list[object]", values))
        if isinstance(reference := part.get("$ref"), str):
            return self._follow(reference, depth)
        types = [self.find(each, depth + 1) for each in _branches(part)]
        return frozenset[str]().union(*types) if all(types) else frozenset()

    def _follow(self, reference: str, depth: int) -> frozenset[str]:
        if reference not in self._known:
            # While a reference is followed, the same reference inside its target finds no types.
            self._known[reference] = frozenset()
            self._known[reference] = self.find(resolve(reference, self._schema), depth + 1)
        return self._known[reference]


def _branches(part: Schema) -> Iterator[object]:
    for name in ("anyOf", "oneOf", "allOf"):
        # Schemas of tools that are not strict are unchecked.
        if isinstance(branches := part.get(name), list):
            yield from cast("list[object]", branches)


def resolve(reference: str, schema: Schema) -> object:
    """Returns the target of a reference in a schema; None if there is none."""
    found: object = schema
    for name in reference.removeprefix("#/").split("/"):
        found = cast("Schema", found).get(name) if isinstance(found, dict) else None
    return found


def type_of(value: object) -> str:
    return _TYPES.get(type(value), "null")
