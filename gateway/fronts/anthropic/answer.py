"""Makes answers in Anthropic's form, complete or as the events of a stream, from the events of the core."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from blockyard.contract.events import Accepted, Delta, Event, Finished
from blockyard.contract.sampling import FinishReason
from gateway.fronts.http_calls.parts import AnswerParts, Grown, Opened, Part, PartKind, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.fronts.anthropic.call import MessageCall

# For each kind of block, the type of its deltas and their field for the text.
_DELTAS = {
    PartKind.TEXT: ("text_delta", "text"),
    PartKind.REASONING: ("thinking_delta", "thinking"),
    PartKind.CALL: ("input_json_delta", "partial_json"),
}


class MessageAnswer:
    """Makes one message. Call `start` first, then `add` for each event of the core, and `encode` at the end."""

    def __init__(self, call: MessageCall, accepted: Accepted) -> None:
        self._call = call
        self._parts = AnswerParts()
        self._finished: Finished | None = None
        self._num_prompt_tokens = accepted.num_prompt_tokens
        self._head: dict[str, Any] = {
            "id": accepted.request_id,
            "type": "message",
            "role": "assistant",
            "model": accepted.model,
        }
        self._warnings = {"warnings": list(accepted.warnings)} if accepted.warnings else {}

    def start(self) -> Iterator[dict[str, Any]]:
        message = {**self._head, "content": [], **self._ending(), "usage": self._usage(), **self._warnings}
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """Takes an event of the core, and makes the events of the stream for it."""
        if isinstance(event, Delta):
            for step in self._parts.add(event):
                if not (isinstance(step, Grown) and self._hides(step.part)):
                    yield self._of_step(step)
        elif isinstance(event, Finished) and event.error is None:
            self._finished = event
            yield from map(self._of_step, self._parts.end())
            yield {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
            yield {"type": "message_stop"}

    def encode(self) -> bytes:
        content = [self._block(part) for part in self._parts.parts]
        message = {**self._head, "content": content, **self._ending(), "usage": self._usage(), **self._warnings}
        # A call's arguments may contain half a surrogate pair, which only an escape can represent.
        return json.dumps(message, separators=(",", ":")).encode()

    def _of_step(self, step: Step) -> dict[str, Any]:
        index = step.part.number
        if isinstance(step, Opened):
            return {"type": "content_block_start", "index": index, "content_block": self._empty_block(step.part)}
        if isinstance(step, Grown):
            kind, name = _DELTAS[step.part.kind]
            return {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: step.piece}}
        return {"type": "content_block_stop", "index": index}

    def _empty_block(self, part: Part) -> dict[str, Any]:
        if part.kind is PartKind.TEXT:
            return {"type": "text", "text": ""}
        if part.kind is PartKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}

    def _block(self, part: Part) -> dict[str, Any]:
        block = self._empty_block(part)
        if self._hides(part):
            return block
        if part.kind is PartKind.CALL:
            return block | {"input": _read_input(part.text)}
        return block | {_DELTAS[part.kind][1]: part.text}

    def _hides(self, part: Part) -> bool:
        return self._call.hides_thinking and part.kind is PartKind.REASONING

    def _ending(self) -> dict[str, Any]:
        finished = self._finished
        if finished is None:
            return {"stop_reason": None, "stop_sequence": None}
        matched = finished.matched_stop if isinstance(finished.matched_stop, str) else None
        return {"stop_reason": self._stop_reason(finished), "stop_sequence": matched}

    def _stop_reason(self, finished: Finished) -> str:
        if finished.finish_reason is FinishReason.LENGTH:
            # The model's length left room for fewer tokens than max_tokens.
            is_short = finished.usage.num_completion_tokens < self._call.max_tokens
            return "model_context_window_exceeded" if is_short else "max_tokens"
        if finished.calls_tools:
            return "tool_use"
        return "stop_sequence" if isinstance(finished.matched_stop, str) else "end_turn"

    def _usage(self) -> dict[str, Any]:
        """Returns the token counts that are known so far. The API counts cached prompt tokens separately."""
        finished = self._finished
        num_cached = finished.usage.num_cached_tokens if finished else 0
        return {
            "input_tokens": self._num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": finished.usage.num_completion_tokens if finished else 0,
        }


def _read_input(arguments: str) -> dict[str, Any]:
    """Parses the arguments of a call; returns an empty object if they are not a JSON object."""
    try:
        value = json.loads(arguments)
        # Python reads and writes NaN and Infinity, which JSON lacks: refuse them.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
