"""Divides an answer into a list of parts: reasoning, text and tool calls.

For APIs whose answers are lists of parts. A part ends where another kind of output or another call begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.contract.events import Delta


class PartKind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True, eq=False)
class Part:
    """A part of an answer.

    Attributes:
        number: the part's index, from 0.
        kind: the part's kind.
        call_id, name: the id and the tool's name of a call.
        pieces: the part's text so far; for a call, its arguments.
    """

    number: int
    kind: PartKind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list[str])

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Opened(NamedTuple):
    """A part begins."""

    part: Part


class Grown(NamedTuple):
    """A part gets another piece."""

    part: Part
    piece: str


class Closed(NamedTuple):
    """A part is complete."""

    part: Part


Step = Opened | Grown | Closed


class AnswerParts:
    """Collects the parts of one sequence.

    Except for the pieces of `Grown`, the steps do not depend on how the answer was split into deltas.

    Attributes:
        parts: the parts so far, in order.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if part.kind is PartKind.REASONING)

    def add(self, delta: Delta) -> Iterator[Step]:
        """Takes a delta, whose order is: the rest of a call, reasoning, text, new calls."""
        calls = list(delta.tool_calls)
        if calls and not calls[0].name:
            yield from self._grow(PartKind.CALL, calls.pop(0).arguments)
        if delta.reasoning_text:
            yield from self._grow(PartKind.REASONING, delta.reasoning_text)
        if delta.text:
            yield from self._grow(PartKind.TEXT, delta.text)
        for call in calls:
            yield from self._begin(Part(len(self.parts), PartKind.CALL, call.id, call.name))
            if call.arguments:
                yield from self._grow(PartKind.CALL, call.arguments)

    def end(self) -> Iterator[Step]:
        yield from self._close()

    def _grow(self, kind: PartKind, piece: str) -> Iterator[Step]:
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(Part(len(self.parts), kind))
        assert self._open is not None
        self._open.pieces.append(piece)
        yield Grown(self._open, piece)

    def _begin(self, part: Part) -> Iterator[Step]:
        yield from self._close()
        self._open = part
        self.parts.append(part)
        yield Opened(part)

    def _close(self) -> Iterator[Step]:
        if self._open is not None:
            part, self._open = self._open, None
            yield Closed(part)
