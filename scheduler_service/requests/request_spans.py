"""Writes the spans and debug events of requests: queue, prefill, decode, preemption, recovery. Decides nothing.

A request is watched if it is traced, or while debug events are written; other requests cost nothing. The spans read the
core from outside, and only when a step has other rows than the one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.telemetry import EventLogger
from blockyard.tracing.spans import NO_SPAN, Span, begin_span, is_tracing
from scheduler_service.core.sequence import Group, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.contract.trace import TraceContext
    from scheduler_service.core.values import SchedulerOutput

log = EventLogger(__name__)

_QUEUE, _PREFILL, _DECODE = "queue", "prefill", "decode"


class _WatchedRequest:
    """One request: its phase, and its sequences that are preempted."""

    __slots__ = (
        "_began_at",
        "_clock",
        "_context",
        "_preempted",
        "_recovery",
        "_running",
        "_span",
        "group",
        "num_outputs",
        "phase",
    )

    def __init__(self, group: Group, clock: Callable[[], float]) -> None:
        self.group = group
        self._clock = clock
        self.phase = ""
        # The number of its tokens when its prefill began.
        self.num_outputs = 0
        self._context: TraceContext | None = group.spec.trace_context
        self._span: Span = NO_SPAN
        self._recovery: Span = NO_SPAN
        self._began_at = 0.0
        self._running: set[Sequence] = set()
        self._preempted: dict[Sequence, Span] = {}

    def enter(self, phase: str, **attributes: Any) -> None:
        now = self._clock()
        self._span.end()
        if self.phase:
            self._debug(f"request leaves {self.phase}", seconds=round(now - self._began_at, 4))
        self.phase, self._began_at = phase, now
        self._span = begin_span(phase, self._context, request_id=self.group.spec.request_id, **attributes)

    def on_scheduled(self, replica_id: int) -> None:
        """Notes which sequences run and which were preempted, after a replica's step was made."""
        for sequence in self.group.live:
            if sequence.status is SequenceStatus.RUNNING:
                self._on_running(sequence)
            elif sequence in self._running and sequence.status is not SequenceStatus.PARKED:
                self._on_preempted(sequence)
        if self._running and self.phase == _QUEUE:
            self._start(replica_id)

    def _start(self, replica_id: int) -> None:
        group = self.group
        self.num_outputs = group.num_outputs
        self.enter(
            _PREFILL,
            replica_id=replica_id,
            num_prompt_tokens=group.prompt_length,
            num_cached_tokens=group.num_cached_tokens,
        )

    def _on_running(self, sequence: Sequence) -> None:
        self._running.add(sequence)
        if span := self._preempted.pop(sequence, None):
            span.end()
            self._debug("request goes on", sequence_index=sequence.sequence_index)

    def _on_preempted(self, sequence: Sequence) -> None:
        self._running.discard(sequence)
        mode = "swap" if sequence.status is SequenceStatus.SWAPPED else "recompute"
        fields: dict[str, Any] = {
            "sequence_index": sequence.sequence_index,
            "mode": mode,
            "num_tokens": len(sequence.token_ids),
        }
        self._debug("request preempted", **fields)
        self._preempted[sequence] = begin_span(
            "preempted", self._context, request_id=self.group.spec.request_id, **fields
        )

    def on_answered(self) -> None:
        """Begins the decode phase at the first token, or the first one since a loss."""
        if self.group.num_outputs > self.num_outputs:
            self._recovery.end()
            self._recovery = NO_SPAN
            self.enter(_DECODE)

    def on_lost(self, cause: str, num_tokens: int) -> None:
        """Ends the spans with an error, and begins a recovery span: the request waits for another worker."""
        self._debug("request lost its worker", cause=cause, num_replayed_tokens=num_tokens)
        self._end_spans(error=cause)
        self._running.clear()
        if self._recovery is NO_SPAN:
            fields: dict[str, Any] = {
                "request_id": self.group.spec.request_id,
                "cause": cause,
                "num_replayed_tokens": num_tokens,
            }
            self._recovery = begin_span("recovery", self._context, **fields)
        self.enter(_QUEUE)

    def on_stopped(self) -> None:
        """Ends the spans: another scheduler continues the request."""
        self._end_spans(error="the scheduler stopped")
        self._recovery.end()

    def on_ended(self) -> None:
        sequences = self.group.sequences
        reasons = tuple(
            sequence.finish_reason.name.lower() for sequence in sequences if sequence.finish_reason is not None
        )
        self._span.set(finish_reasons=reasons, num_completion_tokens=self.group.num_outputs)
        # A request that fails is dropped before it has a finish reason.
        self._end_spans(error="" if reasons else "the request failed")
        self._recovery.end()
        self._debug(
            "request ended",
            phase=self.phase,
            finish_reasons=",".join(dict.fromkeys(reasons)),
            num_completion_tokens=self.group.num_outputs,
        )

    def _end_spans(self, error: str = "") -> None:
        for span in self._preempted.values():
            span.end(error=error)
        self._preempted.clear()
        self._span.end(error=error)

    def _debug(self, message: str, **fields: Any) -> None:
        if log.has_debug:
            trace = {"trace_id": self._context.trace_id} if self._context else {}
            log.debug(message, request_id=self.group.spec.request_id, **fields, **trace)


