"""Makes errors in the protocol's form over HTTP, `{"error": MESSAGE}`, from the one table of `blockyard.errors`.

The message begins with the error's reason, as in a gRPC stream of the protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Response

from gateway.fronts.http_calls.errors import error_headers
from gateway.fronts.http_calls.streaming import encode_json
from gateway.observe.metrics import note_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.errors import BlockyardError


def encode_error(error: BlockyardError) -> str:
    """Counts an error, and returns the body of its answer, which is also the data of a failed stream's last event."""
    note_error(error.reason)
    return encode_json({"error": str(error)})


def error_response(error: BlockyardError) -> Response:
    """Answers a call with an error. Headers say when to retry, if a retry makes sense."""
    return _response(encode_error(error), error.http_status, error_headers(error))


def not_ready_response(error: BlockyardError) -> Response:
    """Answers a probe with an error, which does not count as one."""
    return response(str(error), error.http_status, error_headers(error))


def response(message: str, status: int, headers: Mapping[str, str]) -> Response:
    """Makes the answer with a message. Tells the client not to retry, unless `headers` say otherwise."""
    return _response(encode_json({"error": message}), status, headers)


def _response(body: str, status: int, headers: Mapping[str, str]) -> Response:
    return Response(body, status, {"x-should-retry": "false", **headers}, media_type="application/json")
