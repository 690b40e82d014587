"""Checks conversations and turns them into prompts, for all fronts. Knows neither protobuf nor HTTP.

Violations name fields by their paths in the proto (`conversation.messages[0].role`). The model's chat template renders
the prompt, with the same variables as in `transformers`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from blockyard.contract.chat import MAX_MESSAGES, MAX_TOOLS, Conversation, Message, Role, Tool, ToolCall, ToolChoice
from blockyard.errors import Violation, invalid

if TYPE_CHECKING:
    from collections.abc import Iterator


MAX_VALUES = 2**18
"""The most values of a JSON object: the arguments of a call, or a schema."""
_ROLES = tuple(Role)
# Template variables that a request must not set, since the call itself sets them.
RESERVED_ARGUMENTS = frozenset({"messages", "tools", "add_generation_prompt"})
# The approximate number of characters that a template writes for a message beside its content, and for a list or an
# object among its variables.
_MESSAGE_CHARACTERS = 16
_PARTS_CHARACTERS = 4096
# Marks the end of the message to continue, so that it can be found in the prompt. No text contains this mark, since
# U+10FFFF is not a character. Its space shows whether the template trims messages.
_END_OF_MESSAGE = "\U0010ffffend\U0010ffff "


def count_characters(conversation: Conversation) -> int:
    """Returns the approximate number of characters that a template renders for a conversation."""
    of_calls = (len(call.arguments) for message in conversation.messages for call in message.tool_calls)
    of_messages = (_MESSAGE_CHARACTERS + len(message.text or "") for message in conversation.messages)
    of_tools = (_MESSAGE_CHARACTERS + len(tool.description) + len(tool.schema) for tool in conversation.tools)
    of_arguments = map(_size_of, conversation.template_arguments.values())
    return sum(of_messages) + sum(of_calls) + sum(of_tools) + sum(of_arguments)


def _size_of(value: object) -> int:
    """Returns the approximate number of characters for a template variable; a constant for lists and objects."""
    return len(value) if isinstance(value, str) else _PARTS_CHARACTERS if isinstance(value, list | dict) else 1


class Renderer(Protocol):
    """The part of a tokenizer that renders its chat template."""

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Renders messages.

        Raises BlockyardError: FEATURE_DISABLED without a template, FIELD_INVALID if the template refuses the messages.
        """
        ...


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """Returns the template variables for a reasoning effort. Most templates only have a flag to turn reasoning off."""
    if not effort:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def prompt_of(conversation: Conversation, renderer: Renderer) -> str:
    """Renders the prompt of a conversation, including special tokens.

    Raises BlockyardError: FIELD_INVALID with all violations or the template's error; FEATURE_DISABLED.
    """
    if violations := list(find_violations(conversation)):
        raise invalid(violations)
    messages = conversation.messages
    if conversation.continue_final_message:
        last = replace(messages[-1], content=f"{messages[-1].text}{_END_OF_MESSAGE}")
        messages = (*messages[:-1], last)
    adds = conversation.add_generation_prompt
    tools = conversation.tools if conversation.tool_choice is not ToolChoice.NONE else ()
    rendered = renderer.apply_chat_template(
        [_message_for_template(message) for message in messages],
        add_generation_prompt=not conversation.continue_final_message if adds is None else adds,
        # Without tools, pass None instead of an empty list: some templates test whether tools are none.
        tools=[_tool_for_template(tool) for tool in tools] or None,
        **conversation.template_arguments,
    )
    return _cut_behind_final_message(rendered) if conversation.continue_final_message else rendered


def _cut_behind_final_message(rendered: str) -> str:
    """Removes the text that the template writes after the message to continue, as `transformers` does."""
    end = rendered.rfind(_END_OF_MESSAGE.strip())
    if end < 0:
        description = "the model's chat template leaves out the final message, or changes it"
        raise invalid([Violation("conversation.continue_final_message", description)])
    # If the template trims messages, trim the end of the prompt too.
    return rendered[:end] if rendered.startswith(_END_OF_MESSAGE, end) else rendered[:end].rstrip()


