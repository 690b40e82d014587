"""The tools of a body: their types, the supported kinds, and their names for the model.

A namespace groups functions. Chat templates know no namespaces: the prompt shows each function as `namespace__name`,
and the answer separates the namespace and the name again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast

from pydantic import AfterValidator, BeforeValidator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.contract import chat
from blockyard.errors import Violation, invalid
from gateway.fronts.http_calls.body_types import BY_TYPE, Neutral, Shape, at_most, unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


def _only(*served: str, which: str) -> BeforeValidator:
    """Refuses other types of tools, such as those that OpenAI's servers run; the error names the type.

    `which`: a description of the supported types.
    """

    def check(value: Any) -> Any:
        kind = cast("dict[str, Any]", value).get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in served:
            raise unsupported(f"is of the type {kind!r}, which is not supported: only {which} are")
        return value

    return BeforeValidator(check)


class ToolShape(Shape):
    """A function that the client runs. In OpenAI's API, `strict` is true by default; here it is false."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Annotated[Any, Neutral(["direct"])] = None
    defer_loading: Annotated[Any, Neutral(False)] = None
    is_async: Annotated[Any, Neutral(False), Field(alias="async")] = None
    output_schema: dict[str, Any] | None = None


def _check_not_empty(value: str) -> str:
    if not value:
        raise PydanticCustomError("empty", "must not be empty")
    return value


class NamespaceShape(Shape):
    """A group of functions. The prompt shows its description before the description of each function."""

    type: Literal["namespace"]
    name: Annotated[str, AfterValidator(_check_not_empty), Field(json_schema_extra={"minLength": 1})]
    description: str
    tools: Annotated[
        list[Annotated[ToolShape, _only("function", which="functions")]],
        Field(fail_fast=True),
        at_most(chat.MAX_TOOLS),
    ]


AnyTool = ToolShape | NamespaceShape


def _check_number(value: Any) -> Any:
    """Limits the functions of all namespaces together, before they are validated."""
    tools = cast("list[Any]", value) if isinstance(value, list) else []
    inner = (cast("dict[str, Any]", tool).get("tools") for tool in tools if isinstance(tool, dict))
    if sum(len(cast("list[Any]", each)) for each in inner if isinstance(each, list)) > chat.MAX_TOOLS:
        raise PydanticCustomError("too_many", "has more than {limit} functions", {"limit": chat.MAX_TOOLS})
    return cast("Any", value)


_Tool = Annotated[
    Annotated[ToolShape, Tag("[function]")] | Annotated[NamespaceShape, Tag("[namespace]")],
    BY_TYPE,
    _only("function", "namespace", which="functions and namespaces of them"),
]
Tools = Annotated[list[_Tool], Field(fail_fast=True), BeforeValidator(_check_number), at_most(chat.MAX_TOOLS)] | None


class NamedTool(Shape):
    """The function that the model must call. A function in a namespace is given by its name or `namespace__name`."""

    type: Literal["function"]
    name: str


class AllowedTools(Shape):
    """The functions that the model may call (`auto`) or must call one of (`required`). The prompt shows all tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1), at_most(chat.MAX_TOOLS)]


def check_tool_choice(value: Any) -> Any:
    """Parses a tool choice, and refuses unsupported kinds of tools; the error names the kind."""
    # Not a union: pydantic would report a violation for each of its branches.
    if value is None or value in ("none", "auto", "required"):
        return value
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    is_several = fields.get("type") == "allowed_tools"
    named = fields.get("tools") if is_several else [fields]
    for each in cast("list[Any]", named)[: chat.MAX_TOOLS] if isinstance(named, list) else ():
        kind = cast("dict[str, Any]", each).get("type") if isinstance(each, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise unsupported(f"the type {kind!r} is not supported")
    try:
        return (AllowedTools if is_several else NamedTool).model_validate(value)
    except ValidationError:
        one = "{'type': 'function', 'name': …}"
        several = f"{{'type': 'allowed_tools', 'mode': 'auto' or 'required', 'tools': [{one}, …]}}"
        message = several if is_several else f"'none', 'auto', 'required', {one} or {several}"
        raise PydanticCustomError("tool_choice", "should be {form}", {"form": message}) from None


def model_name(name: str, namespace: str | None) -> str:
    """Returns a function's name for the model; an empty text if the function has no name."""
    return f"{namespace}__{name}" if namespace and name else name


