"""The types of arguments, of schemas that nobody has checked: those of tools that are not strict."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gateway.dialects.schemas import types_of

MAX_SECONDS = 1.0


def types_in(part: Any, **definitions: Any) -> frozenset[str]:
    return types_of({"properties": {"x": part}, "$defs": definitions}, "x")


def test_references_that_lead_to_one_another_are_followed_once() -> None:
    begin = time.process_time()
    text = {"type": "string"}
    endless = {"anyOf": [*[{"$ref": "#/$defs/a"}] * 100, text]}
    assert types_in({"$ref": "#/$defs/a"}, a=endless) == frozenset()
    wide = {name: {"anyOf": [{"$ref": f"#/$defs/{inner}"}] * 100} for name, inner in zip("abc", "bcd", strict=True)}
    assert types_in({"$ref": "#/$defs/a"}, **wide, d=text) == {"string"}
    assert time.process_time() - begin < MAX_SECONDS


@pytest.mark.parametrize("branches", [5, True, {"a": 1}, "a", None, [1], []])
@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_branches_that_are_none_say_nothing(keyword: str, branches: Any) -> None:
    assert types_in({keyword: branches}) == frozenset()


def test_branches_say_what_all_of_them_say() -> None:
    number, either = {"type": ["integer", "null"]}, {"oneOf": [{"const": "a"}, {"enum": [1.5, True]}]}
    assert types_in({"anyOf": [number, either, {"$ref": "#/$defs/a"}]}, a={"type": "array"}) == {
        *("integer", "null", "string", "number", "boolean", "array")
    }
    assert types_in({"anyOf": [number, {}]}) == frozenset()