def _sequence_ids(group: Group) -> range:
    """The ids of a request's sequences and of its possible beams."""
    first = group.sequences[0].sequence_id
    return range(first, first + group.spec.num_sequence_ids)


class RequestSpans:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watched: dict[str, _WatchedRequest] = {}
        self._by_sequence: dict[int, _WatchedRequest] = {}
        # Requests that wait for their first token.
        self._prefilling: set[_WatchedRequest] = set()
        # The rows of each replica's previous step.
        self._rows: dict[int, tuple[int, ...]] = {}

    def on_begun(self, group: Group) -> None:
        """Watches an admitted request if it is traced or debug events are written."""
        is_traced = group.spec.trace_context is not None and is_tracing()
        if is_traced or log.has_debug:
            watched = self._watched[group.spec.request_id] = _WatchedRequest(group, self._clock)
            self._by_sequence.update(dict.fromkeys(_sequence_ids(group), watched))
            watched.enter(_QUEUE)

    def on_scheduled(self, replica_id: int, output: SchedulerOutput) -> None:
        """Looks at the sequences that joined or left a step. Most steps have the rows of the one before."""
        if not self._watched:
            return
        before = self._rows.get(replica_id, ())
        if output.new_sequences or output.sequence_ids != before:
            self._rows[replica_id] = output.sequence_ids
            changed = set(before).symmetric_difference(output.sequence_ids)
            changed.update(new.sequence_id for new in output.new_sequences)
            for watched in {found for each in changed if (found := self._by_sequence.get(each))}:
                self._look(watched, replica_id)

    def _look(self, watched: _WatchedRequest, replica_id: int) -> None:
        watched.on_scheduled(replica_id)
        if watched.phase == _PREFILL:
            self._prefilling.add(watched)

    def on_replica_gone(self, replica_id: int) -> None:
        self._rows.pop(replica_id, None)

    def on_answered(self) -> None:
        for watched in tuple(self._prefilling):
            watched.on_answered()
            if watched.phase != _PREFILL:
                self._prefilling.discard(watched)

    def on_lost(self, group: Group, cause: str, num_tokens: int) -> None:
        """Notes that a request lost its worker; `num_tokens` have to be computed again."""
        if watched := self._watched.get(group.spec.request_id):
            self._prefilling.discard(watched)
            watched.on_lost(cause, num_tokens)

    def on_ended(self, group: Group) -> None:
        watched = self._watched.get(group.spec.request_id)
        if watched is not None and watched.group is group:
            del self._watched[group.spec.request_id]
            for sequence_id in _sequence_ids(group):
                del self._by_sequence[sequence_id]
            self._prefilling.discard(watched)
            watched.on_ended()

    def close(self) -> None:
        """Ends the spans of live requests: the scheduler stops."""
        for watched in self._watched.values():
            watched.on_stopped()
        self._watched.clear()
        self._by_sequence.clear()
        self._prefilling.clear()
