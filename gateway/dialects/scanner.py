"""Splits a streamed answer into text, reasoning and tool calls.

The output depends on the characters read so far, not on how they were split into pieces. Every character comes out,
except markers, a call's syntax around its name and arguments, and white space next to these. Text that cannot be parsed
comes out unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from gateway.dialects.dialect import Calls, Dialect, Span, Style
from gateway.dialects.feed import Feed, NotACall
from gateway.dialects.literal_calls import read_gemma, read_python
from gateway.dialects.markers import Markers, markers_of
from gateway.dialects.object_calls import read_headed, read_objects
from gateway.dialects.schemas import NO_TOOLS, read_schema, types_of
from gateway.dialects.tag_calls import read_tags

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping


# Each reader reads adjacent calls, beginning after their marker. It raises NotACall if there is no call or one is
# malformed: the rest is then text.
_READERS = {
    Style.OBJECT: read_objects,
    Style.HEADED: read_headed,
    Style.TAGS: read_tags,
    Style.PYTHONIC: read_python,
    Style.GEMMA: read_gemma,
}
_NO_SPAN = Span((), ())
# The first characters of a call without a marker.
_OPENERS = frozenset("{[")


class _Enough(NotACall):
    """Raised at the second call if the client only allows one."""


@dataclass(slots=True)
class CallPiece:
    """A piece of the call number `index`. The first piece has `name`, and `call_id` if the model wrote one."""

    index: int
    name: str = ""
    call_id: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Parts:
    """A piece of output, in this order: the rest of a call, reasoning, text, and calls that begin.

    `num_bytes_behind`: the UTF-8 bytes that were read beyond these parts; 0 for the last parts.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list[CallPiece])
    num_bytes_behind: int = 0

    @property
    def begins_call(self) -> bool:
        return bool(self.calls and self.calls[-1].name)


class TextKind(Enum):
    """The kind of a piece of an answer that needs no scanning."""

    TEXT = "text"
    REASONING = "reasoning"


