"""Encodes and decodes a sequence's error as google.rpc.Status, for workers and gateways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason, from_status, to_status
from scheduler_service.core.values import SequenceError

if TYPE_CHECKING:
    from google.rpc.status_pb2 import Status


def decode_error(status: Status) -> SequenceError:
    """Decodes why a sequence failed; a reason that has no name here becomes the one that its code suggests."""
    error = from_status(status)
    return SequenceError(str(error.reason), error.message)


def encode_error(error: SequenceError) -> Status:
    """Encodes why a sequence failed."""
    return to_status(BlockyardError(Reason(error.reason), error.message))
