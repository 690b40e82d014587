"""Describes routes for an OpenAPI document: bodies, and answers with their statuses and the reasons of errors.

An answer is only described as an object; its description links to a page that lists the fields. Knows no route.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockyard.errors import TABLE, Reason
from blockyard.headers import TENANT_KEY, TENANT_PATTERN
from gateway.request import REQUEST_ID_PATTERN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gateway.fronts.http_calls.body_types import Shape

JSON = "application/json"
EVENTS = "text/event-stream"
# Reasons for which any call may fail.
ALWAYS = (Reason.UNAUTHENTICATED, Reason.PERMISSION_DENIED, Reason.BUG)
_UNSUPPORTED_MEDIA_TYPE = 415
_RETRIED = {429, 503}
_RETRY_AFTER = {
    "Retry-After": {"description": "seconds until it makes sense to try again", "schema": {"type": "integer"}}
}
_OBJECT = {JSON: {"schema": {"type": "object"}}}


@dataclass(frozen=True, slots=True)
class ApiBodies:
    """The bodies of an API.

    Attributes:
        models: the bodies' types.
        names: for each body whose parameters have the core's ranges, its names for the core's fields, where they differ
            from the general names.
    """

    models: tuple[type[Shape], ...]
    names: Mapping[type[Shape], Mapping[str, str]] = field(default_factory=dict[Any, Any])


def ref(model: type[Shape]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def header(name: str, description: str, pattern: str = "") -> dict[str, Any]:
    schema = {"type": "string", "pattern": f"^{pattern}$"} if pattern else {"type": "string"}
    return {"in": "header", "name": name, "required": False, "description": description, "schema": schema}


def call_id(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "string", "pattern": f"^{REQUEST_ID_PATTERN}$"}
    return {"in": "path", "name": name, "required": True, "description": description, "schema": schema}


TENANT = header(TENANT_KEY, "the tenant that calls", TENANT_PATTERN)


def documented(
    answer: str,
    reasons: Iterable[Reason],
    *,
    bodies: tuple[type[Shape], ...] = (),
    parameters: tuple[dict[str, Any], ...] = (),
    forms: tuple[str, ...] = (JSON,),
) -> dict[str, Any]:
    """Returns the arguments of `add_api_route` that document a route.

    Args:
        answer: the description of the answer with status 200, with a link to a page that lists its fields.
        reasons: the reasons for which a call may fail.
        bodies: the types of which the request's body must have one.
        parameters: descriptions of the headers and of the path's parts.
        forms: the content types of the answer with status 200: `JSON`, `EVENTS`, or both.
    """
    extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if bodies:
        refs = [ref(body) for body in bodies]
        schema = refs[0] if len(refs) == 1 else {"oneOf": refs}
        extra["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    content = {form: _OBJECT.get(form, {}) for form in forms}
    failures = _failures(reasons, *([_UNSUPPORTED_MEDIA_TYPE] if bodies else []))
    return {"responses": {200: {"description": answer, "content": content}, **failures}, "openapi_extra": extra}


def _failures(reasons: Iterable[Reason], *others: int) -> dict[int | str, dict[str, Any]]:
    """Describes the answers of failures by status; several reasons may share a status."""
    causes: dict[int, list[str]] = {}
    for reason in reasons:
        causes.setdefault(TABLE[reason].http_status, []).append(reason)
    causes |= {status: ["the body is not JSON"] for status in others}
    return {
        status: {"description": ", ".join(names), "content": _OBJECT}
        | ({"headers": _RETRY_AFTER} if status in _RETRIED else {})
        for status, names in sorted(causes.items())
    }
