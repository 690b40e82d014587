"""The shapes of a response and of the events of its stream, for the OpenAPI document and for tests.

Answers are not validated by them on the way out.
"""

from __future__ import annotations

from typing import Any, Literal

from gateway.fronts.http_calls.body_types import Shape
from gateway.fronts.openai.schema.answers import ChatTokenLogprob  # noqa: TC001 - pydantic reads the annotations
from gateway.fronts.responses.schema import ReasoningShape, TextShape  # noqa: TC001
from gateway.fronts.responses.tools import AllowedTools, AnyTool, NamedTool  # noqa: TC001

PartStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Shape):
    """What the model says. `logprobs`: of its tokens, where they were asked for."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class ReasoningText(Shape):
    """What the model thinks."""

    type: Literal["reasoning_text"]
    text: str


class OutputItem(Shape):
    """What all items have."""

    id: str
    status: PartStatus


class OutputMessage(OutputItem):
    """What the model says."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(OutputItem):
    """What the model thinks, as it is: `summary` is empty."""

    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(OutputItem):
    """A call of a tool. `arguments`: as the model writes them, JSON as a rule.

    `namespace`: of a function that is in one.
    """

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


AnyOutput = OutputMessage | OutputReasoning | OutputCall


class InputDetails(Shape):
    """The part of the prompt that was found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Shape):
    """How many tokens the text of the reasoning has by itself."""

    reasoning_tokens: int


class ResponseUsage(Shape):
    """The tokens of a call."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Shape):
    """Why a response failed. `code` is the reason."""

    code: str
    message: str


class Incomplete(Shape):
    """Why a response is not whole."""

    reason: Literal["max_output_tokens"]


class CountedInput(Shape):
    """The answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ToldResponse(Shape):
    """The answer of /v1/responses: what has become of it, and the parameters of its body, with the API's defaults.

    `usage` is null until it has ended. `warnings`: what was not done as asked.
    """

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[AnyOutput]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    usage: ResponseUsage | None
    warnings: list[str] | None = None

    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    reasoning: ReasoningShape
    safety_identifier: str | None = None
    service_tier: str
    store: Literal[False]
    temperature: float | None
    text: TextShape
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools
    tools: list[AnyTool]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    user: str | None


class ResponseEvent(Shape):
    """What all events have. A number counts the events of structure and the characters of all texts up to this one."""

    sequence_number: int


class StateEvent(ResponseEvent):
    """The response as it is: at its beginning and at its end."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ToldResponse


class ItemEvent(ResponseEvent):
    """An item begins, or is whole."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: AnyOutput


class InItemEvent(ResponseEvent):
    """What the events inside of an item have."""

    item_id: str
    output_index: int


class PartEvent(InItemEvent):
    """The content of an item begins, or is whole."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText | ReasoningText


class TextDeltaEvent(InItemEvent):
    """More of what the model says."""

    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDoneEvent(InItemEvent):
    """All of what the model says."""

    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDeltaEvent(InItemEvent):
    """More of what the model thinks."""

    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDoneEvent(InItemEvent):
    """All of what the model thinks."""

    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDeltaEvent(InItemEvent):
    """More of the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(InItemEvent):
    """All of the arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


EVENTS = (
    StateEvent,
    ItemEvent,
    PartEvent,
    TextDeltaEvent,
    TextDoneEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
)
