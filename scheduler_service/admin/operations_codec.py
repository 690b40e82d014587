"""Decodes what an operator wants of replicas as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.admin.v1 import admin_pb2
from blockyard.errors import Violation, invalid
from scheduler_service.operations.operations import Mode
from scheduler_service.replicas.codec import TAGS, decode_tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scheduler_service.replicas.facts import MemoryTag

_MODES: dict[int, Mode] = {
    admin_pb2.LEAVE_MODE_UNSPECIFIED: Mode.KEEP,
    admin_pb2.LEAVE_MODE_KEEP: Mode.KEEP,
    admin_pb2.LEAVE_MODE_WAIT: Mode.WAIT,
    admin_pb2.LEAVE_MODE_ABORT: Mode.ABORT,
}


def decode_mode(number: int) -> Mode:
    """Decodes what becomes of requests; raises BlockyardError FIELD_INVALID for what is not known."""
    if number not in _MODES:
        raise invalid([Violation("mode", f"{number} is not known to this scheduler")])
    return _MODES[number]


def decode_wanted_tags(numbers: Sequence[int]) -> frozenset[MemoryTag]:
    """Decodes tags; raises BlockyardError FIELD_INVALID for one that is not known."""
    if unknown := [number for number in numbers if number not in TAGS]:
        raise invalid([Violation("tags", f"{number} is not known to this scheduler") for number in unknown])
    return decode_tags(numbers)
