"""Reads calls whose arguments are Python or Gemma literals, and writes the arguments as JSON."""

from __future__ import annotations

import ast
import json
import re
from typing import TYPE_CHECKING

from gateway.dialects.feed import CallSink, Feed, NotACall
from gateway.dialects.markers import Markers, markers_of
from gateway.dialects.object_calls import read_header
from gateway.dialects.tag_calls import write_string

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from gateway.dialects.dialect import Calls

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_TOOL_NAME = re.compile(r"""[^\s()\[\]{}"',=]+""")
_SCALAR = re.compile(r"[^,)\]}]*")
_MAX_SCALAR_CHARACTERS = 4096
_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "\"'"}
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(rf"\\(?:x{_HEX}{{2}}|u{_HEX}{{4}}|U{_HEX}{{8}}|[0-7]{{1,3}}|.)", re.DOTALL)
# Later text cannot extend these escapes.
_CERTAIN_ESCAPE = re.compile(
    rf"\\(?:[^xuU0-7]|x(?:{_HEX}{{2}}|(?={_HEX}?[^0-9a-fA-F]))|u(?:{_HEX}{{4}}|(?={_HEX}{{0,3}}[^0-9a-fA-F]))"
    rf"|U(?:{_HEX}{{8}}|(?={_HEX}{{0,7}}[^0-9a-fA-F]))|[0-7]{{3}}|[0-7]{{1,2}}(?=[^0-7]))",
    re.DOTALL,
)
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"[-+]?[\d._eE+-]+")
_MAX_DEPTH = 32


def read_python(feed: Feed, calls: Calls, sink: CallSink) -> Generator[None, None, None]:
    """Reads a list of calls, `[f(x=1), g()]`, or calls in a row without brackets."""
    is_list = (yield from feed.peek()) == "["
    feed.place += is_list
    while True:
        name = yield from feed.word(_TOOL_NAME)
        yield from feed.expect("(")
        if not sink.knows(name):
            raise NotACall
        sink.on_call(name)
        yield from _Literals(feed, sink.on_arguments, None).members("=", ")")
        sink.on_call_end()
        character = yield from feed.peek()
        if is_list and character == "]":
            feed.place += 1
            return
        if is_list:
            yield from feed.expect(",")
        elif not character.isidentifier():
            return


def read_gemma(feed: Feed, calls: Calls, sink: CallSink) -> Generator[None, None, None]:
    """Reads a call's header and an object with bare keys."""
    yield from read_header(feed, calls, sink)
    feed.place += 1
    yield from _Literals(feed, sink.on_arguments, markers_of(calls.quote)).members(":", "}")
    sink.on_call_end()


