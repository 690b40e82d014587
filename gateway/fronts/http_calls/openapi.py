"""Describes routes for an OpenAPI document: bodies, answers, streams of events, and errors by their reasons.

Knows no route, and no shape by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockyard.errors import TABLE, Reason
from blockyard.headers import TENANT_KEY, TENANT_PATTERN
from gateway.naming import REQUEST_ID_PATTERN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gateway.fronts.http_calls.body_types import Shape

JSON = "application/json"
EVENTS = "text/event-stream"
# Whoever calls: what the server may answer to anything at all.
ALWAYS = (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED, Reason.BUG)
_UNSUPPORTED_MEDIA_TYPE = 415
_RETRIED = {429, 503}
_RETRY_AFTER = {
    "Retry-After": {"description": "seconds until it makes sense to try again", "schema": {"type": "integer"}}
}


@dataclass(frozen=True, slots=True)
class ApiShapes:
    """The shapes of an API.

    Attributes:
        models: that its routes refer to.
        names: of its bodies whose parameters have the core's ranges, what they call the core's fields where this
            differs from the general names.
        forms: its answers to GET at paths of another API, which are for calls with a header.
    """

    models: tuple[type[Shape], ...]
    names: Mapping[type[Shape], Mapping[str, str]] = field(default_factory=dict[Any, Any])
    forms: Mapping[str, OtherForm] = field(default_factory=dict[str, "OtherForm"])


@dataclass(frozen=True, slots=True)
class OtherForm:
    """Answers of another form. `parameter`: the header that asks for them."""

    parameter: dict[str, Any]
    answer: type[Shape]
    failure: type[Shape]

    def describe(self, operation: dict[str, Any]) -> None:
        """Adds them to an operation of the document."""
        operation.setdefault("parameters", []).append(self.parameter)
        for status, told in operation["responses"].items():
            other = ref(self.answer if status == "200" else self.failure)
            told["content"] = {JSON: {"schema": {"anyOf": [told["content"][JSON]["schema"], other]}}}


def ref(model: type[Shape]) -> dict[str, str]:
    """Returns the reference to a shape."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def header(name: str, description: str, pattern: str = "") -> dict[str, Any]:
    """Describes a header that a request may have."""
    schema = {"type": "string", "pattern": f"^{pattern}$"} if pattern else {"type": "string"}
    return {"in": "header", "name": name, "required": False, "description": description, "schema": schema}


def call_id(name: str, description: str) -> dict[str, Any]:
    """Describes the part of a path that names a call."""
    schema = {"type": "string", "pattern": f"^{REQUEST_ID_PATTERN}$"}
    return {"in": "path", "name": name, "required": True, "description": description, "schema": schema}


TENANT = header(TENANT_KEY, "whose call it is", TENANT_PATTERN)


def documented(
    answer: type[Shape],
    reasons: Iterable[Reason],
    *,
    failure: type[Shape],
    bodies: tuple[type[Shape], ...] = (),
    parameters: tuple[dict[str, Any], ...] = (),
) -> dict[str, Any]:
    """Returns the arguments of `add_api_route` that document a route.

    Args:
        answer: of success.
        reasons: of its errors.
        failure: the body of all other answers.
        bodies: that it takes, one of them.
        parameters: of its headers and its path.
    """
    extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if bodies:
        refs = [ref(body) for body in bodies]
        extra["requestBody"] = {"required": True, **_content(refs[0] if len(refs) == 1 else {"oneOf": refs})}
    failures = _failures(failure, reasons, *([_UNSUPPORTED_MEDIA_TYPE] if bodies else []))
    return {"responses": {200: {"description": "done", **_content(ref(answer))}, **failures}, "openapi_extra": extra}


def data_of(*events: type[Shape]) -> dict[str, Any]:
    """Describes the data of an event of a stream: one of several, as JSON."""
    return {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": [ref(each) for each in events]}}


def streamed(described: dict[str, Any], event: dict[str, Any], *, only: bool = False) -> dict[str, Any]:
    """Adds that the answer may be a stream, or is nothing else. What is said of a stream is said of each event."""
    content = described["responses"][200]["content"]
    content[EVENTS] = {"schema": event}
    if only:
        del content[JSON]
    return described


def named_events(*events: type[Shape]) -> dict[str, Any]:
    """Describes the events of a stream that have names."""
    return {
        "type": "object",
        "description": "The name of an event is the type in its data.",
        "required": ["event", "data"],
        "properties": {"event": {"type": "string"}, "data": data_of(*events)},
    }


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {JSON: {"schema": schema}}}


def _failures(failure: type[Shape], reasons: Iterable[Reason], *others: int) -> dict[int | str, dict[str, Any]]:
    """Describes the answers of failures, one status for several reasons."""
    causes: dict[int, list[str]] = {}
    for reason in reasons:
        causes.setdefault(TABLE[reason].http_status, []).append(reason)
    causes |= {status: ["the body is not JSON"] for status in others}
    return {
        status: {"description": ", ".join(names), **_content(ref(failure))}
        | ({"headers": _RETRY_AFTER} if status in _RETRIED else {})
        for status, names in sorted(causes.items())
    }
