"""Holds the part of a streamed text that is not parsed yet. Readers are generators that yield to wait for more text."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator

    from gateway.dialects.markers import Markers

# The longest name of a tool. A longer text is no name and need not be held back.
MAX_NAME_CHARACTERS = 256
_SPACE = re.compile(r"\s*")
WORD = re.compile(r"[\w.-]+")
"""Letters, digits, points and dashes."""
_STRING = re.compile(rf'"(?:[^"\\]|\\.){{0,{MAX_NAME_CHARACTERS}}}"', re.DOTALL)


class NotACall(Exception):
    """Raised if the text being read is not a call."""


class CallSink(Protocol):
    def knows(self, name: str) -> bool:
        """Returns whether there is a tool of this name."""
        ...

    def types_of(self, name: str, key: str) -> frozenset[str]:
        """Returns the JSON types that an argument may have; empty if its schema names none."""
        ...

    def on_call(self, name: str, call_id: str = "") -> None:
        """Begins a call. `call_id`: the id that the model wrote; empty: none."""

    def on_arguments(self, piece: str) -> None:
        """Adds a piece of the arguments, as JSON."""

    def on_call_end(self) -> None: ...


class Feed:
    """A text that comes in pieces.

    Attributes:
        text: the text from `mark` on, and perhaps some before it.
        mark: index of the first character that was neither given out nor skipped.
        place: index of the first character that was not read yet.
        at_end: whether the text is complete.
    """

    def __init__(self) -> None:
        self.text = ""
        self.mark = self.place = 0
        self.at_end = False

    def add(self, piece: str) -> None:
        """Appends a piece, and drops the text before `mark`."""
        self.text = self.text[self.mark :] + piece
        self.place -= self.mark
        self.mark = 0

    def commit(self) -> None:
        """Moves `mark` to `place`: all text before `place` was given out or skipped."""
        self.mark = self.place

    def take(self, end: int) -> str:
        """Moves `place` to `end`, and returns the text that it passes."""
        piece = self.text[self.place : end]
        self.place = end
        return piece

    @property
    def pending(self) -> str:
        """The text between `mark` and `place`: read, and not given out yet."""
        return self.text[self.mark : self.place]

    def peek(self) -> Generator[None, None, str]:
        """Skips white space, and returns the next character without taking it; an empty text at the end."""
        while True:
            found = _SPACE.match(self.text, self.place)
            assert found is not None
            self.place = found.end()
            if self.place < len(self.text):
                return self.text[self.place]
            if self.at_end:
                return ""
            yield

    def expect(self, character: str) -> Generator[None, None, None]:
        """Skips white space and `character`; raises NotACall if another character comes."""
        if (yield from self.peek()) != character:
            raise NotACall
        self.place += 1

    def string(self) -> Generator[None, None, str]:
        """Skips white space, takes a short JSON string and returns its text; raises NotACall if there is none."""
        if (yield from self.peek()) != '"':
            raise NotACall
        while (found := _STRING.match(self.text, self.place)) is None:
            if self.at_end or len(self.text) - self.place > 2 * MAX_NAME_CHARACTERS:
                raise NotACall
            yield
        try:
            text = json.loads(found[0], strict=False)
        except ValueError:
            raise NotACall from None
        self.place = found.end()
        return text

    def name(self, ends: Markers) -> Generator[None, None, str]:
        """Takes a short text up to the next marker of `ends`, and returns it without surrounding white space.

        Raises NotACall if no marker comes within the length of a name.
        """
        while (found := ends.search(self.text, self.place, at_end=self.at_end)) is None:
            if self.at_end or len(self.text) - self.place > 2 * MAX_NAME_CHARACTERS:
                raise NotACall
            yield
        if found.start() - self.place > MAX_NAME_CHARACTERS:
            raise NotACall
        return self.take(found.start()).strip()

    def word(self, pattern: re.Pattern[str] = WORD) -> Generator[None, None, str]:
        """Skips white space, takes a short name that `pattern` matches and returns it; raises NotACall without one."""
        yield from self.peek()
        while True:
            found = pattern.match(self.text, self.place)
            end = found.end() if found else self.place
            if end == self.place or end - self.place > MAX_NAME_CHARACTERS:
                raise NotACall
            if end < len(self.text) or self.at_end:
                return self.take(end)
            yield

    def accepts(self, markers: Markers) -> Generator[None, None, str]:
        """Takes and returns the marker that stands at `place`; returns an empty text if none does."""
        while True:
            if found := markers.match(self.text, self.place, at_end=self.at_end):
                self.place = found.end()
                return found[0]
            is_open = self.place == len(self.text) or markers.may_become(self.text, self.place)
            if self.at_end or not is_open:
                return ""
            yield
