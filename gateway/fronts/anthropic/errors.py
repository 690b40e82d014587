"""Makes errors in Anthropic's form from the one table of `blockyard.errors`.

    {"type": "error", "error": {"type", "message", "reason", "violations": [{"param", "message", "code"}]}}

`reason` and `violations` are Blockyard's own fields.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from fastapi import Response

from blockyard.errors import BlockyardError, Reason
from gateway.fronts.http_calls.errors import error_headers, format_parameter, rename_violations
from gateway.fronts.openai.errors import parameter
from gateway.observe.metrics import note_error

if TYPE_CHECKING:
    from collections.abc import Mapping


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Agents shorten a conversation when an error's message contains this text.
_PREFIXES = {Reason.PROMPT_TOO_LONG: "prompt is too long: "}
_NAMES = {"prompt": "messages", "stop": "stop_sequences", "thinking_token_budget": "thinking.budget_tokens"}
# A tool's `parameters` are called `input_schema` in this API.
_OF_TOOL = re.compile(r"(tools\[\d+\])\.parameters")


def rename(error: BlockyardError) -> BlockyardError:
    """Renames the fields in an error of the core to the parameters of the API."""
    return rename_violations(error, _parameter)


def _parameter(field: str) -> str:
    name = format_parameter(field, "output_config.format") or parameter(field, _NAMES)
    return _OF_TOOL.sub(r"\1.input_schema", name)


def error_type(status: int) -> str:
    return _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")


def error_object(error: BlockyardError) -> dict[str, Any]:
    """Counts an error, and returns the body of its answer, which is also the data of a failed stream's last event."""
    note_error(error.reason)
    fields: dict[str, Any] = {
        "type": error_type(error.http_status),
        "message": _PREFIXES.get(error.reason, "") + error.message,
        "reason": str(error.reason),
    }
    if error.violations:
        fields["violations"] = [
            {"param": each.field, "message": each.description, "code": str(each.reason)} for each in error.violations
        ]
    return {"type": "error", "error": fields}


def error_response(error: BlockyardError) -> Response:
    """Answers a call with an error. Headers say when to retry, if a retry makes sense."""
    return response(error_object(error), error.http_status, error_headers(error, "request-id"))


def response(body: dict[str, Any], status: int, headers: Mapping[str, str]) -> Response:
    """Makes the answer with a body. Tells the client not to retry, unless `headers` say otherwise."""
    return Response(json.dumps(body), status, {"x-should-retry": "false", **headers}, media_type="application/json")
