"""Decides how the answer to a conversation is parsed. `gateway.dialects` parses it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.contract.chat import Conversation, ToolChoice
from gateway.dialects.answer_parser import AnswerParser, ParsingRule, ToolSchema
from gateway.dialects.dialect import AnswerContext, Dialect
from gateway.dialects.table import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.request import GenerationRequest
    from gateway.text.tokenizer import Tokenizer

_UNPARSED = "The prompt lists the tools if the chat template has a place for them, and calls stay in the answer's text"
UNKNOWN_DIALECT = f"tools: the format of this model's tool calls is unknown. {_UNPARSED}, not in tool_calls"
NOT_PARSED = f"tools: the request does not ask for parse_answer. {_UNPARSED}"
# If a prompt ends with the marker that begins reasoning, the marker is within this many last tokens.
_NUM_LAST_TOKENS = 32


def with_parsing(request: GenerationRequest, dialect: Dialect | None) -> GenerationRequest:
    """Adds the parsing rule to a conversation's request, or a warning if its tool calls are not parsed."""
    prompt = request.prompt
    if not isinstance(prompt, Conversation):
        return request
    tools = () if prompt.tool_choice is ToolChoice.NONE else prompt.tools
    if allowed := (prompt.named_tool,) if prompt.named_tool else prompt.allowed_tools:
        tools = tuple(tool for tool in tools if tool.name in allowed)
    schemas = tuple(ToolSchema(tool.name, tool.schema, tool.strict) for tool in tools)
    name = dialect.name if dialect and prompt.parse_answer else ""
    must_call = prompt.tool_choice is ToolChoice.REQUIRED
    if tools and (dialect is None or dialect.calls is None or not prompt.parse_answer):
        warning = NOT_PARSED if dialect and dialect.calls and not prompt.parse_answer else UNKNOWN_DIALECT
        request = replace(request, warnings=(*request.warnings, warning))
    is_limited = bool(allowed) and len(tools) < len(prompt.tools)
    rule = ParsingRule(name, schemas, prompt.one_tool_call, must_call, is_limited)
    # A request whose answer needs a grammar but cannot be parsed is refused later, with the reason.
    return replace(request, parsing=rule) if name or rule.needs_grammar else request


def end_of(prompt_token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Returns the text of a prompt's last tokens, without white space at its end."""
    return tokenizer.decode(prompt_token_ids[-_NUM_LAST_TOKENS:], skip_special_tokens=False).rstrip()


def _is_reasoning_open(dialect: Dialect, prompt_token_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    begins = dialect.reasoning.begins if dialect.reasoning else ()
    return end_of(prompt_token_ids, tokenizer).endswith(begins)


def answer_context_of(
    request: GenerationRequest, prompt_token_ids: Sequence[int], tokenizer: Tokenizer
) -> AnswerContext | None:
    """Returns the context for grammars of an answer; None for an answer that is not parsed."""
    dialect = BY_NAME.get(request.parsing.dialect) if request.parsing else None
    if dialect is None:
        return None
    is_open = _is_reasoning_open(dialect, prompt_token_ids, tokenizer)
    # If the prompt ends with the end of reasoning, the answer has no reasoning.
    ends = dialect.reasoning.ends if dialect.reasoning else ()
    may_think = tokenizer.shows_reasoning and not end_of(prompt_token_ids, tokenizer).endswith(ends)
    return AnswerContext(dialect, is_open, tokenizer.special_ids, may_think=is_open or may_think)


def parsers_of(
    rule: ParsingRule, request_id: str, prompt_token_ids: Sequence[int], tokenizer: Tokenizer
) -> Callable[[int], AnswerParser] | None:
    """Returns a function that makes the parser of a sequence from its index; None if the answer is not parsed.

    The answer is not parsed either if the rule names a dialect that this version of the gateway does not know.
    """
    dialect = BY_NAME.get(rule.dialect)
    if dialect is None:
        return None
    is_open = _is_reasoning_open(dialect, prompt_token_ids, tokenizer)
    return lambda index: AnswerParser(rule, request_id, index, reasoning_is_open=is_open)
