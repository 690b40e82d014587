"""Reads an answer in given pieces, and joins what comes out."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from gateway.dialects.scanner import Scanner
from gateway.dialects.table import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

TOOLS = ("f", "g", "get_weather")


class Read(NamedTuple):
    """What came out of an answer. `calls`: name, id and arguments of each."""

    text: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]
    num_calls: int
    num_invalid: int


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    """Cuts a text at these places."""
    places = [0, *sorted(cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


def read(
    dialect: str,
    pieces: Sequence[str],
    *,
    tools: Sequence[str] = TOOLS,
    is_open: bool = False,
    one_call: bool = False,
    ends: bool = True,
) -> Read:
    """Reads an answer; `ends`: to its end."""
    scanner = Scanner(BY_NAME[dialect], tools, reasoning_is_open=is_open, one_call=one_call)
    text = reasoning = ""
    calls: list[tuple[str, str, str]] = []
    for number, piece in enumerate(pieces):
        parts = scanner.push(piece, is_last=ends and number == len(pieces) - 1)
        text, reasoning = text + parts.text, reasoning + parts.reasoning
        for call in parts.calls:
            if call.name:
                assert call.index == len(calls), "a call begins before the one before it"
                calls.append((call.name, call.call_id, call.arguments))
            else:
                name, call_id, arguments = calls[call.index]
                calls[call.index] = (name, call_id, arguments + call.arguments)
    return Read(text, reasoning, tuple(calls), scanner.num_calls, scanner.num_invalid_calls)
