"""Makes errors for all HTTP fronts: parameters under the client's names, and headers on when to try again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.telemetry import EventLogger
from gateway.call_context import current_call
from gateway.request import is_request_id

if TYPE_CHECKING:
    from collections.abc import Callable

log = EventLogger(__name__)

_FORMAT, _SCHEMA = "format", "format.json_schema"


def client_error(error: Exception) -> BlockyardError:
    """Returns the error that a client may see; an unexpected one is logged, and becomes a BUG."""
    if isinstance(error, BlockyardError):
        return error
    log.exception("a call failed")
    return BlockyardError(Reason.BUG, "internal error; the server's log has more")


def rename_violations(error: BlockyardError, name_of: Callable[[str], str]) -> BlockyardError:
    """Renames the fields of an error of the core, which are paths in the proto; its message is made of them again."""
    if not error.violations:
        return error
    renamed = invalid(Violation(name_of(each.field), each.description, each.reason) for each in error.violations)
    return BlockyardError(
        error.reason, renamed.message, renamed.violations, error.retry_after_seconds, dict(error.metadata)
    )


def format_parameter(field: str, name: str) -> str | None:
    """Returns the parameter of a field of the core that is about the form; None for other fields.

    `name`: of the parameter that has `schema` in it.
    """
    if field == _FORMAT or field.startswith(_FORMAT + "."):
        return name + field.removeprefix(_SCHEMA).removeprefix(_FORMAT)
    return None


def error_headers(error: BlockyardError, name: str = "x-request-id") -> dict[str, str]:
    """Returns the headers of an answer that is an error: what its request is named, and when to try again.

    `name`: of the header for the request, which is absent of a body that led to none. Where the same call would fail
    again, none says when; beside Retry-After go those that the clients of OpenAI and Anthropic obey.
    """
    request_id = current_call().request_id
    headers = {name: request_id} if is_request_id(request_id) else {}
    if error.retry_after_seconds is None:
        return headers
    return {
        **headers,
        "x-should-retry": "true",
        "retry-after": str(math.ceil(error.retry_after_seconds)),
        "retry-after-ms": str(math.ceil(error.retry_after_seconds * 1000)),
    }