def _message_for_template(message: Message) -> dict[str, Any]:
    """Returns a message in the form for templates. Missing fields are left out, except for content."""
    fields: dict[str, Any] = {
        "role": str(Role.SYSTEM if message.role == Role.DEVELOPER else message.role),
        "content": message.text or "",
        "name": message.name,
        "reasoning_content": message.reasoning_content,
        "tool_calls": [_call_for_template(call) for call in message.tool_calls] or None,
        "tool_call_id": message.tool_call_id,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    arguments = _read_object(call.arguments)
    # Pass arguments as an object: templates write them as JSON, which would quote a text.
    function = {"name": call.name, "arguments": call.arguments if arguments is None else arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_for_template(tool: Tool) -> dict[str, Any]:
    parameters = _read_object(tool.schema) if tool.schema else None
    fields = {"name": tool.name, "description": tool.description or None, "parameters": parameters}
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}


def _read_object(text: str) -> dict[str, Any] | None:
    """Parses a JSON object; an empty text is an empty object. Returns None for other JSON or too many values."""
    if not text.strip():
        return {}
    if sum(map(text.count, ",[{")) > MAX_VALUES:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def find_violations(conversation: Conversation) -> Iterator[Violation]:
    """Yields all violations of a conversation that do not depend on the template."""
    if not conversation.messages:
        yield Violation("conversation.messages", "must not be empty")
    if len(conversation.messages) > MAX_MESSAGES:
        yield Violation("conversation.messages", f"must have at most {MAX_MESSAGES} entries")
    for number, message in enumerate(conversation.messages[:MAX_MESSAGES]):
        yield from _of_message(message, f"conversation.messages[{number}]")
    yield from _of_tools(conversation)
    if taken := RESERVED_ARGUMENTS.intersection(conversation.template_arguments):
        description = f"must not set {', '.join(sorted(taken))}: the call sets it itself"
        yield Violation("conversation.template_arguments", description)
    yield from _of_the_end(conversation)


def _of_message(message: Message, place: str) -> Iterator[Violation]:
    if message.role not in _ROLES:
        yield Violation(f"{place}.role", f"must be one of {', '.join(_ROLES)}")
    if message.tool_calls and message.role != Role.ASSISTANT:
        yield Violation(f"{place}.tool_calls", "are allowed only in messages of the role assistant")
    if message.tool_call_id is not None and message.role != Role.TOOL:
        yield Violation(f"{place}.tool_call_id", "is allowed only in a message of the role tool")
    if len(message.tool_calls) > MAX_TOOLS:
        yield Violation(f"{place}.tool_calls", f"must have at most {MAX_TOOLS} entries")
    for number, call in enumerate(message.tool_calls[:MAX_TOOLS]):
        if not call.name:
            yield Violation(f"{place}.tool_calls[{number}].name", "must not be empty")


def _of_tools(conversation: Conversation) -> Iterator[Violation]:
    if len(conversation.tools) > MAX_TOOLS:
        yield Violation("conversation.tools", f"must have at most {MAX_TOOLS} entries")
    for number, tool in enumerate(conversation.tools[:MAX_TOOLS]):
        if not tool.name:
            yield Violation(f"conversation.tools[{number}].name", "must not be empty")
        if _read_object(tool.schema) is None:
            description = f"must be a JSON schema, which is an object, of at most {MAX_VALUES} values"
            yield Violation(f"conversation.tools[{number}].parameters", description)
    yield from _of_tool_choice(conversation)


def _of_tool_choice(conversation: Conversation) -> Iterator[Violation]:
    if conversation.tool_choice is None:
        yield Violation("conversation.tool_choice", "must be auto, none or required")
    is_forced = conversation.tool_choice is ToolChoice.REQUIRED
    if is_forced and not conversation.tools:
        yield Violation("conversation.tool_choice", "must not be required without tools")
    names = {tool.name for tool in conversation.tools}
    if unknown := [name for name in conversation.allowed_tools if name not in names]:
        yield Violation(
            "conversation.allowed_tools", f"must be names of the request's tools, and {unknown[0]!r} is not one"
        )
    if not conversation.named_tool:
        return
    if not is_forced:
        yield Violation("conversation.named_tool", "is allowed only with tool_choice required")
    if conversation.named_tool not in names:
        yield Violation("conversation.named_tool", "must be the name of one of the tools")


def _of_the_end(conversation: Conversation) -> Iterator[Violation]:
    if not conversation.continue_final_message:
        return
    if conversation.add_generation_prompt:
        description = "is not allowed with add_generation_prompt, which begins a new message"
        yield Violation("conversation.continue_final_message", description)
    if conversation.messages and conversation.messages[-1].text is None:
        yield Violation("conversation.continue_final_message", "needs a final message with content")
