"""Makes a response, complete or as the events of a stream, from the events of the core.

A delta event advances the sequence number by its number of characters, any other event by 1. The numbers are therefore
the same at every gateway and for every reader, even if the core splits the answer into other deltas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.contract.events import Accepted, Delta, Event, Finished
from blockyard.contract.sampling import FinishReason
from blockyard.errors import BlockyardError, Reason
from gateway.fronts.http_calls.parts import AnswerParts, Closed, Grown, Opened, Part, Step
from gateway.fronts.responses.output import Output, TextLogprobs
from gateway.fronts.responses.tools import function_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from gateway.fronts.responses.call import ResponseCall

# The sequence number before the first event.
FROM_THE_BEGINNING = -1


class ResponseAnswer:
    """Makes one response. Call `start` first, then `add` for each event of the core, or `fail` for an error.

    Args:
        call: the client's call.
        accepted: the request's first event.
        count_tokens: returns the number of tokens of a text.
        starting_after: the sequence number of the last event that the client has.

    Attributes:
        status: the status of the response.
    """

    def __init__(
        self,
        call: ResponseCall,
        accepted: Accepted,
        count_tokens: Callable[[str], int],
        starting_after: int = FROM_THE_BEGINNING,
    ) -> None:
        self.status = "in_progress"
        self._call = call
        self._accepted = accepted
        self._count_tokens = count_tokens
        self._starting_after = starting_after
        self._number = FROM_THE_BEGINNING
        self._parts = AnswerParts()
        self._output = Output(accepted.request_id, function_names(call.echo["tools"]))
        self._logprobs = TextLogprobs()
        self._statuses: list[str] = []
        self._finished: Finished | None = None
        self._error: dict[str, Any] | None = None

    def start(self) -> Iterator[dict[str, Any]]:
        kinds = ("response.created", "response.in_progress")
        yield from self._numbered({"type": kind, "response": self.response()} for kind in kinds)

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """Takes an event of the core, and makes the events of the stream for it."""
        if isinstance(event, Delta):
            yield from self._numbered(self._of_delta(event))
        elif isinstance(event, Finished) and event.error is None:
            self._finished = event
            self.status = "incomplete" if event.finish_reason is FinishReason.LENGTH else "completed"
            yield from self._numbered(self._end())

    def fail(self, error: BlockyardError) -> Iterator[dict[str, Any]]:
        self.status = "cancelled" if error.reason is Reason.CLIENT_CANCELLED else "failed"
        self._error = None if self.status == "cancelled" else {"code": str(error.reason), "message": error.message}
        yield from self._numbered([{"type": "response.failed", "response": self.response()}])

    def response(self) -> dict[str, Any]:
        items = zip(self._parts.parts, self._statuses, strict=False)
        accepted = self._accepted
        return {
            "id": accepted.request_id,
            "object": "response",
            "created_at": self._call.created,
            "status": self.status,
            **self._call.echo,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "model": accepted.model,
            "output": [self._output.item(part, status) for part, status in items],
            "usage": self._usage(),
            **({"warnings": list(accepted.warnings)} if accepted.warnings else {}),
        }

    def _of_delta(self, delta: Delta) -> Iterator[dict[str, Any]]:
        logprobs = self._logprobs.take(delta)
        for step in self._parts.add(delta):
            yield from self._of_step(step, logprobs)

    def _of_step(self, step: Step, logprobs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if isinstance(step, Opened):
            yield from self._output.open(step.part)
        elif isinstance(step, Grown):
            yield self._output.grow(step.part, step.piece, logprobs)
        else:
            yield from self._close(step.part, "completed")

    def _end(self) -> Iterator[dict[str, Any]]:
        for step in self._parts.end():
            assert isinstance(step, Closed)
            yield from self._close(step.part, self.status)
        yield {"type": f"response.{self.status}", "response": self.response()}

    def _close(self, part: Part, status: str) -> Iterator[dict[str, Any]]:
        self._statuses.append(status)
        yield from self._output.close(part, status)

    def _numbered(self, events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Numbers events, and leaves out events, or the beginning of a delta, that the client already has."""
        for event in events:
            before, size = self._number, len(event["delta"]) if "delta" in event else 1
            self._number += size
            if self._number <= self._starting_after:
                continue
            if self._starting_after > before:
                event = _without_beginning(event, self._starting_after - before)
            yield {**event, "sequence_number": self._number}

    def _usage(self) -> dict[str, Any] | None:
        finished = self._finished
        if finished is None:
            return None
        num_prompt_tokens, num_tokens = self._accepted.num_prompt_tokens, finished.usage.num_completion_tokens
        num_reasoning_tokens = self._count_tokens(self._parts.reasoning)
        return {
            "input_tokens": num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": finished.usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": num_tokens,
            "output_tokens_details": {"reasoning_tokens": min(num_reasoning_tokens, num_tokens)},
            "total_tokens": num_prompt_tokens + num_tokens,
        }


def _without_beginning(event: dict[str, Any], num_characters: int) -> dict[str, Any]:
    """Removes the first characters of a delta, with the log probabilities of their tokens."""
    cut = event | {"delta": event["delta"][num_characters:]}
    if event.get("logprobs"):
        num_bytes, rest = len(event["delta"][:num_characters].encode()), list(event["logprobs"])
        while rest and num_bytes > 0:
            num_bytes -= len(rest.pop(0)["bytes"] or ())
        cut["logprobs"] = rest
    return cut
