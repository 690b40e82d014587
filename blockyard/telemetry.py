"""Logging: one line per event with its identifiers, as text or JSON.

No text of a prompt or an answer is ever passed to a logger.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

_LOCAL = ("blockyard", "gateway", "scheduler_service", "worker_service", "blockyard_kernels")
# Messages with stack traces that gRPC logs about its peers, by logger; gRPC cannot be told not to. The first is also
# reported as a message of None, which Blockyard refuses and logs itself. The second is a client that left before its
# last message was sent.
_GRPC_NOISE = {
    "grpc._common": "Exception deserializing message!",
    "grpc._cython.cygrpc": "ExecuteBatchError raised in core",
}


class EventLogger:
    """Writes events: a fixed message, and fields as keywords (`request_id=…, step_id=…`); None fields are left out."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    @property
    def has_debug(self) -> bool:
        """Whether debug events are written; check it before computing costly fields."""
        return self._logger.isEnabledFor(logging.DEBUG)

    def debug(self, message: str, /, **fields: Any) -> None:
        """Writes an event for developers."""
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: Any) -> None:
        """Writes an event of normal operation."""
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, /, **fields: Any) -> None:
        """Writes an event that an operator should look at."""
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, /, **fields: Any) -> None:
        """Writes an event that affected a user."""
        self._write(logging.ERROR, message, fields)

    def exception(self, message: str, /, **fields: Any) -> None:
        """Writes an error event with the stack trace of the exception being handled."""
        self._write(logging.ERROR, message, fields, exc_info=True)

    def _write(self, level: int, message: str, fields: dict[str, Any], *, exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            given = {name: value for name, value in fields.items() if value is not None}
            self._logger.log(level, message, extra={"fields": given}, exc_info=exc_info, stacklevel=3)


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        fields: dict[str, Any] = getattr(record, "fields", {})
        pairs = "".join(f" {name}={_one_word(value)}" for name, value in fields.items())
        line = f"{time} {record.levelname[0]} {self._service:<9} {record.getMessage()}{pairs}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _one_word(value: object) -> str:
    """Formats a value, in quotes if it could end the line or look like another field."""
    text = str(value)
    return text if text and text.isprintable() and not set(text) & set(' "=') else json.dumps(text, ensure_ascii=False)


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        # If a field has the name of a standard one, append an underscore to keep both.
        for name, value in getattr(record, "fields", {}).items():
            event[f"{name}_" if name in event else name] = value
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str, ensure_ascii=False)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_GRPC_NOISE[record.name])


def quiet_grpc() -> None:
    """Filters out gRPC's log messages about peers that left or sent malformed messages."""
    for name in _GRPC_NOISE:
        logging.getLogger(name).addFilter(_is_no_noise)


def configure_logging(service: str, *, level: str = "info", log_format: str = "text") -> None:
    """Sends all logging of this process to standard error.

    Args:
        service: the process's name in each line.
        level: debug, info, warning or error, for Blockyard's loggers; libraries log from warning on.
        log_format: "json"; anything else is text.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if log_format == "json" else _TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    quiet_grpc()
    for name in _LOCAL:
        logging.getLogger(name).setLevel(level.upper())


def set_level(level: int) -> int:
    """Changes the level of Blockyard's loggers, and returns the previous level."""
    previous = logging.getLogger(_LOCAL[0]).level
    for name in _LOCAL:
        logging.getLogger(name).setLevel(level)
    return previous
