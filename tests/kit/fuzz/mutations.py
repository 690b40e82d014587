"""Changes messages by their structure: one field, or several, anywhere inside, to what nobody expects there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor
from google.protobuf.message import DecodeError, Message

from blockyard.common.v1 import pooling_pb2, sampling_pb2

if TYPE_CHECKING:
    import random

    Field = descriptor.FieldDescriptor

_D = descriptor.FieldDescriptor
_BITS = {
    _D.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _D.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _D.CPPTYPE_UINT32: (0, 2**32 - 1),
    _D.CPPTYPE_UINT64: (0, 2**64 - 1),
    _D.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 3e38, -3e38, 1e-45, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "a", "\0", "é𝄞\u202e", "demo", "x" * 300, "{", "tenant/name")
# A quarter of the changes are of bytes: what comes out is another message, or none.
RAW_SHARE = 0.25
MAX_DEPTH = 6
# The messages that bytes hold, by the field's name.
SERIALIZED: dict[str, type[Message]] = {
    "blockyard.worker.v1.NewSequence.sampling_params": sampling_pb2.SamplingParams,
    "blockyard.worker.v1.NewSequence.pooling_params": pooling_pb2.Pooling,
}


def mutate(message: Message, rng: random.Random) -> Message | None:
    """Returns a changed copy, or None where the bytes are no message any more: nothing behind gRPC sees those."""
    changed: Any = type(message)()
    changed.CopyFrom(message)
    if rng.random() < RAW_SHARE:
        try:
            return type(message).FromString(_change_bytes(changed.SerializeToString(), rng))
        except DecodeError:
            return None
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        _change(changed, rng, MAX_DEPTH)
    return changed


def _change_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data or b"\x08\x01")
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        how = rng.randrange(4)
        if how == 0 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif how == 1 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            changed[at:at] = rng.randbytes(rng.choice((1, 2, 7)))
        else:
            del changed[at : at + rng.choice((1, 1, 4))]
    return bytes(changed)


def _change(message: Any, rng: random.Random, depth: int) -> None:
    """Changes one field; more often one that is set, and often something inside it."""
    known = [field for field, _ in message.ListFields()]
    fields = known if known and rng.random() < 0.8 else message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(list(fields))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(getattr(message, field.name), field, rng)
    elif field.is_repeated:
        _change_list(message, field, rng, depth)
    elif field.message_type is not None:
        if rng.random() < 0.1:
            message.ClearField(field.name)
        elif depth and (message.HasField(field.name) or rng.random() < 0.5):
            _change(getattr(message, field.name), rng, depth - 1)
        else:
            getattr(message, field.name).SetInParent()
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.full_name in SERIALIZED and rng.random() < 0.9:
        _change_serialized(message, field, rng)
    else:
        setattr(message, field.name, _value(field, getattr(message, field.name), rng))


def _change_serialized(message: Any, field: Field, rng: random.Random) -> None:
    """Changes bytes that hold a message: as a message mostly, or else byte by byte."""
    data = getattr(message, field.name)
    try:
        inner = SERIALIZED[field.full_name].FromString(data)
    except DecodeError:
        return
    if rng.random() < RAW_SHARE:
        setattr(message, field.name, _change_bytes(data, rng))
    else:
        _change(inner, rng, MAX_DEPTH)
        setattr(message, field.name, inner.SerializeToString())


def _change_map(values: Any, field: Field, rng: random.Random) -> None:
    key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
    if value.message_type is None:
        values[_value(key, None, rng)] = _value(value, None, rng)
    else:
        values[_value(key, None, rng)].SetInParent()


def _change_list(message: Any, field: Field, rng: random.Random, depth: int) -> None:
    column = getattr(message, field.name)
    how = rng.randrange(6)
    if how == 0 and column:
        del column[rng.randrange(len(column))]
    elif how == 1 and column and len(column) < 5000:
        column.extend(list(column))
    elif how == 2 and column:
        column.append(column[rng.randrange(len(column))])
    elif how == 3:
        message.ClearField(field.name)
    elif field.message_type is not None:
        item = rng.choice(column) if column and rng.random() < 0.8 else column.add()
        if depth:
            _change(item, rng, depth - 1)
    elif column and rng.random() < 0.8:
        at = rng.randrange(len(column))
        column[at] = _value(field, column[at], rng)
    else:
        column.extend(_value(field, None, rng) for _ in range(rng.choice((1, 1, 2, 40))))


def _value(field: Field, before: Any, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind in _BITS:
        low, high = _BITS[kind]
        near = [before + step for step in (-1, 1) if low <= before + step <= high] if isinstance(before, int) else []
        return rng.choice([low, high, high - 1, high // 2, 0, 1, 2, rng.randrange(200), *near])
    if kind in (_D.CPPTYPE_FLOAT, _D.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if kind == _D.CPPTYPE_BOOL:
        return rng.random() < 0.5
    text = rng.choice(_TEXTS)
    return text if field.type == _D.TYPE_STRING else text.encode()
