"""Makes errors for all HTTP fronts: violations under the client's parameter names, and headers about retries."""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.telemetry import EventLogger
from gateway.call_context import current_call
from gateway.request import is_request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from blockyard.contract import chat


log = EventLogger(__name__)

_OF_CONVERSATION = re.compile(r"conversation\.(?:messages|tools)\[.*", re.DOTALL)

_OF_TOOL = re.compile(r"conversation\.tools\[(\d+)\](.*)", re.DOTALL)

_OF_MESSAGE = re.compile(r"conversation\.messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(.*)", re.DOTALL)


class Placed(NamedTuple):
    """A message, with the paths in the body of the message (`place`) and of its tool calls (`calls`)."""

    message: chat.Message
    place: str
    calls: Sequence[str] = ()


@contextmanager
def naming_places(
    placed: Callable[[], Sequence[Placed]], tools: Callable[[], Sequence[str]] | None = None
) -> Generator[None]:
    """Renames the messages and tools in a BlockyardError to their paths in the body.

    `placed`: returns the messages of the call. `tools`: returns the paths of its tools; None: as in the core.
    """
    try:
        yield
    except BlockyardError as error:
        if not any(_OF_CONVERSATION.fullmatch(each.field) for each in error.violations):
            raise
        messages, tool_places = placed(), tools() if tools else None
        raise rename_violations(error, lambda field: _place_of(field, messages, tool_places)) from None


def _place_of(field: str, messages: Sequence[Placed], tools: Sequence[str] | None) -> str:
    if found := _OF_TOOL.fullmatch(field):
        return field if tools is None else tools[int(found[1])] + found[2]
    if found := _OF_MESSAGE.fullmatch(field):
        message, call, rest = messages[int(found[1])], found[2], found[3]
        # In the body, a message's content contains its calls.
        return message.calls[int(call)] + rest if call else message.place + rest.replace(".tool_calls", ".content")
    return field


_FORMAT, _SCHEMA = "format", "format.json_schema"


def client_error(error: Exception) -> BlockyardError:
    """Returns the error that a client may see. An unexpected error is logged, and becomes a BUG."""
    if isinstance(error, BlockyardError):
        return error
    log.exception("a call failed")
    return BlockyardError(Reason.BUG, "internal error; the server's log has more")


def rename_violations(error: BlockyardError, name_of: Callable[[str], str]) -> BlockyardError:
    """Renames the fields in an error of the core, which are paths in the proto, and makes its message anew."""
    if not error.violations:
        return error
    renamed = invalid(Violation(name_of(each.field), each.description, each.reason) for each in error.violations)
    return BlockyardError(
        error.reason, renamed.message, renamed.violations, error.retry_after_seconds, dict(error.metadata)
    )


def format_parameter(field: str, name: str) -> str | None:
    """Returns the API's parameter for a field of the core that concerns the answer's format; None for other fields.

    `name`: the API's parameter that contains `schema`.
    """
    if field == _FORMAT or field.startswith(_FORMAT + "."):
        return name + field.removeprefix(_SCHEMA).removeprefix(_FORMAT)
    return None


def error_headers(error: BlockyardError, name: str = "x-request-id") -> dict[str, str]:
    """Returns the headers of an error's answer: the request's id, and when to retry.

    If the same call would fail again, there are no headers about retries. Besides Retry-After, the clients of OpenAI
    and Anthropic obey the two other headers.

    `name`: the header for the request's id, which is absent if the body led to no request.
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
