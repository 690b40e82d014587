"""Maps values, enums and durations of the contract to generated messages with the same names, and back."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Value = TypeVar("Value")
MessageT = TypeVar("MessageT", bound=Message)


Member = TypeVar("Member", bound=StrEnum)
Number = TypeVar("Number", bound=int)


class EnumCodec(Generic[Member, Number]):
    """The numbers of an enum's members.

    Args:
        members: the contract's enum.
        generated: names and numbers of the generated enum: its `items()`.
        prefix: stands before each name in the generated enum.
        zero: the member that UNSPECIFIED stands for; None: it stands for no member.
    """

    def __init__(
        self,
        members: type[Member],
        generated: Iterable[tuple[str, Number]],
        prefix: str,
        zero: Member | None = None,
    ) -> None:
        numbers = dict(generated)
        self._numbers = {member: numbers[prefix + member.name] for member in members}
        self._members: dict[int, Member] = {number: member for member, number in self._numbers.items()}
        if zero is not None:
            self._members[0] = zero

    def encode(self, member: Member) -> Number:
        return self._numbers[member]

    def decode(self, number: int) -> Member:
        """Returns the member with a number; what 0 stands for, for a number of a later version."""
        return self._members.get(number) or self._members[0]

    def find(self, number: int) -> Member | None:
        """Returns the member with a number; None for a number of a later version."""
        return self._members.get(number)


class _Part(Protocol):
    @property
    def encode(self) -> Callable[[Any], Any]:
        """Converts a field of the value into the message's."""
        ...

    @property
    def decode(self) -> Callable[[Any], Any]:
        """Converts a field of the message into the value's; columns come as tuples."""
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


def encode_seconds(seconds: float | None) -> Duration | None:
    """Encodes a duration; None leaves a field absent. Fields of every step have faster ways of their own."""
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def decode_seconds(message: Message, name: str) -> float | None:
    """Decodes a field of a message that is a duration; None if the field is absent."""
    duration: Any = getattr(message, name)
    return duration.ToNanoseconds() / 1e9 if message.HasField(name) else None
