"""Reads calls whose arguments stand between tags, and writes the arguments as JSON."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import TYPE_CHECKING

from gateway.dialects.feed import CallSink, Feed, NotACall
from gateway.dialects.markers import markers_of
from gateway.dialects.schemas import type_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from gateway.dialects.dialect import Calls

_STRING = frozenset({"string"})
# Jinja templates print these values as Python does.
_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}


def read_tags(feed: Feed, calls: Calls, sink: CallSink) -> Generator[None, None, None]:
    name = yield from feed.name(markers_of(*(calls.name_ends or (*calls.key.begins, *calls.ends))))
    if not sink.knows(name):
        raise NotACall
    key_begins = markers_of(*calls.key.begins)
    # Read the end of the name before giving the name out: `mark` then passes all text that determined the name.
    has_ended = yield from feed.accepts(markers_of(*calls.name_ends))
    is_in_key = not has_ended and bool((yield from feed.accepts(key_begins)))
    sink.on_call(name)
    separator = "{"
    while True:
        if not is_in_key:
            yield from feed.peek()
            if (yield from feed.accepts(markers_of(*calls.ends))):
                sink.on_arguments("{}" if separator == "{" else "}")
                return sink.on_call_end()
            if not (yield from feed.accepts(key_begins)):
                raise NotACall
        is_in_key = False
        key, key_end = yield from _read_key(feed, calls)
        sink.on_arguments(f"{separator}{write_string(key)}: ")
        separator = ", "
        types = _types_by(key_end, calls)
        yield from _Value(feed, calls, sink.types_of(name, key) if types is None else types, sink.on_arguments).read()


def _types_by(key_end: str, calls: Calls) -> frozenset[str] | None:
    """Returns the types that the end of a key announces: text, or any JSON type (empty); None if it announces none."""
    if key_end == calls.typed.text:
        return _STRING
    return frozenset() if key_end == calls.typed.json else None


def _read_key(feed: Feed, calls: Calls) -> Generator[None, None, tuple[str, str]]:
    """Reads an argument's name, and returns it with the marker that ended it."""
    key_ends = markers_of(*calls.key.ends)
    key = yield from feed.name(key_ends)
    key_end = yield from feed.accepts(key_ends)
    if calls.value.begins:
        yield from feed.peek()
        if not (yield from feed.accepts(markers_of(*calls.value.begins))):
            raise NotACall
    return key, key_end


class _Value:
    def __init__(self, feed: Feed, calls: Calls, types: frozenset[str], emit: Callable[[str], None]) -> None:
        self._feed = feed
        self._ends = markers_of(*calls.value.ends)
        self._trims_lines = calls.trims_lines
        self._types = types
        self._emit = emit

    def read(self) -> Generator[None, None, None]:
        is_string = self._types == _STRING
        if is_string:
            self._emit('"')
        if self._trims_lines:
            yield from self._feed.accepts(markers_of("\n"))
        if is_string:
            yield from self._copy(lambda piece: self._emit(write_string(piece)[1:-1]))
            self._emit('"')
            return
        pieces: list[str] = []
        yield from self._copy(pieces.append)
        self._emit(write_value("".join(pieces), self._types))

    def _copy(self, emit: Callable[[str], None]) -> Generator[None, None, None]:
        """Copies the value up to its end marker. Raises NotACall if the marker does not come."""
        feed = self._feed
        while (found := self._ends.search(feed.text, feed.place, at_end=feed.at_end)) is None:
            end = len(feed.text) - (0 if feed.at_end else self._ends.num_held(feed.text, feed.place))
            if self._trims_lines and not feed.at_end and feed.text.endswith("\n", feed.place, end):
                end -= 1
            emit(feed.take(end))
            if feed.at_end:
                raise NotACall
            yield
        piece = feed.take(found.start())
        emit(piece.removesuffix("\n") if self._trims_lines else piece)
        feed.place = found.end()


def write_string(text: str) -> str:
    return encode_basestring(text)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is Python's JSON alone")


def write_value(text: str, types: frozenset[str]) -> str:
    """Returns a model's text as JSON: unchanged if it is JSON of an allowed type, else as a string."""
    stripped = text.strip()
    value = _PYTHON_NAMES.get(stripped, stripped)
    try:
        found = type_of(json.loads(value, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return write_string(text)
    may_be = types - {"string"}
    # If the schema allows texts too, a number counts as JSON only if its exact type is allowed.
    if "number" in types or ("integer" in types and "string" not in types):
        may_be |= {"number", "integer"}
    return value if not types or found in may_be else write_string(text)
