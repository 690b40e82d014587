"""Writes each request's log line and trace span.

Measures a request's times at this gateway. Never logs the text of prompts or answers.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from grpc import StatusCode

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from blockyard.tracing.spans import NO_SPAN, Span, begin_server_span, begin_span, is_tracing
from gateway.call_context import current_call, name_request
from gateway.request import wire_id

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from blockyard.contract.events import Recovered
    from blockyard.contract.sampling import FinishReason
    from blockyard.contract.scheduling import Submission
    from blockyard.contract.trace import TraceContext

log = EventLogger(__name__)

# The attribute names of OpenTelemetry's conventions for generative AI.
_OPERATION = "gen_ai.operation.name"
_MODEL = "gen_ai.request.model"
_MAX_TOKENS = "gen_ai.request.max_tokens"
_INPUT_TOKENS = "gen_ai.usage.input_tokens"
_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
_FINISH_REASONS = "gen_ai.response.finish_reasons"
# The longest logged name, in characters. The name of a valid request with its tenant is shorter.
_MAX_NAME = 200
# The most invalid fields that the log names for a refused request.
_MAX_FIELDS = 10
# Errors that the client did not cause.
_OUR_FAULT = (Reason.BUG, Reason.NOT_FINITE, Reason.POISON_REQUEST)


class TokenCounts(NamedTuple):
    """Token counts of a request: of the prompt, of its part from the prefix cache, and of all sequences together."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int


class RequestLog:
    """Logs and traces one request at this gateway, from its arrival to its end.

    Args:
        request_id: the request's id on the wire, which includes its tenant.
        span: the request's span; NO_SPAN if it is not traced.
        is_taken_over: whether another gateway served the request before; durations count from the takeover.
        is_part: whether the request is one input of a pooling call, which has its own log line.
        operation: the operation under OpenTelemetry's name; empty for a part, and if another gateway knows it.

    Attributes:
        arrived_at: the request's arrival, by the event loop's time.
        first_token_at: the time at which the prompt and the first token were computed; None: not yet.
    """

    __slots__ = (
        "_is_part",
        "_is_taken_over",
        "_method",
        "_num_recoveries",
        "_recovery",
        "_request_id",
        "arrived_at",
        "first_token_at",
        "operation",
        "span",
    )

    def __init__(
        self,
        request_id: str,
        span: Span = NO_SPAN,
        *,
        is_taken_over: bool = False,
        is_part: bool = False,
        operation: str = "",
    ) -> None:
        self.span = span
        self.operation = operation
        self._is_part = is_part
        self._is_taken_over = is_taken_over
        # The id is not validated yet, and may be long.
        self._request_id = request_id[:_MAX_NAME]
        self._method = current_call().method
        self.arrived_at = asyncio.get_running_loop().time()
        self.first_token_at: float | None = None
        self._num_recoveries = 0
        self._recovery: Span | None = None

    @contextmanager
    def beginning(self) -> Generator[None]:
        """Wraps the request's tokenizing and validation, and logs a refusal."""
        span = begin_span("tokenize", self.span.context)
        try:
            yield
        except BlockyardError as error:
            self._on_refused(error)
            raise
        except asyncio.CancelledError:
            self._on_refused(BlockyardError(Reason.CLIENT_CANCELLED, "the client has left"))
            raise
        finally:
            span.end()

    def on_submitted(self, submission: Submission, warnings: Iterable[str] = ()) -> None:
        """Records that the request is valid and goes to the scheduler. `warnings`: the warnings for its client."""
        num_prompt_tokens = len(submission.prompt_token_ids)
        self.span.set(n=submission.n, **{_INPUT_TOKENS: num_prompt_tokens, _MAX_TOKENS: submission.max_tokens})
        self._debug("request submitted", num_prompt_tokens=num_prompt_tokens)
        for warning in warnings:
            log.info("request warning", **self._fields(warning=warning))

    def on_joined(self) -> None:
        """Records that the request was sent again: the known request has its own log."""
        self._debug("request joined")
        self.span.set(joined=True)
        self.span.end()

    def _on_refused(self, error: BlockyardError) -> None:
        # Shorten the paths: they may contain long names from a client's schemas.
        fields = tuple(violation.field[:_MAX_NAME] for violation in error.violations[:_MAX_FIELDS])
        log.info("request refused", **self._fields(reason=str(error.reason), fields=",".join(fields) or None))
        self.span.set(reason=str(error.reason), fields=fields)
        self.span.end(error=str(error.reason))

    def on_resumed(self) -> None:
        by = current_call().method
        self._debug("request resumed", by=by)
        self.span.add_event("resumed", method=by)

    # Events from the scheduler.

    def on_scheduler_lost(self) -> None:
        """Records that the request waits for another scheduler."""
        if self._recovery is None:
            self._recovery = begin_span("recovery", self.span.context, cause="the scheduler was lost")

    def on_accepted(self) -> None:
        """Records that a scheduler has queued the request, at first or after the loss of another scheduler."""
        if self._recovery is not None:
            self._recovery.end()
            self._recovery = None
        self._debug("request accepted")
        self.span.add_event("accepted")

    def on_prefilled(self) -> None:
        """Records that the prompt and the first token are computed."""
        if self.first_token_at is None:
            self.first_token_at = asyncio.get_running_loop().time()
            self._debug("first token", seconds=self._since_arrival(self.first_token_at))
            self.span.add_event("first token")

    def on_recovered(self, event: Recovered) -> None:
        """Records that the request continues after a failure of the scheduler or a worker."""
        self._num_recoveries += 1
        fields = {"cause": event.cause, "num_replayed_tokens": event.num_replayed_tokens, "exact": event.exact}
        self._debug("request recovered", **fields)
        self.span.add_event("recovered", **fields)

    # Ends of a request.

    def on_finished(
        self, counts: TokenCounts, reasons: Sequence[FinishReason], errors: Sequence[BlockyardError]
    ) -> None:
        """Records a complete answer. `reasons`: why each sequence ended; `errors`: the errors of failed sequences."""
        names = tuple(reason.value for reason in reasons)
        (log.debug if self._is_part else log.info)(
            "request finished",
            **self._fields(
                finish_reasons=",".join(dict.fromkeys(names)),
                errors=",".join(dict.fromkeys(str(error.reason) for error in errors)) or None,
                **self._end_fields(counts),
            ),
        )
        self.span.set(**{_FINISH_REASONS: names})
        self._end_span(counts)

    def on_failed(self, counts: TokenCounts, error: BlockyardError) -> None:
        """Records that the request ended without a complete answer."""
        fields = self._fields(reason=str(error.reason), **self._end_fields(counts))
        self.span.set(reason=str(error.reason))
        if error.reason is Reason.CLIENT_CANCELLED:
            (log.debug if self._is_part else log.info)("request cancelled", **fields)
            self._end_span(counts)
            return
        _failure_log(error)("request failed", error=error.message, **fields)
        self._end_span(counts, error=str(error.reason))

    def _end_span(self, counts: TokenCounts, *, error: str = "") -> None:
        if self._recovery is not None:
            self._recovery.end(error=error)
        if self.span is not NO_SPAN:
            self.span.set(num_cached_tokens=counts.num_cached_tokens, **{_OUTPUT_TOKENS: counts.num_completion_tokens})
        self.span.end(error=error)

    def _end_fields(self, counts: TokenCounts) -> dict[str, Any]:
        return {
            **counts._asdict(),
            "first_token_seconds": self._since_arrival(self.first_token_at),
            "seconds": self._since_arrival(asyncio.get_running_loop().time()),
            "num_recoveries": self._num_recoveries or None,
            "taken_over": self._is_taken_over or None,
        }

    def _debug(self, message: str, **fields: Any) -> None:
        if log.has_debug:
            log.debug(message, **self._fields(**fields))

    def _since_arrival(self, at: float | None) -> float | None:
        return None if at is None else round(at - self.arrived_at, 4)

    def _fields(self, **fields: Any) -> dict[str, Any]:
        every = {"request_id": self._request_id, "method": self._method or None, "trace_id": self.span.trace_id}
        return {**every, **fields}


