"""Reads the events of one request from a position on. Knows neither messages nor the scheduler."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from blockyard.contract.events import Delta, Event, Finished, Recovered
from blockyard.contract.request import Position
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from gateway.codec import state as state_codec
from gateway.dialects.scanner import TextKind
from gateway.live.answer import Place, SequenceAnswer
from gateway.live.continuation import make_changed_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.dialects.answer_parser import AnswerParser
    from gateway.live.request_state import RequestState
    from gateway.request import GenerationRequest

_START = Position()


class ReaderEvents(Protocol):
    """Receives notice of the stop strings that a reader finds, and of the reader's end."""

    def on_stop_string(self, state: RequestState, answer: SequenceAnswer) -> None:
        """Called when a stop string has ended an answer."""

    def on_reader_closed(self, reader: Reader) -> None: ...


class _Cursor:
    """The position of a reader in one sequence's answer.

    A parsed answer is always parsed from its beginning, even if reading begins later, since the output at a position
    depends on all text before it.

    Attributes:
        unchecked: the position at which reading begins, until the answer has reached it; then None.
        known: the tokens before that position, if the client sent them.
        repeats: whether the part before that position is read too.
        pause: a position at which a delta must end; None: none.
    """

    __slots__ = (
        "answer",
        "is_done",
        "known",
        "num_text_bytes",
        "num_tokens",
        "parser",
        "pause",
        "repeats",
        "unchecked",
    )

    def __init__(self, answer: SequenceAnswer, position: Position, *, replay: bool) -> None:
        place = Place(position.num_tokens, position.num_text_bytes)
        self.answer = answer
        self.is_done = False
        self.parser = answer.make_parser()
        self.unchecked = place if place > (0, 0) else None
        self.known = array("I", position.token_ids)
        self.repeats = replay
        starts = replay or self.parser is not None
        self.num_tokens, self.num_text_bytes = (0, 0) if starts else place
        self.pause = self.unchecked if starts else None

    def take(self, until: Place | None = None) -> list[Delta]:
        """Returns the next deltas, up to `until` or to the end. Only a parsed answer may have several."""
        delta = self.answer.delta_after(self.num_tokens, self.num_text_bytes, until)
        if until is not None:
            self.num_tokens, self.num_text_bytes = until
        elif delta is not None:
            self.num_tokens, self.num_text_bytes = delta.num_tokens, delta.num_text_bytes
        if self.parser is not None:
            return self._parse(self.parser, delta)
        return [] if delta is None else [delta]

    def take_repeats(self) -> list[Delta]:
        """Passes the position at which reading begins; returns the deltas before it for a replay, else none."""
        deltas = self.take(self.pause) if self.pause else []
        return deltas if self.repeats else []

    def _parse(self, parser: AnswerParser, delta: Delta | None) -> list[Delta]:
        """Parses a delta, and flushes the parser at the end. The first of several deltas has the tokens."""
        answer = self.answer
        if delta is None:
            if answer.ended is None:
                return []
            delta = Delta(answer.index, "", (), self.num_tokens, self.num_text_bytes)
        elif answer.ended is None and (kind := parser.kind_of(delta.text)) is not None:
            if kind is TextKind.REASONING:
                delta.text, delta.reasoning_text = "", delta.text
            return [delta]
        is_last = answer.ended is not None and delta.num_text_bytes == len(answer.text)
        # Flush held-back text with the last token, so that a client that resumes behind it misses nothing.
        is_last = is_last and (self.pause is None or delta.num_tokens == answer.num_tokens)
        pieces = parser.push(delta.text, is_last=is_last)
        if not (any(pieces[0]) or delta.token_ids or delta.logprobs):
            return []
        num_tokens = answer.num_tokens if is_last else delta.num_tokens
        deltas = [
            Delta(
                answer.index,
                piece.text,
                (),
                num_tokens,
                delta.num_text_bytes - piece.num_bytes_behind,
                reasoning_text=piece.reasoning,
                tool_calls=piece.calls,
            )
            for piece in pieces
        ]
        deltas[0].token_ids, deltas[0].logprobs = delta.token_ids, delta.logprobs
        return deltas

    def check(self) -> bool:
        """Returns whether the answer has reached the position at which reading begins, and records it.

        Raises BlockyardError: FIELD_INVALID if the answer can never reach it; REQUEST_EXPIRED if the client has other
        tokens.
        """
        is_there = self.look()
        if is_there:
            self.unchecked = None
        return is_there

    def look(self) -> bool:
        """Returns the result of `check` without recording it."""
        place, answer = self.unchecked, self.answer
        assert place is not None
        is_behind = answer.num_tokens < place.num_tokens or len(answer.text) < place.num_text_bytes
        # Text without a new token only comes at the end of an answer.
        if is_behind and answer.ended is None and answer.num_tokens <= place.num_tokens:
            return False
        num_tokens = min(len(self.known), answer.num_tokens)
        if answer.token_ids[:num_tokens] != self.known[:num_tokens]:
            raise make_changed_error()
        if answer.num_tokens < place.num_tokens:
            raise _wrong(
                answer, "num_tokens", f"is {place.num_tokens}, and the sequence has {answer.num_tokens} tokens"
            )
        if is_behind:
            raise _wrong(
                answer, "num_text_bytes", f"is {place.num_text_bytes}, more than the text of num_tokens tokens has"
            )
        if answer.text[place.num_text_bytes : place.num_text_bytes + 1].startswith(_CONTINUATIONS):
            raise _wrong(answer, "num_text_bytes", f"is {place.num_text_bytes}, which is within a character")
        return True


