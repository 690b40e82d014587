"""Encodes and decodes conversations.

Decoding reads one item more of a list than it may have: a message of 16 MiB may hold millions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.contract.chat import (
    MAX_ARGUMENTS_BYTES,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PIECES,
    MAX_TOOLS,
    Conversation,
    Message,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    join_parts,
)
from blockyard.contract.codec.messages import EnumCodec
from blockyard.errors import Reason, Violation, invalid
from blockyard.inference.v1 import inference_pb2

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Struct, Value

_ROLES = EnumCodec(Role, inference_pb2.Role.items(), "ROLE_")
_TOOL_CHOICES = EnumCodec(ToolChoice, inference_pb2.ToolChoice.items(), "TOOL_CHOICE_", zero=ToolChoice.AUTO)
# Beyond these a float does not hold every integer.
_MAX_INTEGER = 2.0**53


def encode_conversation(conversation: Conversation) -> inference_pb2.Conversation:
    """Encodes a conversation; a default is left out. Raises ValueError for a role that is none."""
    choice = conversation.tool_choice
    message = inference_pb2.Conversation(
        messages=map(_encode_message, conversation.messages),
        tools=[
            inference_pb2.Tool(name=tool.name, description=tool.description, parameters=tool.schema, strict=tool.strict)
            for tool in conversation.tools
        ],
        tool_choice=_TOOL_CHOICES.encode(choice) if choice else inference_pb2.TOOL_CHOICE_UNSPECIFIED,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        parse_answer=conversation.parse_answer,
        named_tool=conversation.named_tool,
        one_tool_call=conversation.one_tool_call,
    )
    if conversation.template_arguments:
        message.template_arguments.update(dict(conversation.template_arguments))
    return message


def decode_conversation(message: inference_pb2.Conversation) -> Conversation:
    """Decodes a conversation.

    Raises BlockyardError: UNSUPPORTED_PARAMETER for parts of messages that are not text, FIELD_INVALID for too much.
    """
    if message.template_arguments.ByteSize() > MAX_ARGUMENTS_BYTES:
        raise invalid([Violation("conversation.template_arguments", f"must have at most {MAX_ARGUMENTS_BYTES} bytes")])
    messages = message.messages[: MAX_MESSAGES + 1]
    if sum(len(each.content) + len(each.tool_calls) for each in messages) > MAX_PIECES:
        raise invalid(
            [Violation("conversation.messages", f"must have at most {MAX_PIECES} parts and calls of tools in all")]
        )
    return Conversation(
        tuple(_decode_message(each, number) for number, each in enumerate(messages)),
        tools=tuple(
            Tool(each.name, each.description, each.parameters, each.strict) for each in message.tools[: MAX_TOOLS + 1]
        ),
        tool_choice=_TOOL_CHOICES.find(message.tool_choice),
        add_generation_prompt=message.add_generation_prompt if message.HasField("add_generation_prompt") else None,
        continue_final_message=message.continue_final_message,
        template_arguments=_decode_struct(message.template_arguments),
        parse_answer=message.parse_answer,
        named_tool=message.named_tool,
        one_tool_call=message.one_tool_call,
    )


def _encode_message(message: Message) -> inference_pb2.Message:
    content = message.content
    parts = [content] if isinstance(content, str) else () if content is None else content
    return inference_pb2.Message(
        role=_ROLES.encode(Role(message.role)),
        content=[inference_pb2.ContentPart(text=text) for text in parts],
        name=message.name,
        tool_calls=map(encode_call, message.tool_calls),
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
    )


def _decode_message(message: inference_pb2.Message, number: int) -> Message:
    field = f"conversation.messages[{number}].content"
    if len(message.content) > MAX_PARTS:
        raise invalid([Violation(field, f"must have at most {MAX_PARTS} parts")])
    if any(part.WhichOneof("part") != "text" for part in message.content):
        description = "has parts other than text, which are not supported yet"
        raise invalid([Violation(field, description, Reason.UNSUPPORTED_PARAMETER)])
    return Message(
        _ROLES.find(message.role) or "",
        join_parts([part.text for part in message.content]),
        name=message.name if message.HasField("name") else None,
        tool_calls=tuple(ToolCall(call.name, call.arguments, call.id) for call in message.tool_calls[: MAX_TOOLS + 1]),
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
        reasoning_content=message.reasoning_content if message.HasField("reasoning_content") else None,
    )


def encode_call(call: ToolCall) -> inference_pb2.ToolCall:
    return inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)


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