def _failure_log(error: BlockyardError) -> Callable[..., None]:
    """Returns the log function for a failure. Refusals under load are frequent and known to the client: info."""
    if error.code is StatusCode.RESOURCE_EXHAUSTED:
        return log.info
    return log.error if error.reason in _OUR_FAULT else log.warning


def begin_request_log(tenant: str, name: str, model: str, operation: str) -> RequestLog:
    """Begins the log of a request of the current call. A call without a name gets the request's name.

    The request is traced if its caller's trace is sampled; without a caller's trace, the sampling rate decides.

    Args:
        tenant: the request's tenant.
        name: the request's id as its client knows it; the log shows it together with the tenant.
        model: the model that the request names.
        operation: the operation under OpenTelemetry's name, such as `chat` or `text_completion`.
    """
    name_request(name)
    request_id = wire_id(tenant, name)
    if not is_tracing():
        return RequestLog(request_id, operation=operation)
    call = current_call()
    attributes: dict[str, Any] = {"method": call.method, _MODEL: model, _OPERATION: operation}
    span = begin_server_span("request", call.trace_context, request_id=request_id[:_MAX_NAME], **attributes)
    return RequestLog(request_id, span, operation=operation)


def take_over_request_log(request_id: str, context: TraceContext | None) -> RequestLog:
    """Begins the log of a request that another gateway served before, within the request's trace."""
    span = begin_span("request", context, request_id=request_id, taken_over=True)
    return RequestLog(request_id, span, is_taken_over=True)
