"""Writes the `id:` of a stream's events, which holds the positions of all choices, and reads `Last-Event-ID`.

    0:12:57,1:3:11f      choice 0 has 12 tokens and 57 bytes of text, choice 1 has ended

A last part `u` means that usage was sent. A choice without tokens has a `p` once its prompt's log probabilities were
sent.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.events import Delta, Event, Finished, PromptLogprobs
from blockyard.contract.request import Position
from blockyard.errors import BlockyardError, Violation, invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.fronts.openai.call_spec import CallSpec

# An id lists all choices. A call with more choices than this has events without ids, and is resumed from its beginning.
MAX_CHOICES = 64
_PLACE = re.compile(r"(\d{1,10}):(\d{1,10}):(\d{1,18})([fp]?)", re.ASCII)
_USAGE = "u"


class StreamPosition(NamedTuple):
    """The part of a stream that a client already has.

    Attributes:
        positions: the position in each choice, by the choice's number.
        prompts: numbers of choices whose prompt's log probabilities were sent.
        usage: whether usage was sent.
        has_begun: whether the client has any event with an id.
    """

    positions: Mapping[int, Position] = {}
    prompts: frozenset[int] = frozenset()
    usage: bool = False
    has_begun: bool = False

    def positions_of(self, number: int, n: int) -> dict[int, Position]:
        """Returns the positions in the sequences of the request `number`, each of which has `n` sequences."""
        return {choice - number * n: each for choice, each in self.positions.items() if choice // n == number}


def parse(text: str) -> StreamPosition:
    """Reads an event's id; raises BlockyardError FIELD_INVALID. An empty id means the stream's beginning."""
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
    """Tracks the position of a stream, of which the client may have a part already.

    Raises BlockyardError FIELD_INVALID if the client's position has a choice that the call lacks.
    """

    def __init__(self, call: CallSpec, known: StreamPosition) -> None:
        self._n = call.n
        self._known = known
        num_choices = call.n * len(call.requests)
        if any(number >= num_choices for number in known.positions):
            raise _wrong(f"has a choice that is not one of the call's {num_choices}")
        self._parts = [f"{number}:0:0" for number in range(num_choices)] if num_choices <= MAX_CHOICES else []

    def id(self, *, usage: bool = False) -> str:
        """Returns the id of the last event; an empty text if the stream has too many choices for ids."""
        return ",".join([*self._parts, _USAGE] if usage else self._parts)

    def take(self, prompt: int, event: Event) -> bool:
        """Takes the next event of the request number `prompt`; returns whether it is new to the client."""
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
