"""The shapes of the API's answers and of the events of its streams, for the OpenAPI document and for tests.

Answers are not validated by them on the way out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gateway.fronts.http_calls.body_types import Shape

StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class SaidBlock(Shape):
    """What the model says."""

    type: Literal["text"]
    text: str


class ThoughtBlock(Shape):
    """What the model thinks. Nothing signs it, and with a display of "omitted" it is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class CallBlock(Shape):
    """A call of a tool. `input` is empty where the model's arguments are no object."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = SaidBlock | ThoughtBlock | CallBlock


class MessageUsage(Shape):
    """The tokens of a call. Those of the prompt are the cached ones and all others, apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageEnding(Shape):
    """Why a message ended; null before."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class AnsweredMessage(MessageEnding):
    """The answer of /v1/messages. `warnings`: what was not done as asked."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage
    warnings: list[str] | None = None


class CountedTokens(Shape):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicModel(Shape):
    """A model that is served. `max_input_tokens`: its length, prompt and answer together."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int


class AnthropicModels(Shape):
    """All models, on one page."""

    data: list[AnthropicModel]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None


class MessageStart(Shape):
    """The message without content: the first event."""

    type: Literal["message_start"]
    message: AnsweredMessage


class Ping(Shape):
    """Nothing."""

    type: Literal["ping"]


class BlockStart(Shape):
    """An empty block."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class SaidDelta(Shape):
    """More of what the model says."""

    type: Literal["text_delta"]
    text: str


class ThoughtDelta(Shape):
    """More of what the model thinks."""

    type: Literal["thinking_delta"]
    thinking: str


class InputDelta(Shape):
    """More of the arguments of a call."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(Shape):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: SaidDelta | ThoughtDelta | InputDelta


class BlockStop(Shape):
    """A block is whole."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Shape):
    """Why the message ended, and what it cost."""

    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage


class MessageStop(Shape):
    """The last event."""

    type: Literal["message_stop"]


class MessageViolation(Shape):
    """One thing that is wrong with a request."""

    param: str
    message: str
    code: str


class MessageError(Shape):
    """Why a call failed. `reason` and `violations` are not in the API."""

    type: str
    message: str
    reason: str | None = None
    violations: list[MessageViolation] = Field(default_factory=list[MessageViolation])


class MessageFailure(Shape):
    """The body of every answer but 200; the last event of a stream that fails."""

    type: Literal["error"]
    error: MessageError


EVENTS = (MessageStart, Ping, BlockStart, BlockDelta, BlockStop, MessageEnd, MessageStop, MessageFailure)
