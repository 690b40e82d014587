"""Walks the types that a client's package has for the body of a call: each field and each choice, one at a time."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union

import typing_extensions
from pydantic import BaseModel

_MARKS = (typing_extensions.Required, typing_extensions.NotRequired, typing.Annotated)
_SCALARS: dict[Any, tuple[Any, ...]] = {
    bool: (True, False),
    int: (2,),
    float: (0.5,),
    object: ({},),
    Any: ({},),
}
# Fields of types that are required here, though the types do not say so.
_REQUIRED = {
    ("BetaSystemMessageParam", "content"): "a message without says nothing",
    ("FunctionCallOutput", "call_id"): "a result without is of no call",
    ("JSONSchema", "schema"): "a form without is none",
}
# What a field holds whose type says of it no more than that these are objects.
_MEANT: dict[str, dict[str, Any]] = {
    "ChatCompletionAllowedToolsParam": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "ToolChoiceAllowedParam": {"tools": [{"type": "function", "name": "f"}]},
}
# What the package reads a file from.
_FILES = ("IO", "PathLike", "datetime")


class Sample(typing.NamedTuple):
    """A value that has a field; `without`: the same without it, where it may be left out.

    `path`: of the field. Of unions it has the type that was chosen.
    """

    path: str
    value: Any
    without: Any = None

    def wrapped(self, wrap: Callable[[Any], Any]) -> Sample:
        """The same within something else."""
        return Sample(self.path, wrap(self.value), None if self.without is None else wrap(self.without))


def samples_of(body: Any) -> Iterator[Sample]:
    """Yields bodies of one field each, and of one choice at each place in it."""
    for name, hint, _ in _fields(body):
        yield from _in_object({}, name, hint, name, (), is_required=False)


def _fields(kind: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yields the names, the types and whether they are required of a TypedDict's fields."""
    for name, hint in typing_extensions.get_type_hints(kind, include_extras=True).items():
        is_required, wire_name = kind.__total__, name
        while (origin := typing_extensions.get_origin(hint)) in _MARKS:
            if origin is typing.Annotated:
                wire_name = next((mark.alias for mark in hint.__metadata__ if getattr(mark, "alias", None)), wire_name)
            else:
                is_required = origin is typing_extensions.Required
            hint = typing_extensions.get_args(hint)[0]
        yield wire_name, hint, is_required or (kind.__name__, wire_name) in _REQUIRED


def _samples(hint: Any, path: str, within: tuple[Any, ...]) -> Iterator[Sample]:
    origin, args = typing_extensions.get_origin(hint), typing_extensions.get_args(hint)
    if typing_extensions.is_typeddict(hint):
        if hint not in within:
            yield from _objects(hint, path, (*within, hint))
    elif origin is typing.Annotated:
        yield from _samples(args[0], path, within)
    elif origin is Literal:
        yield from (Sample(path, value) for value in args)
    elif origin in (Union, types.UnionType):
        for each in args:
            yield from _samples(each, path, within)
    elif origin in (list, Iterable, Sequence):
        yield from (each.wrapped(lambda value: [value]) for each in _samples(args[0], f"{path}[]", within))
    elif origin in (dict, Mapping):
        yield from (each.wrapped(lambda value: {"1": value}) for each in _samples(args[1], f"{path}{{}}", within))
    elif hint is str:
        # Others elsewhere, and never an empty one.
        yield Sample(path, path or "text")
    elif hint in _SCALARS:
        yield from (Sample(path, value) for value in _SCALARS[hint])
    else:
        # Nothing, a file, or an answer that is sent again: all of these are other values on the wire.
        is_read = hint is type(None) or any(name in str(hint) for name in _FILES)
        assert is_read or (isinstance(hint, type) and issubclass(hint, BaseModel)), f"{path}: {hint}"


def _objects(kind: Any, path: str, within: tuple[Any, ...]) -> Iterator[Sample]:
    """Yields the smallest object, and those with one field more, or with another value of one that is required."""
    fields = [*_fields(kind)]
    meant = _MEANT.get(kind.__name__, {})
    least = {name: _first(hint, within) for name, hint, is_required in fields if is_required} | meant
    yield Sample(path, least)
    tag = least.get("type") or least.get("role")
    for name, hint, is_required in (field for field in fields if field[0] not in meant):
        inner = f"{path}<{tag}>.{name}" if isinstance(tag, str) else f"{path}.{name}"
        yield from _in_object(least, name, hint, inner, within, is_required=is_required)


def _in_object(
    least: dict[str, Any], name: str, hint: Any, path: str, within: tuple[Any, ...], *, is_required: bool
) -> Iterator[Sample]:
    for each in _samples(hint, path, within):
        sample = each.wrapped(lambda value: {**least, name: value})
        is_new = sample.without is None and not is_required
        yield sample._replace(without=least) if is_new else sample


def _first(hint: Any, within: tuple[Any, ...]) -> Any:
    return next((each.value for each in _samples(hint, "", within)), None)
