"""Makes errors in OpenAI's form from the one table of `blockyard.errors`.

    {"error": {"message", "type", "param", "code", "reason", "violations": [{"param", "message", "code"}]}}

`reason` is Blockyard's. `code` equals `reason`, except for PROMPT_TOO_LONG: client libraries look for OpenAI's
`context_length_exceeded`. `param` is the first violation's parameter under OpenAI's or vLLM's name. Besides
Retry-After, errors have the headers `retry-after-ms` and `x-should-retry`, which OpenAI's own clients obey.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from fastapi import Response

from blockyard.errors import BlockyardError, Reason
from gateway.fronts.http_calls.bodies import BODY
from gateway.fronts.http_calls.errors import error_headers, rename_violations
from gateway.observe.metrics import note_error

if TYPE_CHECKING:
    from collections.abc import Mapping

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
# Agents and routers look for these codes to shorten a chat or to choose a model with a larger context. They search the
# exception's text, which since version 3 of OpenAI's package is only the message: so the message ends with the code.
_CODES = {Reason.PROMPT_TOO_LONG: "context_length_exceeded"}
# Parameters of the API by the core's field names, which are those of the proto without their section. Fields that are
# missing here have the same name in both.
_PARAMETERS = {
    "text": "prompt",
    "token_ids": "prompt",
    "stop_strings": "stop",
    "include_stop_in_output": "include_stop_str_in_output",
    "width": "best_of",
    "template_arguments": "chat_template_kwargs",
    "positions": "Last-Event-ID",
    "named_tool": "tool_choice",
    "allowed_tools": "tool_choice",
    "one_tool_call": "parallel_tool_calls",
}
_PATH = re.compile(r"(?:sampling\.|stop\.|beam_search\.|conversation\.)?(\w+)(.*)", re.DOTALL)
# Fields of a tool and a call in the proto are fields of their function in the API.
_OF_FUNCTION = re.compile(r"((?:tools|tool_calls)\[\d+\])\.(name|description|parameters|strict|arguments)")


def rename(error: BlockyardError, names: Mapping[str, str]) -> BlockyardError:
    """Renames the fields in an error of the core to the parameters that the client used.

    Args:
        error: an error whose violations have paths in the proto as fields.
        names: this call's own names, which precede the general ones: for example, `prompt` is `messages` in a chat.
    """
    return rename_violations(error, lambda field: _OF_FUNCTION.sub(r"\1.function.\2", parameter(field, names)))


def parameter(field: str, names: Mapping[str, str]) -> str:
    """Returns the API's parameter for a field of the core, for APIs whose tools have no inner object `function`."""
    for path, name in names.items():
        if "." in path and field.startswith(path):
            return name + field[len(path) :]
    match = _PATH.fullmatch(field)
    if match is None:
        return field
    name = _PARAMETERS.get(match[1], match[1])
    return names.get(name, name) + match[2]


def error_object(error: BlockyardError) -> dict[str, Any]:
    """Counts an error, and returns the value of "error" for an answer's body or a failed stream's last event."""
    note_error(error.reason)
    return make_error_fields(error)


def make_error_fields(error: BlockyardError) -> dict[str, Any]:
    """Returns the fields of an error without counting it, for a single failed choice in a complete answer."""
    violations = [
        {"param": None if violation.field == BODY else violation.field}
        | {"message": violation.description, "code": str(violation.reason)}
        for violation in error.violations
    ]
    code = _CODES.get(error.reason)
    fields: dict[str, Any] = {
        "message": f"{error.message} ({code})" if code else error.message,
        "type": _TYPES.get(error.http_status, "server_error" if error.http_status >= 500 else "invalid_request_error"),
        "param": violations[0]["param"] if violations else None,
        "code": code or str(error.reason),
        "reason": str(error.reason),
    }
    return fields | ({"violations": violations} if violations else {})


def error_response(error: BlockyardError) -> Response:
    """Answers a call with an error. Headers say when to retry, if a retry makes sense."""
    return response(error_object(error), error.http_status, error_headers(error))


def response(fields: dict[str, Any], status: int, headers: Mapping[str, str]) -> Response:
    """Makes the answer for a value of "error". Tells the client not to retry, unless `headers` say otherwise."""
    return Response(
        json.dumps({"error": fields}), status, {"x-should-retry": "false", **headers}, media_type="application/json"
    )
