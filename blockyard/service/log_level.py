"""Changes the log level at run time, by the API's enum."""

from __future__ import annotations

import logging

from blockyard.common.v1 import administration_pb2
from blockyard.errors import Violation, invalid
from blockyard.telemetry import EventLogger, set_level

log = EventLogger(__name__)

LEVELS = {
    administration_pb2.LOG_LEVEL_DEBUG: logging.DEBUG,
    administration_pb2.LOG_LEVEL_INFO: logging.INFO,
    administration_pb2.LOG_LEVEL_WARNING: logging.WARNING,
    administration_pb2.LOG_LEVEL_ERROR: logging.ERROR,
}
_NAMES = {number: name for name, number in LEVELS.items()}


def check_level(level: administration_pb2.LogLevel.ValueType) -> None:
    """Raises BlockyardError FIELD_INVALID for an unknown level."""
    if level not in LEVELS:
        raise invalid([Violation("level", "must be one of debug, info, warning and error")])


def set_log_level(level: administration_pb2.LogLevel.ValueType) -> administration_pb2.LogLevel.ValueType:
    """Changes the level of this process's log and returns the one before; raises BlockyardError FIELD_INVALID."""
    check_level(level)
    previous = set_level(LEVELS[level])
    log.warning("the log level was changed", level=logging.getLevelName(LEVELS[level]).lower())
    return _NAMES.get(previous, administration_pb2.LOG_LEVEL_UNSPECIFIED)
