"""Reduces the schemas of tools to the keywords that a grammar supports. Compiles nothing itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from blockyard.contract.chat import Conversation
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from gateway.grammars.compiling.compilers import SPENT
from gateway.grammars.problems import Problem, complain_of, schema_text
from gateway.grammars.schemas import find_place, read_schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.dialects.answer_parser import ToolSchema
    from gateway.request import GenerationRequest

_FIELD = "conversation.tools"


def schema_places(request: GenerationRequest) -> list[str]:
    """Returns the paths in the request of the schemas of all tools that the model may call."""
    tools, prompt = request.parsing.tools if request.parsing else (), request.prompt
    if not isinstance(prompt, Conversation):
        return [_FIELD] * len(tools)
    names = {tool.name for tool in tools}
    return [f"{_FIELD}[{number}].parameters" for number, tool in enumerate(prompt.tools) if tool.name in names]


def followed(
    tool: ToolSchema,
    complain: Callable[[str], str],
    place: str = _FIELD,
    is_spent: Callable[[], bool] = lambda: False,
) -> ToolSchema:
    """Returns a tool with a schema that llguidance can enforce: unsupported parts of the schema are removed.

    Raises BlockyardError for a strict tool with unsupported parts, and if the processor time is used up.

    Args:
        tool: the tool.
        complain: returns the compiler's error for a grammar, or an empty text if the grammar is valid.
        place: the path of the tool's schema in the request.
        is_spent: returns whether the request has used up its processor time.
    """
    _require_time(is_spent)
    try:
        schema = read_schema(tool.parameters or "{}", place)
    except BlockyardError:
        if tool.strict:
            raise
        return tool._replace(parameters="")
    # The check of the conversation refuses a schema that is not an object.
    if isinstance(schema, bool):
        return tool
    problem = _complain_of_arguments(schema, complain)
    if problem is None:
        return tool
    if tool.strict:
        path = problem.path or find_place(schema, problem.complaint, lambda part: complain(schema_text(part)))
        raise invalid([Violation(f"{place}{path}", f"tool {tool.name!r}: {problem.complaint}", problem.reason)])
    return tool._replace(parameters=json.dumps(_loosened(schema, complain, is_spent)))


def _require_time(is_spent: Callable[[], bool]) -> None:
    if is_spent():
        # Stop here: the request would be refused in the end, after thousands of further checks.
        raise invalid([Violation(_FIELD, SPENT, Reason.GRAMMAR_TOO_COMPLEX)])


def _complain_of_arguments(schema: dict[str, Any], complain: Callable[[str], str]) -> Problem | None:
    told = schema.get("type", "object")
    if "object" not in (told if isinstance(told, list) else [told]):
        return Problem("must be object, which the arguments of a call are", Reason.FIELD_INVALID, ".type")
    return complain_of({**schema, "type": "object"}, complain)


def _loosened(schema: dict[str, Any], complain: Callable[[str], str], is_spent: Callable[[], bool]) -> dict[str, Any]:
    """Returns a schema of the same arguments, each with its own schema, its type alone, or no constraint.

    The first of these three that llguidance supports is kept. If the result is not supported, any object is allowed.
    """

    def with_properties(properties: dict[str, Any]) -> dict[str, Any]:
        kept = {name: schema[name] for name in ("$defs", "definitions", "required") if name in schema}
        return {"type": "object", "properties": properties, **kept}

    def can_follow(loosened: dict[str, Any]) -> bool:
        _require_time(is_spent)
        return complain_of(loosened, complain) is None

    loosened: dict[str, Any] = {}
    properties = schema.get("properties")
    for name, part in properties.items() if isinstance(properties, dict) else ():
        choices = (part, {"type": part.get("type")} if isinstance(part, dict) else True)
        loosened[name] = next((each for each in choices if can_follow(with_properties({name: each}))), {})
    return with_properties(loosened) if can_follow(with_properties(loosened)) else {"type": "object"}
