"""Reads an answer in given pieces, and joins what comes out."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from gateway.dialects.scanner import Parts, Scanner, TextKind
from gateway.dialects.table import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_TYPES = {"text": "string", "num": "number", "flag": "boolean", "obj": "object", "maybe": ["string", "null"]}
_SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in _TYPES.items()}}
TOOLS: Mapping[str, str] = {"f": json.dumps(_SCHEMA), "g": ""}


class Read(NamedTuple):
    """What came out of an answer. `calls`: name, id and arguments of each; `order`: the kinds, one after another."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]
    num_calls: int
    num_invalid: int
    order: tuple[str, ...]


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    """Cuts a text at these places."""
    places = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


class Reading:
    """Reads an answer and joins what comes out."""

    def __init__(
        self,
        dialect: str,
        *,
        tools: Mapping[str, str] = TOOLS,
        is_open: bool = False,
        one_call: bool = False,
    ) -> None:
        self._scanner = Scanner(BY_NAME[dialect], tools, reasoning_is_open=is_open, one_call=one_call)
        self._text = self._reasoning = ""
        self._calls: list[tuple[str, str, str]] = []
        self._order: list[str] = []

    def push(self, piece: str, *, is_last: bool = False) -> Read:
        """Reads on, and returns all that came out so far."""
        scanner = self._scanner
        if is_last or (kind := scanner.kind_of(piece)) is None:
            for parts in scanner.push(piece, is_last=is_last):
                self._take(parts)
        else:
            self._take(Parts(piece) if kind is TextKind.TEXT else Parts(reasoning=piece))
        return Read(
            self._text,
            self._reasoning,
            tuple(self._calls),
            scanner.num_calls,
            scanner.num_invalid_calls,
            tuple(self._order),
        )

    def _take(self, parts: Parts) -> None:
        self._text, self._reasoning = self._text + parts.text, self._reasoning + parts.reasoning
        calls = self._calls
        kinds = [kind for kind in ("reasoning", "text") if getattr(parts, kind)]
        kinds += [f"call {call.index}" for call in parts.calls if call.name]
        self._order += kinds[1:] if kinds[:1] == self._order[-1:] else kinds
        for call in parts.calls:
            if call.name:
                assert call.index == len(calls), "a call begins before the one before it"
                calls.append((call.name, call.call_id, call.arguments))
            else:
                name, call_id, arguments = calls[call.index]
                calls[call.index] = (name, call_id, arguments + call.arguments)


def read(dialect: str, pieces: Sequence[str], **options: Any) -> Read:
    """Reads an answer to its end."""
    reading = Reading(dialect, **options)
    for piece in pieces[:-1]:
        reading.push(piece)
    return reading.push(pieces[-1], is_last=True)


def payload(text: str) -> Counter[str]:
    """Characters that stand in no marker and in no frame of a call."""
    return Counter(character for character in text if character > "\u2fff" and character not in "｜")


def told(read: Read) -> str:
    """All characters that came out."""
    return "".join((read.text, read.reasoning, *(name + arguments for name, _, arguments in read.calls)))


def misplaced(dialect: str, answer: str) -> str | None:
    """Finds a beginning of an answer, where some parts end of those that come at once, of which others come out."""
    whole, raw = Scanner(BY_NAME[dialect], TOOLS).push(answer, is_last=True), answer.encode()
    for number, parts in enumerate(whole[:-1], 1):
        beginning = raw[: len(raw) - parts.num_bytes_behind].decode()
        if _joined(Scanner(BY_NAME[dialect], TOOLS).push(beginning)) != _joined(whole[:number]):
            return beginning
    return None


def _joined(parts: Sequence[Parts]) -> tuple[str, str, dict[int, str]]:
    calls: defaultdict[int, str] = defaultdict(str)
    for call in itertools.chain.from_iterable(each.calls for each in parts):
        calls[call.index] += call.name + call.arguments
    return "".join(each.text for each in parts), "".join(each.reasoning for each in parts), calls
