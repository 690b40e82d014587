"""Maps a value to a message whose fields have the same names, and back."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from google.protobuf.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable

Value = TypeVar("Value")
MessageT = TypeVar("MessageT", bound=Message)


class _Part(Protocol):
    @property
    def encode(self) -> Callable[[Any], Any]:
        """Makes what the message holds of what the value holds."""
        ...

    @property
    def decode(self) -> Callable[[Any], Any]:
        """Makes what the value holds of what the message holds; columns come as tuples."""
        ...


@dataclass(frozen=True, slots=True)
class FieldCodec:
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


class MessageCodec(Generic[Value, MessageT]):
    """Encodes and decodes one message. None is an absent message.

    An absent message and an empty column become the default of the value's field.

    Args:
        value: a dataclass.
        message: the message; it has each field of the value.
        parts: for each field that is more than a number, text or column of these.
    """

    def __init__(self, value: type[Value], message: type[MessageT], **parts: _Part) -> None:
        self._value = value
        self._message = message
        self._parts = parts
        known = message.DESCRIPTOR.fields_by_name
        names = [field.name for field in fields(value)]  # type: ignore[arg-type]
        self._fields = [(name, known[name].is_repeated, known[name].message_type is not None) for name in names]

    def encode(self, value: Value) -> MessageT:
        given = {name: getattr(value, name) for name, _, _ in self._fields}
        for name, part in self._parts.items():
            given[name] = None if given[name] is None else part.encode(given[name])
        return self._message(**given)

    def decode(self, message: MessageT) -> Value:
        told: dict[str, Any] = {}
        for name, is_repeated, is_message in self._fields:
            field: Any = getattr(message, name)
            if is_repeated:
                field = tuple(field)
            if message.HasField(name) if is_message and not is_repeated else field or not is_repeated:
                told[name] = self._parts[name].decode(field) if name in self._parts else field
        return self._value(**told)
