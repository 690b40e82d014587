"""Reads calls that are JSON objects, and calls with a header before the JSON object of their arguments."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gateway.dialects.arguments import JsonValue, TextOfString
from gateway.dialects.feed import CallSink, Feed, NotACall
from gateway.dialects.markers import markers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from gateway.dialects.dialect import Calls

# Keys of a call beside `name`: the keys for its arguments, and keys that mean nothing to a client.
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"id", "type"})


def read_objects(feed: Feed, calls: Calls, sink: CallSink) -> Generator[None, None, None]:
    """Reads an object, several objects in a row, or a list of objects."""
    is_list = (yield from feed.peek()) == "["
    feed.place += is_list
    while True:
        yield from _ObjectReader(feed, calls, sink).read()
        character = yield from feed.peek()
        if character and character in ",;":
            feed.place += 1
            character = yield from feed.peek()
        if character == "{":
            continue
        if is_list and character == "]":
            feed.place += 1
        else:
            feed.place = feed.mark
        return


class _ObjectReader:
    def __init__(self, feed: Feed, calls: Calls, sink: CallSink) -> None:
        self._feed = feed
        self._ends = calls.ends
        self._sink = sink
        self._name: str | None = None
        # None before the arguments come; afterwards the pieces of arguments that wait for the call's name.
        self._arguments: list[str] | None = None
        self._is_whole = False

    def read(self) -> Generator[None, None, None]:
        feed = self._feed
        yield from feed.expect("{")
        while True:
            character = yield from feed.peek()
            if character == '"':
                yield from self._read_member((yield from feed.string()))
            elif character == ",":
                feed.place += 1
            elif character == "}" or self._is_whole:
                feed.place += character == "}"
                return self._end()
            else:
                raise NotACall

    def _end(self) -> None:
        if self._name is None:
            raise NotACall
        if self._arguments is None:
            self._sink.on_call(self._name)
            self._sink.on_arguments("{}")
        self._sink.on_call_end()

    def _read_member(self, key: str) -> Generator[None, None, None]:
        feed = self._feed
        yield from feed.expect(":")
        character = yield from feed.peek()
        if key == "name" and self._name is None:
            self._name = yield from feed.string()
            if not self._sink.knows(self._name):
                raise NotACall
            if self._arguments is not None:
                self._emit_call(self._arguments)
        elif key in _ARGUMENT_KEYS and self._arguments is None:
            yield from self._read_arguments(character)
        elif key in _OTHER_KEYS or self._is_emitted:
            yield from copy_value(feed, JsonValue(character, self._ends), lambda _: None)
        else:
            raise NotACall

    @property
    def _is_emitted(self) -> bool:
        return self._name is not None and self._arguments is not None

    def _emit_call(self, pieces: list[str]) -> None:
        assert self._name is not None
        self._sink.on_call(self._name)
        for piece in pieces:
            self._sink.on_arguments(piece)

    def _read_arguments(self, first: str) -> Generator[None, None, None]:
        if first not in ("{", '"'):
            raise NotACall
        self._arguments = waiting = []
        if self._name is not None:
            self._emit_call(waiting)
        emit = waiting.append if self._name is None else self._sink.on_arguments
        if first == "{":
            yield from copy_value(self._feed, JsonValue(first, self._ends), emit)
        else:
            yield from _copy_string(self._feed, JsonValue(first, self._ends), emit)
        self._is_whole = True


def copy_value(feed: Feed, value: JsonValue, emit: Callable[[str], None]) -> Generator[None, None, None]:
    """Copies a JSON value. Raises NotACall if it ends before it is complete."""
    while True:
        emit(feed.take(value.read(feed.text, feed.place, at_end=feed.at_end)))
        if value.is_broken:
            raise NotACall
        if value.is_whole:
            return
        yield


def _copy_string(feed: Feed, value: JsonValue, emit: Callable[[str], None]) -> Generator[None, None, None]:
    """Copies the content of a JSON string: arguments that the model has serialized twice."""
    text = TextOfString()
    feed.place += 1
    value.skip_quote()

    def push(piece: str) -> None:
        emit(text.push(piece.removesuffix('"') if value.is_whole else piece))
        if value.is_whole or value.is_broken:
            emit(text.flush())

    yield from copy_value(feed, value, push)


def read_headed(feed: Feed, calls: Calls, sink: CallSink) -> Generator[None, None, None]:
    """Reads a header and the object that follows, or calls of the style OBJECT if a bracket comes first."""
    if (yield from feed.peek()) in ("{", "["):
        yield from read_objects(feed, calls, sink)
        return
    yield from read_header(feed, calls, sink)
    yield from copy_value(feed, JsonValue("{", calls.ends), sink.on_arguments)
    sink.on_call_end()


def read_header(feed: Feed, calls: Calls, sink: CallSink) -> Generator[None, None, None]:
    """Reads the header before a call's object, and begins the call; raises NotACall if the header does not match."""
    header = yield from feed.name(markers_of("{", *calls.ends))
    found = re.fullmatch(calls.header, header, re.DOTALL)
    if found is None or not sink.knows(found["name"]) or (yield from feed.peek()) != "{":
        raise NotACall
    sink.on_call(found["name"], found.groupdict().get("id") or "")
