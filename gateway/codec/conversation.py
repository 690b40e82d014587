"""Decodes a conversation of the public API.

Reads one item more of a list than it may have: a message of 16 MiB may hold millions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.client.chat import Role, ToolChoice
from blockyard.errors import Reason, Violation, invalid
from blockyard.inference.v1 import inference_pb2
from gateway.chat import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Conversation,
    Message,
    Tool,
    ToolCall,
    join_parts,
)

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Struct, Value

# Reading more would hold up everybody else. Of parts of messages and calls of tools: in all.
MAX_ARGUMENTS_BYTES = 2**20
MAX_PIECES = 2**14
# Beyond these a float does not hold every integer.
_MAX_INTEGER = 2.0**53

_ROLES = {inference_pb2.Role.Value(f"ROLE_{role.name}"): role for role in Role}
_TOOL_CHOICES = {
    inference_pb2.TOOL_CHOICE_UNSPECIFIED: ToolChoice.AUTO,
    inference_pb2.TOOL_CHOICE_AUTO: ToolChoice.AUTO,
    inference_pb2.TOOL_CHOICE_NONE: ToolChoice.NONE,
    inference_pb2.TOOL_CHOICE_REQUIRED: ToolChoice.REQUIRED,
}


def decode_conversation(message: inference_pb2.Conversation) -> Conversation:
    """Reads a conversation.

    Raises BlockyardError: UNSUPPORTED_PARAMETER for parts of messages that are not text, FIELD_INVALID for too much.
    """
    if message.template_arguments.ByteSize() > MAX_ARGUMENTS_BYTES:
        raise invalid([Violation("conversation.template_arguments", f"at most {MAX_ARGUMENTS_BYTES} bytes")])
    messages = message.messages[: MAX_MESSAGES + 1]
    if sum(len(each.content) + len(each.tool_calls) for each in messages) > MAX_PIECES:
        raise invalid([Violation("conversation.messages", f"at most {MAX_PIECES} parts and calls of tools in all")])
    adds = message.add_generation_prompt if message.HasField("add_generation_prompt") else None
    return Conversation(
        tuple(_decode_message(each, number) for number, each in enumerate(messages)),
        tools=tuple(
            Tool(each.name, each.description, each.parameters, each.strict) for each in message.tools[: MAX_TOOLS + 1]
        ),
        tool_choice=_TOOL_CHOICES.get(message.tool_choice),
        add_generation_prompt=adds,
        continue_final_message=message.continue_final_message,
        template_arguments=_decode_struct(message.template_arguments),
        parse_answer=message.parse_answer,
        named_tool=message.named_tool,
        one_tool_call=message.one_tool_call,
    )


def _decode_message(message: inference_pb2.Message, number: int) -> Message:
    field = f"conversation.messages[{number}].content"
    if len(message.content) > MAX_PARTS:
        raise invalid([Violation(field, f"at most {MAX_PARTS} parts")])
    if any(part.WhichOneof("part") != "text" for part in message.content):
        description = "has parts other than text, which are not supported yet"
        raise invalid([Violation(field, description, Reason.UNSUPPORTED_PARAMETER)])
    return Message(
        _ROLES.get(message.role),
        join_parts([part.text for part in message.content]),
        name=message.name if message.HasField("name") else None,
        tool_calls=tuple(ToolCall(call.name, call.arguments, call.id) for call in message.tool_calls[: MAX_TOOLS + 1]),
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
        reasoning_content=message.reasoning_content if message.HasField("reasoning_content") else None,
    )


def _decode_struct(struct: Struct) -> dict[str, Any]:
    # The map has no order of its own, and templates print theirs.
    return {name: _decode_value(value) for name, value in sorted(struct.fields.items())}


def _decode_value(value: Value) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return _decode_struct(value.struct_value)
        case "list_value":
            return [_decode_value(item) for item in value.list_value.values]
        case "number_value":
            return _decode_number(value.number_value)
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None


def _decode_number(number: float) -> int | float:
    # A template that prints an integer means no fraction.
    return int(number) if number.is_integer() and abs(number) <= _MAX_INTEGER else number
