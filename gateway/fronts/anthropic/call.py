"""Turns the body of an Anthropic call into a request to the gateway's core, and the options of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockyard.clock import SYSTEM, Clock
from blockyard.contract import chat
from blockyard.contract.chat import Role, ToolChoice
from blockyard.contract.sampling import SamplingParams, StopCriteria
from gateway.fronts.anthropic.blocks import (
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    join_system_texts,
    join_texts,
)
from gateway.fronts.http_calls.body_types import schema_format
from gateway.fronts.http_calls.errors import Placed
from gateway.request import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.contract.request import OutputFormat
    from gateway.fronts.anthropic.schema import MessagesBody, MessageShape, PromptShape


_CHOICES = {
    "auto": ToolChoice.AUTO,
    "any": ToolChoice.REQUIRED,
    "tool": ToolChoice.REQUIRED,
    "none": ToolChoice.NONE,
}


def conversation_of(body: PromptShape) -> chat.Conversation:
    """Makes the conversation: a system message, then the messages of the body.

    If the last message is the assistant's, the answer continues it.
    """
    messages = [each.message for each in placed_messages(body)]
    choice = body.tool_choice
    return chat.Conversation(
        messages=tuple(messages),
        tools=tuple(tool.as_tool() for tool in body.tools or ()),
        tool_choice=_CHOICES[choice.type] if choice else ToolChoice.AUTO,
        named_tool=(choice.name if choice else None) or "",
        one_tool_call=bool(choice and choice.disable_parallel_tool_use),
        parse_answer=True,
        continue_final_message=bool(messages) and messages[-1].role is Role.ASSISTANT,
        template_arguments=_template_arguments(body),
    )


def placed_messages(body: PromptShape) -> list[Placed]:
    content = join_system_texts(body.system or [])
    system = [Placed(chat.Message(Role.SYSTEM, content), "system")] if content else []
    return [*system, *(each for number, message in enumerate(body.messages) for each in _messages(message, number))]


def _messages(message: MessageShape, number: int) -> Iterator[Placed]:
    """Splits a message of the body: first a message for each tool result, then one message for all other blocks."""
    place = f"messages[{number}]"
    blocks = [(block, f"{place}.content[{index}]") for index, block in enumerate(message.content)]
    for block, at in blocks:
        if isinstance(block, ToolResultBlock):
            result = join_texts(block.content or []) or ""
            yield Placed(chat.Message(Role.TOOL, result, tool_call_id=block.tool_use_id), at)
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    calls = [(block.as_call(), at) for block, at in blocks if isinstance(block, ToolUseBlock)]
    thoughts = [block.thinking for block in message.content if isinstance(block, ThinkingBlock)]
    if texts or calls or thoughts or not message.content:
        role = Role(message.role)
        said = chat.Message(
            role,
            join_system_texts(texts) if role is Role.SYSTEM else join_texts(texts),
            tool_calls=tuple(call for call, _ in calls),
            reasoning_content=chat.join_parts(thoughts),
        )
        yield Placed(said, place, [at for _, at in calls])


def _template_arguments(body: PromptShape) -> dict[str, Any]:
    """Returns the chat template's variables for whether and how much the model thinks."""
    arguments: dict[str, Any] = {}
    if body.thinking is not None:
        arguments["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None:
        arguments["reasoning_effort"] = body.output_config.effort
    return arguments


@dataclass(frozen=True, slots=True)
class MessageCall:
    request: GenerationRequest
    max_tokens: int
    stream: bool
    # Whether the answer's thinking blocks are empty.
    hides_thinking: bool


def understand(body: MessagesBody, tenant: str, clock: Clock = SYSTEM) -> MessageCall:
    request = GenerationRequest(
        prompt=conversation_of(body),
        request_id=f"msg_{clock.uuid_hex()}",
        model=body.model,
        sampling=SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            thinking_token_budget=body.thinking.budget_tokens if body.thinking else None,
        ),
        stop=StopCriteria(max_tokens=body.max_tokens, stop_strings=tuple(body.stop_sequences or ())),
        format=_format(body),
        tenant=tenant,
    )
    hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
    return MessageCall(request, body.max_tokens, bool(body.stream), hides_thinking)


def _format(body: MessagesBody) -> OutputFormat | None:
    asked = (body.output_config and body.output_config.format) or body.output_format
    return schema_format(asked.json_schema) if asked else None


def understand_count(body: PromptShape, tenant: str) -> GenerationRequest:
    """Makes a request from a body, to count the tokens of its prompt."""
    return GenerationRequest(prompt=conversation_of(body), model=body.model, tenant=tenant)
