"""What 16 MiB can hold of wrong things costs little to find wrong: of a list the first, of its length before."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any, get_args

import pydantic
import pytest

from blockyard.contract.chat import MAX_MESSAGES
from blockyard.errors import BlockyardError
from gateway.fronts.http_calls.bodies import parse_body
from gateway.fronts.http_calls.body_types import Shape
from gateway.fronts.openai import app as all_bodies
from gateway.fronts.responses.schema import ResponseBody

if TYPE_CHECKING:
    from collections.abc import Iterator

# More than any list may have.
NUM = 5000
MAX_ERRORS = 200
KEYS = [f"key {number}" for number in range(NUM)]
LISTS: list[Any] = [*([each] * NUM for each in (1, "a", {}, None, [], 1.5)), ["a", *[1] * NUM], [1, *["a"] * NUM]]
OBJECTS: list[Any] = [dict.fromkeys(KEYS, each) for each in (1, "a", None)]
WRONG = [json.dumps(each) for each in (*LISTS, *OBJECTS, OBJECTS[:1])]


def kinds_of(kind: type[Shape]) -> Iterator[type[Shape]]:
    for each in kind.__subclasses__():
        yield each
        yield from kinds_of(each)


def inner_of(annotation: Any) -> Iterator[type[Shape]]:
    """The shapes of the fields of a type."""
    if inspect.isclass(annotation) and issubclass(annotation, Shape):
        yield annotation
    for each in get_args(annotation):
        yield from inner_of(each)


def bodies() -> list[type[Shape]]:
    """All bodies, and the shapes in them."""
    assert all_bodies
    found = {kind: None for kind in kinds_of(Shape) if kind.__name__.endswith("Body")}
    waiting = [*found]
    while waiting:
        fields = waiting.pop().model_fields.values()
        inner = {each: None for field in fields for each in inner_of(field.annotation) if each not in found}
        found |= inner
        waiting += inner
    # Each field is told of where it stands.
    return [*dict.fromkeys(base for kind in found for base in kind.__mro__ if issubclass(base, Shape))]


@pytest.mark.parametrize("kind", bodies(), ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_of_many_wrong_entries_few_are_told(kind: type[Shape]) -> None:
    for name in kind.__annotations__.keys() & kind.model_fields.keys():
        for value in WRONG:
            try:
                kind.model_validate_json(f'{{"{kind.model_fields[name].alias or name}": {value}}}')
            except pydantic.ValidationError as error:
                assert error.error_count() < MAX_ERRORS, (name, value[:30])


def test_too_many_items_are_not_looked_at() -> None:
    items: list[Any] = [{"type": "web_search_call"}, *[{}] * MAX_MESSAGES]
    with pytest.raises(BlockyardError, match=f"has more than {MAX_MESSAGES} entries"):
        parse_body(ResponseBody, json.dumps({"input": items}).encode())
