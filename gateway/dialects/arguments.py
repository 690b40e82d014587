"""Finds where a JSON value ends in a text that comes in pieces.

The value's text is passed on unchanged; it is never serialized again.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache

from gateway.dialects.markers import markers_of

_IN_STRING = re.compile(r'\\(?:.|\Z)|"', re.DOTALL)
_SCALAR = re.compile(r"[^,}\]\s]*")
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = rf"\\u[dD][89abAB]{_HEX}{{2}}", rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE = re.compile(rf"{_HIGH}{_LOW}|\\u{_HEX}{{4}}|\\[^u]", re.DOTALL)
# Text that later text cannot change: it ends neither in half a surrogate pair nor in half an escape.
_CERTAIN = re.compile(
    rf"(?:[^\\]+|{_HIGH}{_LOW}|{_HIGH}(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])|\\u(?![dD][89abAB]){_HEX}{{4}}"
    rf"|\\[^u]|\\u(?={_HEX}{{0,3}}[^0-9a-fA-F]))*",
    re.DOTALL,
)
_HALF_PAIR = re.compile("[\ud800-\udfff]")


@lru_cache(64)
def _structure(ends: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(['["{}\\[\\]]', *map(re.escape, ends)]))


class JsonValue:
    """Reads one JSON value.

    Args:
        first: the value's first character.
        ends: markers that end an incomplete value if they stand outside of its strings.

    Attributes:
        is_whole: whether the complete value was read.
        is_broken: whether a marker or the text's end came before the value was complete.
    """

    def __init__(self, first: str, ends: tuple[str, ...] = ()) -> None:
        self.is_whole = self.is_broken = False
        self._structure = _structure(ends)
        self._ends = markers_of(*ends)
        self._depth = 0
        self._in_string = False
        self._is_scalar = first not in '{["'

    def skip_quote(self) -> None:
        """Notes that the caller has read the opening quote of a string."""
        self._in_string = True

    def read(self, text: str, start: int, *, at_end: bool = False) -> int:
        """Reads on from `start`, and returns the index up to which the text surely belongs to the value."""
        if self._is_scalar:
            return self._read_scalar(text, start, at_end=at_end)
        place = start
        while not (self.is_whole or self.is_broken):
            found = (_IN_STRING if self._in_string else self._structure).search(text, place)
            if found is None:
                place = len(text) - (0 if self._in_string or at_end else self._ends.num_held(text, place))
                break
            if found[0] == "\\" and not at_end:
                # The text ends within an escape.
                return found.start()
            place = self._take(found)
        if at_end and not self.is_whole:
            self.is_broken = True
        return place

    def _take(self, found: re.Match[str]) -> int:
        match found[0]:
            case '"':
                self._in_string = not self._in_string
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
            case _:
                if not self._in_string:
                    self.is_broken = True
                    return found.start()
        self.is_whole = not (self._in_string or self._depth)
        return found.end()

    def _read_scalar(self, text: str, start: int, *, at_end: bool) -> int:
        found = _SCALAR.match(text, start)
        assert found is not None
        self.is_whole = at_end or found.end() < len(text)
        return found.end()


class TextOfString:
    """Unescapes a JSON string that comes in pieces, without its quotes."""

    def __init__(self) -> None:
        self._rest = ""

    def push(self, piece: str) -> str:
        """Takes more of the string's content, in complete escapes, and returns the text that is certain."""
        self._rest += piece
        found = _CERTAIN.match(self._rest)
        assert found is not None
        self._rest = self._rest[found.end() :]
        return _unescape(found[0])

    def flush(self) -> str:
        rest, self._rest = self._rest, ""
        return _unescape(rest)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(_character, text)


def _character(escape: re.Match[str]) -> str:
    try:
        return _HALF_PAIR.sub("\ufffd", json.loads(f'"{escape[0]}"', strict=False))
    except ValueError:
        # Not a JSON escape: leave it unchanged.
        return escape[0]