class PlacedTool(NamedTuple):
    """A function, its namespace, and its path in the body."""

    function: ToolShape
    namespace: NamespaceShape | None
    place: str

    @property
    def model_name(self) -> str:
        """The function's name for the model."""
        return model_name(self.function.name, self.namespace.name if self.namespace else None)

    def as_tool(self) -> chat.Tool:
        function = self.function
        descriptions = [self.namespace.description if self.namespace else "", function.description or ""]
        parameters = "" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False)
        # OpenAI's default is strict if possible; here that would refuse schemas that no grammar supports.
        strict = bool(function.strict)
        return chat.Tool(self.model_name, "\n".join(filter(None, descriptions)), parameters, strict=strict)


def placed_tools(tools: Iterable[AnyTool]) -> Iterator[PlacedTool]:
    """Yields the functions of a body in their order, with their paths."""
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if isinstance(tool, ToolShape):
            yield PlacedTool(tool, None, place)
        else:
            for inner, function in enumerate(tool.tools):
                yield PlacedTool(function, tool, f"{place}.tools[{inner}]")


def check_names(tools: Iterable[PlacedTool]) -> None:
    """Raises BlockyardError FIELD_INVALID if a function in a namespace has the same name for the model as another."""
    known: dict[str, PlacedTool] = {}
    violations: list[Violation] = []
    for tool in tools:
        other = known.setdefault(tool.model_name, tool)
        if other is not tool and tool.model_name and (tool.namespace or other.namespace):
            same = f"is also the name of {other.place}: the model would know both as {tool.model_name!r}"
            violations.append(Violation(f"{tool.place}.name", same))
    if violations:
        raise invalid(violations)


def check_sizes(tools: Iterable[PlacedTool]) -> None:
    """Raises BlockyardError FIELD_INVALID if the repeated texts of namespaces exceed the size of a body.

    The prompt repeats the name and the description of a namespace for each of its functions.
    """
    size = sum(len(tool.namespace.name) + len(tool.namespace.description) for tool in tools if tool.namespace)
    if size > PUBLIC_MESSAGE_BYTES:
        description = f"names and descriptions of namespaces, with each function again, have {size} characters"
        raise invalid([Violation("tools", f"{description}, at most {PUBLIC_MESSAGE_BYTES} are taken")])


def chosen_names(chosen: Iterable[NamedTool], tools: Iterable[PlacedTool]) -> tuple[str, ...]:
    """Returns the names for the model of the functions in a tool choice.

    Raises BlockyardError FIELD_INVALID if several namespaces have a function of the given name.
    """
    by_model_name: dict[str, PlacedTool] = {}
    by_name: dict[str, list[PlacedTool]] = {}
    for tool in tools:
        by_model_name[tool.model_name] = tool
        by_name.setdefault(tool.function.name, []).append(tool)

    def find(name: str) -> str:
        found = by_name.get(name, [])
        if name in by_model_name or not found:
            return name
        if len(found) > 1:
            one, other = found[:2]
            same = f"{name!r} is the name of {one.place} and of {other.place}"
            give = f"give {one.model_name!r} or {other.model_name!r}"
            raise invalid([Violation("tool_choice", f"{same}: {give}")])
        return found[0].model_name

    return tuple(find(each.name) for each in chosen)


class FunctionName(NamedTuple):
    """The client's name for a function in a namespace."""

    name: str
    namespace: str


def function_names(tools: Iterable[Mapping[str, Any]]) -> dict[str, FunctionName]:
    """Returns the namespace and name of each function in a namespace, by its name for the model.

    `tools`: the answer's copy of the tools, since every gateway has this copy for a background response.
    """
    names = (
        FunctionName(function["name"], tool["name"])
        for tool in tools
        if tool["type"] == "namespace"
        for function in tool["tools"]
    )
    return {model_name(*each): each for each in names}
