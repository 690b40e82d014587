"""Writes the `id:` of a stream's events, which holds the positions of all choices, and reads `Last-Event-ID`.

    0:12:57:9ae16a3b,1:3:11:352441c2f      choice 0 has 12 tokens and 57 bytes of text, choice 1 has ended

A last part `u` means that usage was sent. A choice without tokens has a `p` once its prompt's log probabilities were
sent. The number after the bytes is a checksum of the tokens: an answer that no server remembers is generated again, and
if the weights or the workers have changed meanwhile, it does not continue the part that the client has.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from blockyard.contract.events import Delta, Event, Finished, PromptLogprobs
from blockyard.contract.request import Position
from blockyard.errors import BlockyardError, Violation, invalid
from gateway.live.continuation import make_changed_error

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Mapping

    from gateway.fronts.openai.call_spec import CallSpec

# An id lists all choices. A call with more choices than this has events without ids, and is resumed from its beginning.
MAX_CHOICES = 64
_PLACE = re.compile(r"(\d{1,10}):(\d{1,10}):(\d{1,18})(?::([0-9a-f]{8}))?([fp]?)", re.ASCII)
_USAGE = "u"
# The beginnings of the fields of errors about a position: of the gateway's core, and of this front.
_FIELDS = ("positions", "Last-Event-ID")


class StreamPosition(NamedTuple):
    """The part of a stream that a client already has.

    Attributes:
        positions: the position in each choice, by the choice's number.
        prompts: numbers of choices whose prompt's log probabilities were sent.
        usage: whether usage was sent.
        has_begun: whether the client has any event with an id.
        checksums: a checksum of the tokens that the client has of each choice.
    """

    positions: Mapping[int, Position] = {}
    prompts: frozenset[int] = frozenset()
    usage: bool = False
    has_begun: bool = False
    checksums: Mapping[int, str] = {}

    def positions_of(self, number: int, n: int) -> dict[int, Position]:
        """Returns the positions in the sequences of the request `number`, each of which has `n` sequences."""
        return {choice - number * n: each for choice, each in self.positions.items() if choice // n == number}

    def explain(self, error: BlockyardError) -> BlockyardError:
        """Returns the error for a position that was once in the answer and is not any more, or the error as it is."""
        is_of_position = any(violation.field.startswith(_FIELDS) for violation in error.violations)
        return make_changed_error() if self.checksums and is_of_position else error


def parse(text: str) -> StreamPosition:
    """Reads an event's id; raises BlockyardError FIELD_INVALID. An empty id means the stream's beginning."""
    positions: dict[int, Position] = {}
    prompts: set[int] = set()
    checksums: dict[int, str] = {}
    parts = text.split(",") if text else []
    usage = parts[-1:] == [_USAGE]
    for part in parts[: len(parts) - usage]:
        match = _PLACE.fullmatch(part)
        if match is None or int(match[1]) in positions:
            raise _wrong("is not the id of an event of this stream")
        position = Position(int(match[2]), int(match[3]), finished=match[5] == "f")
        positions[int(match[1])] = position
        if match[4]:
            checksums[int(match[1])] = match[4]
        if match[5] or position.num_tokens:
            prompts.add(int(match[1]))
    return StreamPosition(positions, frozenset(prompts), usage, bool(parts), checksums)


def _wrong(description: str) -> BlockyardError:
    return invalid([Violation("Last-Event-ID", description)])


class StreamTracker:
    """Tracks the position of a stream, of which the client may have a part already.

    Args:
        call: the call of the stream.
        known: the part that the client has.
        find_token_ids: returns all token ids of a sequence so far, by the numbers of its request and of its index.

    Raises BlockyardError FIELD_INVALID if the client's position has a choice that the call lacks.
    """

    def __init__(self, call: CallSpec, known: StreamPosition, find_token_ids: Callable[[int, int], array[int]]) -> None:
        self._n = call.n
        self._known = known
        self._find_token_ids = find_token_ids
        self._unchecked = dict(known.checksums)
        # How many tokens of each choice were sent, and their checksum.
        self._sums: dict[int, tuple[int, int]] = {}
        num_choices = call.n * len(call.requests)
        if any(number >= num_choices for number in known.positions):
            raise _wrong(f"has a choice that is not one of the call's {num_choices}")
        self._parts = [f"{number}:0:0" for number in range(num_choices)] if num_choices <= MAX_CHOICES else []

    def id(self, *, usage: bool = False) -> str:
        """Returns the id of the last event; an empty text if the stream has too many choices for ids."""
        return ",".join([*self._parts, _USAGE] if usage else self._parts)

    def take(self, prompt: int, event: Event) -> bool:
        """Takes the next event of the request number `prompt`; returns whether it is new to the client.

        Raises BlockyardError REQUEST_EXPIRED if the client has other tokens before it.
        """
        if isinstance(event, Delta):
            number = prompt * self._n + event.index
            known = self._known.positions.get(number)
            self._check(number, event, known)
            checksum = self._sum(number, event) if self._parts else ""
            self._note(number, f"{number}:{event.num_tokens}:{event.num_text_bytes}:{checksum}")
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

    def _check(self, number: int, event: Delta, known: Position | None) -> None:
        """Compares the tokens that the client has with the answer's, once they are there."""
        if known is not None and event.num_tokens >= known.num_tokens and number in self._unchecked:
            token_ids = self._find_token_ids(*divmod(number, self._n))[: known.num_tokens]
            if self._unchecked.pop(number) != f"{crc32(token_ids.tobytes()):08x}":
                raise make_changed_error()

    def _sum(self, number: int, event: Delta) -> str:
        num_tokens, checksum = self._sums.get(number, (0, 0))
        token_ids = self._find_token_ids(*divmod(number, self._n))[num_tokens : event.num_tokens]
        checksum = crc32(token_ids.tobytes(), checksum)
        self._sums[number] = (event.num_tokens, checksum)
        return f"{checksum:08x}"

    def _note(self, number: int, part: str) -> None:
        if self._parts:
            self._parts[number] = part
