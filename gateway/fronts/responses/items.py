"""The items of a response's input, and their conversion to messages.

Checks names and types of items, and refuses unsupported kinds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from blockyard.contract import chat
from blockyard.contract.chat import Role
from gateway.fronts.http_calls.body_types import BY_TYPE, Neutral, Shape, at_most, unsupported
from gateway.fronts.http_calls.errors import Placed
from gateway.fronts.responses.tools import model_name

_TEXT_KINDS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
_ITEM_KINDS = frozenset({"message", "function_call", "function_call_output", "reasoning"})
_Status = Literal["in_progress", "completed", "incomplete"] | None


class TextPart(Shape):
    """A part of a text of the client or the model."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


def _check_parts(value: Any) -> Any:
    """Turns a text into a list of one part, and refuses unsupported kinds of parts; the error names the kind."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content", "should be a string or a list of parts")
    for part in cast("list[Any]", value):
        kind = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in _TEXT_KINDS:
            raise unsupported(f"has a part of the type {kind!r}, which is not supported")
    return cast("Any", value)


_Parts = Annotated[
    list[TextPart],
    Field(fail_fast=True),
    at_most(chat.MAX_PARTS),
    BeforeValidator(_check_parts, json_schema_input_type=str | list[TextPart]),
]


def _join(parts: list[TextPart] | None) -> str | None:
    return chat.join_parts([part.text for part in parts or ()])


class MessageItem(Shape):
    """A message of the client or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Parts
    id: str | None = None
    status: _Status = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Shape):
    """A function call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status = None
    caller: Annotated[Any, Neutral({"type": "direct"})] = None
    namespace: str | None = None
    is_async: Annotated[Any, Neutral(False), Field(alias="async")] = None


class CallOutputItem(Shape):
    """The result of a function."""

    type: Literal["function_call_output"]
    call_id: str
    output: _Parts
    id: str | None = None
    status: _Status = None
    caller: Annotated[Any, Neutral({"type": "direct"})] = None
    name: str | None = None
    namespace: str | None = None


class ReasoningItem(Shape):
    """The reasoning of an earlier answer, as plain text."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: _Parts | None = None
    content: _Parts | None = None
    encrypted_content: str | None = None
    status: _Status = None


_Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CallOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    BY_TYPE,
]


def _check_items(value: Any) -> Any:
    """Turns a text into a list of one user message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("input", "should be a string or a list of items")
    return cast("list[Any]", value)


def _check_item(item: Any) -> Any:
    """Adds a missing type to an item, and refuses unsupported kinds of items; the error names the kind."""
    if not isinstance(item, dict):
        return item
    fields = cast("dict[str, Any]", item)
    kind = fields.get("type", "message")
    if fields.get("type") is None and "id" in fields and "role" not in fields:
        # An item with an id and neither a type nor a role is the API's reference to a stored item.
        kind = "item_reference"
    if isinstance(kind, str) and kind not in _ITEM_KINDS:
        raise unsupported(f"is of the type {kind!r}, which is not supported")
    return fields | {"type": kind}


Items = Annotated[
    list[Annotated[_Item, BeforeValidator(_check_item)]],
    Field(fail_fast=True),
    BeforeValidator(_check_items, json_schema_input_type=str | Annotated[list[_Item], Field(min_length=1)]),
    # pydantic runs validators from the last to the first: this limit is checked before the items.
    at_most(chat.MAX_MESSAGES),
]


def placed_messages(instructions: str | None, items: Items) -> list[Placed]:
    """Makes the messages of a conversation, with their paths in the body.

    Instructions become a system message. The items of one earlier answer (reasoning, a message, calls) become one
    assistant message.
    """
    messages = [Placed(chat.Message(Role.SYSTEM, instructions), "instructions")] if instructions else []
    answer = _Answer()
    for number, item in enumerate(items):
        place = f"input[{number}]"
        if isinstance(item, CallOutputItem):
            messages += answer.take()
            message = chat.Message(Role.TOOL, _join(item.output) or "", tool_call_id=item.call_id)
            messages.append(Placed(message, place))
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages += answer.take()
            messages.append(Placed(chat.Message(Role(item.role), _join(item.content)), place))
        else:
            messages += answer.add(item, place)
    return [*messages, *answer.take()]


class _Answer:
    """Collects the items of an earlier answer."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[chat.ToolCall] = []
        self._place = ""
        self._call_places: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._reasoning or self._texts or self._calls)

    def add(self, item: MessageItem | CallItem | ReasoningItem, place: str) -> list[Placed]:
        """Adds an item. If it begins another answer, returns the message of the previous answer first."""
        begins = self._calls or (self._texts and isinstance(item, ReasoningItem))
        finished = self.take() if begins and not isinstance(item, CallItem) else []
        if not self:
            self._place = place
        if isinstance(item, CallItem):
            name = model_name(item.name, item.namespace)
            self._calls.append(chat.ToolCall(name, item.arguments, item.call_id))
            self._call_places.append(place)
        elif isinstance(item, MessageItem):
            self._texts.append(_join(item.content) or "")
        elif text := _join(item.content) or _join(item.summary):
            self._reasoning.append(text)
        return finished

    def take(self) -> list[Placed]:
        """Returns the message of the collected items, if there are any, and begins another answer."""
        if not self:
            return []
        message = chat.Message(
            Role.ASSISTANT,
            chat.join_parts(self._texts),
            tool_calls=tuple(self._calls),
            reasoning_content=chat.join_parts(self._reasoning),
        )
        placed = Placed(message, self._place, self._call_places)
        self._reasoning, self._texts, self._calls, self._call_places = [], [], [], []
        return [placed]
