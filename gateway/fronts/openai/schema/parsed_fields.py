"""Makes the fields for reasoning and tool calls in a chat's message, complete or in pieces of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.contract.events import Delta, join_calls

if TYPE_CHECKING:
    from collections.abc import Sequence


def _reasoning_fields(text: str) -> dict[str, Any]:
    # vLLM's former name for reasoning, which most clients read, and its newer name.
    return {"reasoning_content": text, "reasoning": text} if text else {}


def parsed_fields(deltas: Sequence[Delta], *, hides_reasoning: bool) -> dict[str, Any]:
    """Returns the fields of a message for reasoning and tool calls; empty if the answer has neither."""
    fields = {} if hides_reasoning else _reasoning_fields("".join(delta.reasoning_text for delta in deltas))
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in join_calls(deltas)
    ]
    return fields | ({"tool_calls": calls} if calls else {})


def parsed_delta(delta: Delta, *, hides_reasoning: bool) -> dict[str, Any]:
    """Returns the fields of a stream's delta for reasoning and tool calls; empty if the delta has neither."""
    fields = {} if hides_reasoning else _reasoning_fields(delta.reasoning_text)
    calls: list[dict[str, Any]] = []
    for call in delta.tool_calls:
        head = {"id": call.id, "type": "function"} if call.name else {}
        function = {"name": call.name} if call.name else {}
        calls.append({"index": call.index, **head, "function": {**function, "arguments": call.arguments}})
    return fields | ({"tool_calls": calls} if calls else {})
