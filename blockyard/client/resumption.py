"""Follows one answer over several calls: chooses the next request and filters out events that came before.

Both clients read their streams through it. It does no I/O: the clients open the calls, wait, and pass in what arrives.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from blockyard.client.results import Choice, Completion
from blockyard.client.retry import Attempts, is_of_transport, may_pass
from blockyard.contract.codec.events import decode_event
from blockyard.contract.codec.request import encode_position
from blockyard.contract.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    Loading,
    PromptLogprobs,
    Recovered,
    TokenLogprobs,
    join_calls,
)
from blockyard.contract.request import Position
from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2

if TYPE_CHECKING:
    from blockyard.clock import Clock


@dataclass(slots=True)
class CompletionBuilder:
    accepted: Accepted | None = None
    _prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    _deltas: defaultdict[int, list[Delta]] = field(default_factory=lambda: defaultdict[int, list[Delta]](list))
    _finished: dict[int, Finished] = field(default_factory=dict[int, Finished])

    def add(self, event: Event) -> None:
        match event:
            case Accepted():
                self.accepted = event
            case PromptLogprobs():
                self._prompt_logprobs = event.logprobs
            case Delta():
                self._deltas[event.index].append(event)
            case Finished():
                self._finished[event.index] = event
            case Recovered() | Loading():
                pass

    def build(self) -> Completion:
        if self.accepted is None or not self._finished:
            raise ValueError("the stream has not ended: there is no whole answer yet")
        choices = tuple(self._make_choice(self._finished[index]) for index in sorted(self._finished))
        accepted, last = self.accepted, next(reversed(self._finished.values()))
        return Completion(
            accepted.request_id,
            accepted.model,
            accepted.seed,
            choices,
            last.determinism_id,
            self._prompt_logprobs,
            accepted.warnings,
        )

    def _make_choice(self, finished: Finished) -> Choice:
        deltas = self._deltas[finished.index]
        return Choice(
            finished.index,
            "".join(delta.text for delta in deltas),
            tuple(token_id for delta in deltas for token_id in delta.token_ids),
            finished.finish_reason,
            finished.matched_stop,
            finished.usage,
            tuple(entry for delta in deltas for entry in delta.logprobs),
            finished.score,
            finished.error,
            join_calls(deltas),
            "".join(delta.reasoning_text for delta in deltas),
            finished.calls_tools,
        )


Request = inference_pb2.StreamGenerateRequest | inference_pb2.StreamChatRequest | inference_pb2.ResumeGenerateRequest


class EventsLost(BlockyardError):
    """The received events do not continue the ones before."""


def _lost(message: str) -> EventsLost:
    return EventsLost(Reason.BUG, f"events were lost: {message}")


@dataclass(slots=True)
class _Progress:
    num_tokens: int = 0
    num_text_bytes: int = 0
    token_ids: list[int] = field(default_factory=list[int])
    finished: bool = False
    # The answer is or may be parsed: some of the model's text is dropped or comes later, so byte counts may jump.
    is_parsed: bool = False

    def position(self, index: int) -> inference_pb2.Position:
        # Send ids only if all of them were received.
        token_ids = tuple(self.token_ids) if len(self.token_ids) == self.num_tokens else ()
        return encode_position(index, Position(self.num_tokens, self.num_text_bytes, self.finished, token_ids))

    def add(self, delta: Delta) -> None:
        """Adds a delta. Raises EventsLost unless it begins where the sequence stands."""
        num_text_bytes = delta.num_text_bytes - len(delta.text.encode())
        num_tokens = delta.num_tokens - len(delta.token_ids) if delta.token_ids else self.num_tokens
        if self.is_parsed:
            num_text_bytes = min(delta.num_text_bytes, self.num_text_bytes)
        if (num_tokens, num_text_bytes) != (self.num_tokens, self.num_text_bytes):
            came = f"a delta of sequence {delta.index} begins at token {num_tokens}, byte {num_text_bytes}"
            raise _lost(f"{came}; due was token {self.num_tokens}, byte {self.num_text_bytes}")
        self.num_tokens, self.num_text_bytes = delta.num_tokens, delta.num_text_bytes
        self.token_ids.extend(delta.token_ids)


class Resumption:
    """One answer that is read until it ends or cannot be resumed any more.

    The owner sends `next_request()`, passes each response to `on_message`, the OK end of a call to `on_end`, and each
    error (of the call or of these two) to `delay_after`; after the delay it begins again.

    Args:
        spec: the request to start; it is sent so that it can be resumed, unless `on_disconnect` is ABORT. None: read a
            request that another client has started.
        request_id: the request's id if there is no spec.
        attempts: the retry policy's state, the deadline, and the clock that a new id is drawn from.

    Attributes:
        deadline: of all calls together.
        is_kept: whether the request outlives its connection.
        num_resumes: how often the answer was resumed after it had begun.
    """

    def __init__(self, spec: inference_pb2.GenerationSpec | None, attempts: Attempts, *, request_id: str = "") -> None:
        self.deadline = attempts.deadline
        self.is_kept = spec is None or spec.on_disconnect != inference_pb2.ON_DISCONNECT_ABORT
        self.num_resumes = 0
        self._hides_token_ids = spec is not None and self.is_kept and not spec.return_token_ids
        self._spec = _resumable(spec, attempts.clock) if spec is not None and self.is_kept else spec
        self._request_id = request_id if self._spec is None else self._spec.request_id
        self._attempts = attempts
        self._builder = CompletionBuilder()
        self._sequences: dict[int, _Progress] = {}
        self._has_prompt_logprobs = False
        self._next_seq = 0
        self._is_over = False

    @property
    def request_id(self) -> str:
        """The request's id; empty before acceptance if the request is not kept and was given no id."""
        return self._builder.accepted.request_id if self._builder.accepted else self._request_id

    @property
    def has_begun(self) -> bool:
        """Whether the request was accepted."""
        return self._builder.accepted is not None

    @property
    def needs_cancel(self) -> bool:
        """Whether the request goes on unless cancelled. A request of another client is not cancelled here."""
        return self.is_kept and self._spec is not None and not self._is_over

    def next_request(self) -> Request:
        """Builds the request of the next call: to start the answer, or to resume it."""
        self._next_seq = 0
        if self._spec is not None and not self.has_begun:
            is_chat = self._spec.HasField("conversation")
            kind = inference_pb2.StreamChatRequest if is_chat else inference_pb2.StreamGenerateRequest
            return kind(spec=self._spec)
        self.num_resumes += self.has_begun
        positions = [progress.position(index) for index, progress in sorted(self._sequences.items())]
        request = inference_pb2.ResumeGenerateRequest(request_id=self.request_id, positions=positions, spec=self._spec)
        if self._spec is not None and not self._spec.sampling.HasField("seed") and self._builder.accepted is not None:
            request.seed = self._builder.accepted.seed
        return request

    def on_message(self, message: inference_pb2.GenerationEvent) -> Event | None:
        """Handles the next message; returns its event, or None if the user has it already. Raises EventsLost."""
        if message.seq != self._next_seq:
            raise _lost(f"seq {message.seq} came, {self._next_seq} was due")
        self._next_seq += 1
        event = decode_event(message)
        if event is None or not self._is_new(event):
            return None
        if not isinstance(event, Recovered | Loading):
            self._attempts.on_progress()
        if self._hides_token_ids and isinstance(event, Delta):
            event = replace(event, token_ids=())
            if not (event.text or event.logprobs or event.reasoning_text or event.tool_calls):
                return None
        self._builder.add(event)
        return event

    def _is_new(self, event: Event) -> bool:
        """Records an event; returns whether it is new."""
        match event:
            case Accepted():
                return not self.has_begun
            case PromptLogprobs():
                is_repeated, self._has_prompt_logprobs = self._has_prompt_logprobs, True
                return not is_repeated
            case Delta():
                self._progress(event.index).add(event)
            case Finished():
                progress = self._progress(event.index)
                is_repeated, progress.finished = progress.finished, True
                return not is_repeated
            case Recovered() | Loading():
                pass
        return True

    def _progress(self, index: int) -> _Progress:
        is_parsed = self._spec is None or self._spec.conversation.parse_answer
        return self._sequences.setdefault(index, _Progress(is_parsed=is_parsed))

    def on_end(self) -> None:
        """Handles the OK end of a call. Raises EventsLost if a sequence has not finished."""
        num_finished = sum(progress.finished for progress in self._sequences.values())
        num_sequences = len(self._sequences) or 1
        if self._spec is not None:
            num_sequences = self._spec.n if self._spec.HasField("n") else 1
        if num_finished < num_sequences:
            raise _lost(f"the stream ended before {num_sequences - num_finished} of its sequences")
        self._is_over = True

    def delay_after(self, error: BlockyardError) -> float:
        """Handles a failure; returns the seconds to wait before the next call, or raises it if there is none."""
        if not self._outlives(error):
            # A transport error alone, such as an expired deadline, does not end the request on the server.
            self._is_over = not is_of_transport(error)
            raise error
        # Lost events are a server's bug and do not earn the longer patience of a begun answer. A request of another
        # client may or may not exist, so `has_begun` is assumed if the server says when to ask again.
        is_asked_back = self._spec is None and error.retry_after_seconds is not None
        has_begun = (self.has_begun or is_asked_back) and not isinstance(error, EventsLost)
        return self._attempts.delay_after(error, has_begun=has_begun)

    def _outlives(self, error: BlockyardError) -> bool:
        if not self.is_kept:
            return may_pass(error) and not self.has_begun
        is_reset = is_of_transport(error) and error.reason is Reason.CLIENT_CANCELLED
        return may_pass(error) or is_reset or isinstance(error, EventsLost)

    def make_completion(self) -> Completion:
        """Builds the whole answer; raises ValueError before it has ended."""
        return self._builder.build()


def _resumable(spec: inference_pb2.GenerationSpec, clock: Clock) -> inference_pb2.GenerationSpec:
    """Copies a request so that it can be resumed: kept on disconnect, with an id, and returning token ids."""
    kept = inference_pb2.GenerationSpec()
    kept.CopyFrom(spec)
    kept.on_disconnect = inference_pb2.ON_DISCONNECT_KEEP
    kept.request_id = spec.request_id or clock.uuid_hex()
    kept.return_token_ids = True
    return kept
