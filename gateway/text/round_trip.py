"""Checks a model's chat template against its dialect: the scanner must find the calls that the template writes.

`python -m gateway.text.round_trip FOLDER TEMPLATE DIALECT` prints the result as JSON for `blockyard doctor`, and how
messages are rearranged whose order of roles the template does not accept. TEMPLATE and DIALECT may be empty.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.chat import Conversation, Message, Role, Tool, ToolCall
from blockyard.errors import BlockyardError
from gateway.chat import Renderer, prompt_of
from gateway.dialects.scanner import Scanner
from gateway.text.tokenizer_files import load_tokenizer

if TYPE_CHECKING:
    from gateway.dialects.dialect import Dialect
    from gateway.text.tokenizer import Tokenizer

_SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}}
_TOOLS = tuple(Tool(name, "Looks it up.", json.dumps(_SCHEMA)) for name in ("look_up", "forecast"))
_QUESTION = Message(Role.USER, "How is the weather?")
_ARGUMENTS = {"place": 'St. John\'s, "NL" é', "days": 3}


class RoundTrip(NamedTuple):
    """The result of the check. `problem`: empty if the scanner found the calls."""

    dialect: str
    problem: str = ""


def try_round_trip(renderer: Renderer, dialect: Dialect) -> RoundTrip:
    """Renders a message with a tool call, once for each tool, and checks that the scanner reads the call back."""
    arguments = json.dumps(_ARGUMENTS, ensure_ascii=False)
    for tool in _TOOLS:
        answer = Message(Role.ASSISTANT, "", tool_calls=(ToolCall(tool.name, arguments, "a1b2c3d4e"),))
        try:
            rendered = _render(renderer, (_QUESTION, answer), adds=False)
            prompt = _render(renderer, (_QUESTION,), adds=True)
        except BlockyardError as error:
            return RoundTrip(dialect.name, error.message)
        written = rendered[_num_common(rendered, prompt) :]
        if (found := _read(written, dialect)) != [(tool.name, _ARGUMENTS)]:
            return RoundTrip(dialect.name, f"of a call that the template writes {found or 'nothing'} comes out")
    return RoundTrip(dialect.name)


def _num_common(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def _render(renderer: Renderer, messages: tuple[Message, ...], *, adds: bool) -> str:
    return prompt_of(Conversation(messages, _TOOLS, add_generation_prompt=adds), renderer)


def _read(written: str, dialect: Dialect) -> list[tuple[str, object]]:
    scanner = Scanner(dialect, {tool.name: tool.schema for tool in _TOOLS})
    calls: dict[int, list[str]] = {}
    for piece in (each for parts in scanner.push(written, is_last=True) for each in parts.calls):
        name, arguments = calls.get(piece.index, ["", ""])
        calls[piece.index] = [name + piece.name, arguments + piece.arguments]
    return [(name, _value(arguments)) for name, arguments in calls.values()]


def _value(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def main(arguments: list[str]) -> None:
    """Prints one line of JSON: a model folder's dialect, the problem found, and the changes to orders of roles."""
    folder, template, dialect = arguments
    file = Path(template) if template else None
    try:
        tokenizer = load_tokenizer(Path(folder), chat_template_file=file, dialect=dialect or "auto")
    except BlockyardError as error:
        sys.exit(error.message)
    roles = tokenizer.template_roles.describe() if tokenizer.template_roles else None
    print(json.dumps({**_find(tokenizer)._asdict(), "roles": roles}))  # noqa: T201 - a program's answer


def _find(tokenizer: Tokenizer) -> RoundTrip:
    dialect = tokenizer.dialect
    if dialect is None:
        return RoundTrip("", "" if tokenizer.has_chat_template else "there is no chat template")
    return try_round_trip(tokenizer, dialect) if dialect.calls else RoundTrip(dialect.name)


if __name__ == "__main__":
    main(sys.argv[1:])