class _Literals:
    """Writes literals as JSON. `quotes`: the markers around texts; None: Python's quotes.

    A piece is given out only after all text that determines it was read, since it cannot be withdrawn.
    """

    def __init__(self, feed: Feed, emit: Callable[[str], None], quotes: Markers | None) -> None:
        self._feed = feed
        self._emit = emit
        self._quotes = quotes
        self._depth = 0
        # Text to release before the next piece.
        self._waiting = ""

    def _tell(self, text: str) -> None:
        self._emit(self._waiting + text)
        self._waiting = ""

    def members(self, equals: str, close: str) -> Generator[None, None, None]:
        """Writes keys and values up to the `close` bracket as a JSON object."""
        yield from self._sequence("{}", close, lambda: self._member(equals))

    def _sequence(
        self, brackets: str, close: str, item: Callable[[], Generator[None, None, None]]
    ) -> Generator[None, None, None]:
        self._tell(brackets[0])
        is_first = True
        while (character := (yield from self._feed.peek())) != close:
            if character == "," and not is_first:
                self._feed.place += 1
                self._tell("")
                continue
            if not is_first:
                self._waiting += ", "
            is_first = False
            yield from item()
        self._feed.place += 1
        self._tell(brackets[1])

    def _member(self, equals: str) -> Generator[None, None, None]:
        character = yield from self._feed.peek()
        key = ""
        if not (yield from self._string(character)):
            key = write_string((yield from self._feed.word()))
        yield from self._feed.expect(equals)
        self._tell(f"{key}: ")
        yield from self.value()

    def value(self) -> Generator[None, None, None]:
        """Writes one value as JSON. Raises NotACall for a text that is not a value."""
        character = yield from self._feed.peek()
        if self._depth == _MAX_DEPTH:
            raise NotACall
        self._depth += 1
        if character in ("[", "("):
            self._feed.place += 1
            yield from self._sequence("[]", "]" if character == "[" else ")", self.value)
        elif character == "{":
            self._feed.place += 1
            yield from self.members(":", "}")
        elif not (yield from self._string(character)):
            yield from self._scalar()
        self._depth -= 1

    def _scalar(self) -> Generator[None, None, None]:
        feed = self._feed
        while True:
            found = _SCALAR.match(feed.text, feed.place)
            assert found is not None
            if found.end() - feed.place > _MAX_SCALAR_CHARACTERS:
                raise NotACall
            if found.end() < len(feed.text) or feed.at_end:
                break
            yield
        text = feed.text[feed.place : found.end()].strip()
        self._waiting += _WORDS.get(text) or _number(text) or self._bare(text)
        feed.place = found.end()
        if feed.at_end and feed.place == len(feed.text):
            self._tell("")

    def _bare(self, text: str) -> str:
        if self._quotes is None or not text:
            raise NotACall
        return write_string(text)

    def _string(self, first: str) -> Generator[None, None, bool]:
        """Writes a quoted text as a JSON string if one begins here; returns whether one does."""
        if self._quotes is not None:
            if not (yield from self._feed.accepts(self._quotes)):
                return False
            self._tell('"')
            yield from self._copy_marked(self._quotes)
        else:
            if first not in _PLAIN:
                return False
            self._feed.place += 1
            self._tell('"')
            yield from self._copy_quoted(first)
        self._tell('"')
        return True

    def _copy_marked(self, quotes: Markers) -> Generator[None, None, None]:
        feed = self._feed
        while (found := quotes.search(feed.text, feed.place, at_end=feed.at_end)) is None:
            self._tell(write_string(feed.take(len(feed.text) - quotes.num_held(feed.text, feed.place)))[1:-1])
            if feed.at_end:
                raise NotACall
            yield
        self._tell(write_string(feed.take(found.start()))[1:-1])
        feed.place = found.end()

    def _copy_quoted(self, quote: str) -> Generator[None, None, None]:
        feed = self._feed
        while True:
            found = _PLAIN[quote].match(feed.text, feed.place)
            assert found is not None
            self._tell(write_string(feed.take(found.end()))[1:-1])
            if feed.text.startswith(quote, feed.place):
                feed.place += 1
                return
            escape = (_ESCAPE if feed.at_end else _CERTAIN_ESCAPE).match(feed.text, feed.place)
            if escape is None:
                if feed.at_end:
                    raise NotACall
                yield
                continue
            feed.place = escape.end()
            self._tell(_unescape(escape[0]))


def _number(text: str) -> str | None:
    """Returns a number as JSON, unchanged if it is JSON already; None for a text that is not a number."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    try:
        return json.dumps(ast.literal_eval(text), allow_nan=False) if _PYTHON_NUMBER.fullmatch(text) else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        # For example, thousands of signs before a number nest too deep for Python's parser.
        return None


def _unescape(escape: str) -> str:
    try:
        text = ast.literal_eval(f"'{escape}'") if escape != "\\'" else "'"
    except (ValueError, SyntaxError):
        text = escape
    # Half a surrogate pair can only be written as an escape; two adjacent escapes make the character again.
    is_half = "\ud800" <= text[:1] <= "\udfff"
    return json.dumps(text)[1:-1] if is_half else write_string(text)[1:-1]
