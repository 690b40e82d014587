"""Makes the digest by which a request that is sent again is recognized, from the fields that say what was asked."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, cast


def digest_of(*parts: object, without: frozenset[str] = frozenset()) -> bytes:
    """Returns the SHA-256 of values: dataclasses by the names of their fields, less the fields in `without`.

    A field that has its default does not count, so that a field which a later version adds changes no digest.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr(_canonical(part, without)).encode())
    return digest.digest()


def _canonical(value: Any, without: frozenset[str] = frozenset()) -> object:
    """Turns a value into tuples and plain values, whose `repr` does not depend on the order of a mapping."""
    if isinstance(value, Enum):
        return cast("object", value.value)
    if is_dataclass(value):
        pairs = (
            (name, getattr(value, name), default) for name, default in _defaults(type(value)) if name not in without
        )
        return tuple((name, _canonical(each)) for name, each, default in pairs if each != default)
    if isinstance(value, Mapping):
        return tuple(sorted(cast("Mapping[Any, Any]", value).items()))
    if isinstance(value, array):
        return cast("array[Any]", value).tobytes()
    if isinstance(value, tuple | list):
        return tuple(map(_canonical, cast("tuple[Any, ...]", value)))
    return value


@cache
def _defaults(kind: type[Any]) -> tuple[tuple[str, object], ...]:
    return tuple(
        (each.name, each.default_factory() if each.default_factory is not MISSING else each.default)
        for each in fields(kind)
    )
