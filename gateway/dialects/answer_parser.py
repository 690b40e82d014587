"""Parses the answer of one request into text, reasoning and tool calls, and gives the calls their ids."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from blockyard.contract.events import ToolCallDelta
from gateway.dialects.scanner import CallPiece, Scanner, TextKind
from gateway.dialects.table import BY_NAME


class ToolSchema(NamedTuple):
    """A tool that may be called. `parameters`: a JSON schema as text, or empty for none."""

    name: str
    parameters: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ParsingRule:
    """How the answer of a request is parsed.

    Attributes:
        dialect: the name of the model's dialect.
        tools: the tools that the model may call; empty: calls are text.
        one_call: whether everything after the first call is left out.
        must_call: whether the model must call one of the tools.
        is_limited: whether the prompt also lists tools that the model must not call.
    """

    dialect: str
    tools: tuple[ToolSchema, ...] = ()
    one_call: bool = False
    must_call: bool = False
    is_limited: bool = False

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar must constrain the answer's tool calls."""
        return self.must_call or self.is_limited or any(tool.strict for tool in self.tools)


class ParsedPiece(NamedTuple):
    """A piece of an answer. `num_bytes_behind`: UTF-8 bytes of the answer that were read beyond this piece."""

    text: str
    reasoning: str
    calls: tuple[ToolCallDelta, ...]
    num_bytes_behind: int = 0


class AnswerParser:
    """Parses one sequence from its beginning.

    Args:
        rule: the parsing rule of the sequence's request.
        request_id: the request's id; the ids of calls are derived from it and from `sequence`.
        sequence: the sequence's index.
        reasoning_is_open: whether the prompt ends with the marker that begins reasoning.
    """

    def __init__(self, rule: ParsingRule, request_id: str, sequence: int, *, reasoning_is_open: bool) -> None:
        self._dialect = BY_NAME[rule.dialect]
        self._source = f"{request_id}\0{sequence}\0"
        self._scanner = Scanner(
            self._dialect,
            {tool.name: tool.parameters for tool in rule.tools},
            reasoning_is_open=reasoning_is_open,
            one_call=rule.one_call,
        )

    @property
    def dialect(self) -> str:
        return self._dialect.name

    @property
    def calls_tools(self) -> bool:
        """Whether the answer has at least one complete call."""
        return self._scanner.num_calls > 0

    @property
    def num_invalid_calls(self) -> int:
        """The number of texts that began like a call but were malformed or ended too early."""
        return self._scanner.num_invalid_calls

    def kind_of(self, text: str) -> TextKind | None:
        """Returns the kind of the next piece if all of it surely is of one kind; None if it must be pushed.

        Most pieces need no push.
        """
        return self._scanner.kind_of(text)

    def push(self, text: str, *, is_last: bool) -> list[ParsedPiece]:
        """Takes more of the answer's text, and returns the output that is now certain, as pieces in order."""
        return [
            ParsedPiece(parts.text, parts.reasoning, tuple(map(self._name, parts.calls)), parts.num_bytes_behind)
            for parts in self._scanner.push(text, is_last=is_last)
        ]

    def _name(self, piece: CallPiece) -> ToolCallDelta:
        call_id = piece.call_id
        if piece.name and not call_id:
            digest = hashlib.sha256(f"{self._source}{piece.index}".encode()).hexdigest()
            call_id = self._dialect.call_id.format(digest=digest, name=piece.name, index=piece.index)
        return ToolCallDelta(piece.index, call_id, piece.name, piece.arguments)
