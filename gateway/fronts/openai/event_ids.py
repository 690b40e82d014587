"""Writes the `id:` of a stream's events, which says how far all choices have come, and reads `Last-Event-ID`.

    0:12:57,1:3:11f      choice 0 has 12 tokens and 57 bytes of text, choice 1 has ended; `u` at the end: usage was sent

A choice at its beginning has a `p` if its prompt's log probabilities were sent.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.events import Delta, Finished, PromptLogprobs
from blockyard.contract.request import Position
from blockyard.errors import BlockyardError, Violation, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.contract.events import Event
    from gateway.fronts.openai.call_spec import CallSpec

# A call with more choices has events without ids, and is resumed from its beginning: an id names them all.
MAX_CHOICES = 64
_PLACE = re.compile(r"(\d{1,10}):(\d{1,10}):(\d{1,18})([fp]?)", re.ASCII)
_USAGE = "u"


class StreamPosition(NamedTuple):
    """The part of a stream that a client has: of each choice, and of the rest. `has_begun`: whether it has any."""

    positions: Mapping[int, Position] = {}
    prompts: frozenset[int] = frozenset()
    usage: bool = False
    has_begun: bool = False

    def positions_of(self, number: int, n: int) -> dict[int, Position]:
        """Returns the positions of the sequences of one of the call's requests."""
        return {choice - number * n: each for choice, each in self.positions.items() if choice // n == number}


def parse(text: str) -> StreamPosition:
    """Reads an id; raises BlockyardError FIELD_INVALID. An empty one is the beginning."""
    positions: dict[int, Position] = {}
    prompts: set[int] = set()
    parts = text.split(",") if text else []
    usage = parts[-1:] == [_USAGE]
    for part in parts[: len(parts) - usage]:
        match = _PLACE.fullmatch(part)
        if match is None or int(match[1]) in positions:
            raise _wrong("is not the id of an event of this stream")
        position = Position(int(match[2]), int(match[3]), finished=match[4] == "f")
        positions[int(match[1])] = position
        if match[4] or position.num_tokens:
            prompts.add(int(match[1]))
    return StreamPosition(positions, frozenset(prompts), usage, bool(parts))


def _wrong(description: str) -> BlockyardError:
    return invalid([Violation("Last-Event-ID", description)])


class StreamTracker:
    """Follows a stream of which the client may have a part already.

    Raises BlockyardError FIELD_INVALID for choices that the call has not.
    """

    def __init__(self, call: CallSpec, known: StreamPosition) -> None:
        self._n = call.n
        self._known = known
        num_choices = call.n * len(call.requests)
        if any(number >= num_choices for number in known.positions):
            raise _wrong(f"has a choice that is not one of the call's {num_choices}")
        self._parts = [f"{number}:0:0" for number in range(num_choices)] if num_choices <= MAX_CHOICES else []

    def id(self, *, usage: bool = False) -> str:
        """Returns the id of the last event; empty where the stream has none."""
        return ",".join([*self._parts, _USAGE] if usage else self._parts)

    def take(self, prompt: int, event: Event) -> bool:
        """Follows an event of the request number `prompt`; returns whether it is new to the client."""
        if isinstance(event, Delta):
            number = prompt * self._n + event.index
            self._note(number, f"{number}:{event.num_tokens}:{event.num_text_bytes}")
            known = self._known.positions.get(number)
            return known is None or (event.num_tokens, event.num_text_bytes) > (known.num_tokens, known.num_text_bytes)
        if isinstance(event, Finished):
            number = prompt * self._n + event.index
            self._note(number, self._parts[number] + "f" if self._parts else "")
            known = self._known.positions.get(number)
            return known is None or not known.finished
        if isinstance(event, PromptLogprobs):
            numbers = range(prompt * self._n, (prompt + 1) * self._n)
            for number in numbers:
                self._note(number, f"{number}:0:0p")
            return self._known.prompts.isdisjoint(numbers)
        return True

    def _note(self, number: int, part: str) -> None:
        if self._parts:
            self._parts[number] = part
