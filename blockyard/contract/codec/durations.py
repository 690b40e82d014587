"""Encodes and decodes durations. What is sent with every step has faster ways of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration

if TYPE_CHECKING:
    from google.protobuf.message import Message


def encode_seconds(seconds: float | None) -> Duration | None:
    """Encodes a duration; None leaves a field absent."""
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def decode_seconds(message: Message, name: str) -> float | None:
    """Decodes a field of a message that is a duration; None if the field is absent."""
    duration: Any = getattr(message, name)
    return duration.ToNanoseconds() / 1e9 if message.HasField(name) else None