# Continuation bytes of UTF-8.
_CONTINUATIONS = tuple(bytes([byte]) for byte in range(0x80, 0xC0))


def _wrong(answer: SequenceAnswer, field: str, description: str) -> BlockyardError:
    return invalid([Violation(f"positions[{answer.index}].{field}", description)])


class Reader:
    """Reads one request's events with `async for`, from the given positions on.

    The events are Accepted, then PromptLogprobs if requested, then Delta and one Finished for each sequence. Recovered
    comes when the request has survived a failure.

    Reading raises BlockyardError if the request fails or is cancelled (CLIENT_CANCELLED), after all earlier events. If
    every sequence has failed on its own, it raises after the last Finished. A front that answers with a status line
    awaits Accepted first (`await anext(reader)`), since the scheduler may refuse the request. The caller that started
    the reader must call `aclose`. Only one task may read.

    Args:
        state: the request's state.
        owner: receives notice of stop strings and of the reader's end.
        positions: the client's positions, by the sequence's index.
        replay: whether to read the part before the positions again, in deltas that end at the positions.

    Attributes:
        is_patient: whether tokens do not wake the reader.
    """

    def __init__(
        self, state: RequestState, owner: ReaderEvents, positions: Mapping[int, Position], *, replay: bool = False
    ) -> None:
        self.state = state
        self.is_patient = False
        self._owner = owner
        self._cursors = [
            _Cursor(answer, positions.get(answer.index, _START), replay=replay)
            for answer in state.answers
            if replay or not positions.get(answer.index, _START).finished
        ]
        self._has_begun = False
        has_text = any(position.num_tokens or position.num_text_bytes for position in positions.values())
        self._prompt = None if has_text and not replay else state.prompt
        self._events: deque[Event] = deque()
        self._error: BlockyardError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = True

    @property
    def request_id(self) -> str:
        return self.state.origin.accepted.request_id

    @property
    def failure(self) -> BlockyardError | None:
        """The error that reading raises at the end if every sequence has failed on its own; else None."""
        return self.state.failure

    @property
    def has_ended(self) -> bool:
        """Whether all sequences have ended, so that the whole answer can be read without waiting."""
        return self.state.has_ended

    @property
    def request(self) -> GenerationRequest:
        """The original request, with its prompt as ids and its defaults filled in."""
        return state_codec.request_of(self.state.submission)

    @property
    def front_state(self) -> bytes:
        """The bytes that the front stored with the request."""
        return self.state.origin.front_state

    def find_token_ids(self, index: int) -> array[int]:
        """Returns all token ids of a sequence so far."""
        return self.state.answers[index].token_ids

    def check(self) -> None:
        """Raises BlockyardError FIELD_INVALID for positions that the answer cannot have."""
        for cursor in self._cursors:
            if cursor.unchecked is None:
                continue
            if cursor.answer.advance():
                self._owner.on_stop_string(self.state, cursor.answer)
            cursor.look()

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> Event:
        while True:
            if self._events:
                return self._events.popleft()
            if self._has_news:
                self._has_news = False
                self._collect()
            elif error := self._error or self.state.error:
                raise error
            elif not self._cursors:
                if failure := self.failure:
                    raise failure
                raise StopAsyncIteration
            else:
                await self._wait()

    async def wait_until_begun(self) -> None:
        """Waits until the first event can be read. Raises the error of a request that ends before."""
        self._events.appendleft(await anext(self))

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _collect(self) -> None:
        if (not self._has_begun or self._prompt is not None) and not self._begin():
            return
        has_ended = False
        for cursor in self._cursors:
            answer = cursor.answer
            if answer.advance():
                self._owner.on_stop_string(self.state, answer)
            if cursor.unchecked is not None and not self._reaches(cursor):
                continue
            self.state.meter.on_tokens_read(answer.index, answer.num_tokens)
            self._events.extend(cursor.take())
            if answer.ended is not None:
                cursor.is_done = has_ended = True
                self._events.append(self._finish(cursor))
        if has_ended:
            self._cursors = [cursor for cursor in self._cursors if not cursor.is_done]

    def _finish(self, cursor: _Cursor) -> Finished:
        event, parser = self.state.make_finished_event(cursor.answer), cursor.parser
        if parser is None:
            return event
        self.state.meter.on_parsed(event.index, parser.dialect, parser.num_invalid_calls)
        return replace(event, calls_tools=parser.calls_tools)

    def _begin(self) -> bool:
        """Adds the next event that precedes all deltas; returns whether deltas may follow now."""
        if not self._has_begun:
            self._has_begun = self._has_news = self.state.is_accepted
            if self._has_begun:
                self._events.append(self.state.make_accepted())
            return False
        if self._prompt is not None:
            if (event := self._prompt.make_event()) is not None:
                self._events.append(event)
            elif not self.state.has_ended:
                return False
            # If every sequence failed before the prompt was computed, no prompt log probabilities will come.
            self._prompt = None
        return True

    def _reaches(self, cursor: _Cursor) -> bool:
        """Returns whether the answer has reached the reader's position. A replay then adds the deltas before it."""
        try:
            is_there = cursor.check()
        except BlockyardError as error:
            self._error = self._error or error
            return False
        if is_there and cursor.pause is not None:
            self._events.extend(cursor.take_repeats())
            cursor.pause = None
        return is_there

    def be_patient(self) -> None:
        """Stops tokens from waking the reader, for a front that answers at the end.

        Has no effect on a request with stop strings: a stop string that is found late costs further steps.
        """
        self.is_patient = not any(cursor.answer.looks_for_stops for cursor in self._cursors)

    def on_recovered(self, event: Recovered) -> None:
        """Adds the event of a failure that the request survived, after all earlier events."""
        if not self._has_begun:
            return
        self._collect()
        if self._cursors:
            self._events.append(event)
        self.wake()

    def wake(self) -> None:
        self._has_news = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """Ends reading; a request without readers ends too, unless it is kept. Idempotent; usable as a callback."""
        self._error = self._error or BlockyardError(Reason.CLIENT_CANCELLED, "the request was closed")
        self._owner.on_reader_closed(self)

    async def aclose(self) -> None:
        self.close()