class Scanner:
    """Reads one answer.

    Args:
        dialect: the model's dialect.
        tools: the schemas of the tools' parameters, as texts, by the tools' names; empty: calls are text.
        reasoning_is_open: whether the prompt ends with the marker that begins reasoning.
        one_call: whether everything after the first call is left out.

    Attributes:
        num_calls: the number of complete calls.
        num_invalid_calls: the number of texts that began like a call but were malformed or ended too early.
    """

    def __init__(
        self,
        dialect: Dialect,
        tools: Mapping[str, str] = NO_TOOLS,
        *,
        reasoning_is_open: bool = False,
        one_call: bool = False,
    ) -> None:
        self.num_calls = self.num_invalid_calls = 0
        self._reasoning = dialect.reasoning or _NO_SPAN
        self._calls = dialect.calls if tools else None
        self._tools = tools
        self._one_call = one_call
        self._begins_anywhere = self._reasoning.begins if dialect.reasons_anywhere else ()
        self._dropped = (*dialect.dropped, *(self._calls.dropped if self._calls else ()))
        self._feed = Feed()
        self._parts = Parts()
        # Finished parts of the piece that is being pushed; `_parts` follows them.
        self._before: list[Parts] = []
        # The number of calls that have begun; the last one may be incomplete.
        self._num_begun = 0
        # Whether the marker that ends the previous call is still expected.
        self._is_in_call = False
        # The kind of text being copied and the markers that end it; None while some text is held back.
        self._copied: tuple[TextKind, Markers] | None = None
        self._machine = self._run(reasoning_is_open=reasoning_is_open)

    def kind_of(self, text: str) -> TextKind | None:
        """Returns the kind of the next piece if all of it surely is of one kind; None if it must be pushed.

        Most pieces need no push.
        """
        copied = self._copied
        return copied[0] if copied is not None and copied[1].is_free(text) else None

    def push(self, text: str, *, is_last: bool = False) -> list[Parts]:
        """Takes the next piece of the answer, and returns the output that is now certain, in order.

        The last piece makes all output certain.
        """
        self._feed.add(text)
        next(self._machine, None)
        if is_last:
            self._finish()
        parts = [*self._before, self._parts]
        self._before, self._parts = [], Parts()
        return parts

    def _finish(self) -> None:
        """Handles the answer's end. The output that only the end makes certain comes as one piece.

        A client cannot resume within that piece.
        """
        if self._parts.begins_call:
            self._begin_parts()
        self._feed.at_end = True
        next(self._machine, None)
        if self._before and self._parts == Parts():
            self._parts = self._before.pop()
            self._parts.num_bytes_behind = 0

    # CallSink: the parsers of calls report here.

    def knows(self, name: str) -> bool:
        return name in self._tools

    def types_of(self, name: str, key: str) -> frozenset[str]:
        """Returns the JSON types that an argument may have; empty if its schema names none."""
        # Parse the schema only now: few answers need it.
        return types_of(read_schema(self._tools[name]), key)

    def on_call(self, name: str, call_id: str = "") -> None:
        if self._one_call and self.num_calls:
            raise _Enough
        self._parts.calls.append(CallPiece(self._num_begun, name, call_id))
        self._num_begun += 1
        self._feed.commit()

    def on_arguments(self, piece: str) -> None:
        self._feed.commit()
        calls = self._parts.calls
        if calls and calls[-1].index == self._num_begun - 1:
            calls[-1].arguments += piece
        elif piece:
            calls.append(CallPiece(self._num_begun - 1, arguments=piece))

    def on_call_end(self) -> None:
        self.num_calls += 1
        self._feed.commit()

    # The parser. Each generator yields when it needs more text.

    def _run(self, *, reasoning_is_open: bool) -> Generator[None, None, None]:
        if reasoning_is_open:
            yield from self._reason()
        is_start = True
        while not (self._one_call and self.num_calls):
            if is_start and (yield from self._starts_with(markers_of(*self._reasoning.begins))):
                self._feed.commit()
                yield from self._reason()
                continue
            if is_start and self._calls and (yield from self._starts_with(markers_of(*self._calls.starts))):
                yield from self._read_calls(self._calls)
            elif is_start and self._calls and self._calls.bare and (yield from self._feed.peek()) in _OPENERS:
                yield from self._read_calls(self._calls, is_marked=False)
            is_start, self._feed.place = False, self._feed.mark
            marker = yield from self._copy(self._find_markers(), TextKind.TEXT)
            if marker is None:
                return
            if marker in self._reasoning.begins:
                self._feed.commit()
                yield from self._reason()
            elif self._calls and marker in self._calls.begins:
                yield from self._read_calls(self._calls)
            else:
                self._is_in_call = self._is_in_call and marker in self._dropped
                yield from self._skip_space()
        while not self._feed.at_end:
            self._feed.place = len(self._feed.text)
            self._feed.commit()
            yield

    def _find_markers(self) -> Markers:
        calls = self._calls
        of_calls = (*calls.begins, *(calls.ends if self._is_in_call else ())) if calls else ()
        return markers_of(*self._dropped, *self._begins_anywhere, *of_calls)

    def _starts_with(self, markers: Markers) -> Generator[None, None, bool]:
        """Takes the next marker, after optional white space, and returns whether there is one."""
        yield from self._feed.peek()
        if (yield from self._feed.accepts(markers)):
            return True
        self._feed.place = self._feed.mark
        return False

    def _skip_space(self) -> Generator[None, None, None]:
        yield from self._feed.peek()
        self._feed.commit()

    def _reason(self) -> Generator[None, None, None]:
        yield from self._skip_space()
        yield from self._copy(markers_of(*self._reasoning.ends), TextKind.REASONING)
        yield from self._skip_space()

    def _copy(self, markers: Markers, kind: TextKind) -> Generator[None, None, str | None]:
        """Copies text up to a marker, without the white space before it, and returns the marker; None at the end."""
        feed = self._feed
        emit = self._on_text if kind is TextKind.TEXT else self._on_reasoning
        while (found := markers.search(feed.text, feed.place, at_end=feed.at_end)) is None:
            end = len(feed.text) if feed.at_end else markers.end_before(feed.text, feed.place)
            emit(feed.take(end))
            if feed.at_end:
                return None
            self._copied = (kind, markers) if end == len(feed.text) else None
            yield
            self._copied = None
        emit(feed.take(feed.place + len(feed.text[feed.place : found.start()].rstrip())))
        feed.place = found.end()
        return found[0]

    def _on_text(self, text: str) -> None:
        if text and self._parts.begins_call:
            self._begin_parts()
        self._parts.text += text
        self._feed.commit()

    def _on_reasoning(self, text: str) -> None:
        if text and (self._parts.text or self._parts.begins_call):
            self._begin_parts()
        self._parts.reasoning += text
        self._feed.commit()

    def _begin_parts(self) -> None:
        """Begins new parts, because the order within the present parts would put the next text too early."""
        if self._feed.at_end:
            return
        self._parts.num_bytes_behind = len(self._feed.text[self._feed.mark :].encode())
        self._before.append(self._parts)
        self._parts = Parts()

    def _read_calls(self, calls: Calls, *, is_marked: bool = True) -> Generator[None, None, None]:
        feed, num_begun = self._feed, self._num_begun
        try:
            yield from _READERS[calls.style](feed, calls, self)
        except _Enough:
            feed.commit()
        except NotACall:
            # Without a marker, a text in brackets need not have been meant as a call: do not count it as invalid.
            self.num_invalid_calls += is_marked or self._num_begun > num_begun
            if self._one_call and self.num_calls:
                feed.commit()
            self._on_text(feed.pending)
        else:
            yield from self._skip_space()
        self._is_in_call = self._num_begun > num_begun
