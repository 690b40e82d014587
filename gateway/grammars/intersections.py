"""Estimates the size of automata that several patterns of a schema form on the same value. Compiles nothing.

{"allOf": [{"pattern": "a"}, {"pattern": "b"}]}

The sizes of such automata multiply. Only they, and llguidance's comparison of `patternProperties`, can make a small
schema expensive: llguidance limits all other costs itself. A group holds everything that applies to one value: schemas,
and choices among groups.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from blockyard.errors import Reason, Violation
from blockyard.grammars.limits import (
    MAX_INTERSECTION,
    MAX_MEETINGS,
    MAX_MULTIPLE,
    MAX_NAME_PATTERNS,
    MAX_SCHEMA_DEPTH,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


_LARGEST = 10**9

# The states assumed for the automaton of any JSON Schema `format`: date-time, addresses and UUIDs, the largest, have
# about as many.
FORMAT_SIZE = 40

_PIECE = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<open>\((?:\?(?:P?<\w*>|[A-Za-z-]*:)?)?)|(?P<close>\))"
    r"|\{(?P<least>\d+)(?:(?P<comma>,)(?P<most>\d*))?\}|(?P<mark>[*+?|^$])|.",
    re.DOTALL,
)


def pattern_size(pattern: str) -> int:
    """Returns the length of a regular expression whose counted repetitions are written out: 11 for a(bc){2,5}."""
    # For each open group: its size so far, and the size of its last piece.
    groups = [[0, 0]]
    for found in _PIECE.finditer(pattern):
        group = groups[-1]
        if found["open"]:
            groups.append([0, 0])
        elif found["close"]:
            if len(groups) > 1:
                size = groups.pop()[0]
                groups[-1] = [groups[-1][0] + size, size]
        elif found["least"]:
            times = max(int(number[:9]) for number in (found["least"], found["most"] or "1"))
            group[0] = min(_LARGEST, group[0] + group[1] * max(0, times - 1))
            group[1] *= times
        elif not found["mark"]:
            group[:] = [group[0] + 1, 1]
    return max(1, min(_LARGEST, sum(group[0] for group in groups)))


def multiple_size(value: float) -> int:
    """Returns the number of remainders that an automaton needs to recognize decimal multiples of a number."""
    number = abs(Decimal(repr(value)))
    if not number.is_finite() or not number or number.adjusted() > 18:
        return _LARGEST
    digits = int(number.scaleb(-int(number.as_tuple().exponent)))
    factors = 0
    for prime in (2, 5):
        while digits % prime == 0:
            digits //= prime
            factors += 1
    return min(_LARGEST, digits + factors)


class _Part(NamedTuple):
    path: str
    schema: Any


class _Choice(NamedTuple):
    branches: list[_Group]


class _Sizes(NamedTuple):
    """The number of states of the automata for texts and for `multipleOf`."""

    texts: int
    multiples: int


_Group = list["_Part | _Choice"]

_Inner = dict[object, _Group]

# The keys in `_Inner` for all properties that a schema does not name, and for all items without a schema of their own.
_REST_OF_NAMES, _REST_OF_PLACES = object(), object()


class _TooComplexError(Exception):
    def __init__(self, path: str, description: str) -> None:
        super().__init__(description)
        self.path = path
        self.description = description


def find_intersection(schema: Any, field: str) -> Violation | None:
    """Returns a violation at the first part of a schema that is too complex; None if no part is.

    `field`: the request's field that contains the schema.
    """
    try:
        _Meetings(schema).check()
    except _TooComplexError as error:
        return Violation(f"{field}{error.path}", error.description, Reason.GRAMMAR_TOO_COMPLEX)
    return None


class _Meetings:
    """Checks one schema, and counts the parts compared."""

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._num_compared = 0

    def check(self) -> None:
        """Checks each group of the schema once; raises _TooComplexError."""
        waiting: list[_Group] = [[_Part("", self._root)]]
        seen: set[object] = set()
        while waiting:
            group = self._expand(waiting.pop())
            key = (frozenset(_ids(group, is_deep=False)), frozenset(_ids(group, is_deep=True)))
            if key not in seen:
                seen.add(key)
                parts, choices = _parts(group), _choices(group)
                self._size(group, measures_all=len(choices) + sum(_is_limited(each.schema) for each in parts) > 1)
                waiting += self._below(parts, choices)

    def _count(self, path: str) -> None:
        self._num_compared += 1
        if self._num_compared > MAX_MEETINGS:
            raise _TooComplexError(path, "too complex: too many parts of the schema apply to one value")

    def _expand(self, group: _Group) -> _Group:
        """Returns a group with all schemas that apply to its value, through `$ref` and `allOf`, and all choices."""
        found: _Group = []
        seen: set[int] = set()
        waiting = group[::-1]
        while waiting:
            part = waiting.pop()
            if isinstance(part, _Choice):
                found.append(part)
            elif isinstance(part.schema, dict) and id(part.schema) not in seen:
                seen.add(id(part.schema))
                found.append(part)
                if len(seen) > 1:
                    self._count(part.path)
                if isinstance(reference := part.schema.get("$ref"), str):
                    waiting.append(self._resolve(reference))
                waiting += reversed(_listed(part, "allOf"))
                branches = (_listed(part, name) for name in ("anyOf", "oneOf"))
                found += [_Choice([[each] for each in several]) for several in branches if several]
        return found

    def _resolve(self, reference: str) -> _Part:
        place, path = self._root, ""
        for name in unquote(reference).removeprefix("#").split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list):
                place = place[int(key)] if key.isdecimal() and int(key) < len(place) else None
                path += f"[{key}]"
            else:
                place = place.get(key) if isinstance(place, dict) else None
                path += f".{key}"
        return _Part(path, place)

    def _size(self, group: _Group, *, measures_all: bool, depth: int = 0) -> _Sizes:
        """Returns the sizes of a group's automata. Choices are only measured if `measures_all`."""
        total, num_names = _Sizes(1, 1), 0
        for part in group:
            if isinstance(part, _Choice):
                size, path = self._largest(part, depth) if measures_all else _Sizes(1, 1), _path(part)
                is_product = total.texts > 1 < size.texts
            else:
                size, path = _sizes(part.schema), part.path
                is_product = total.texts > 1 < size.texts or ("format" in part.schema and "pattern" in part.schema)
                num_names += sum(map(pattern_size, _named(part, "patternProperties")))
            both = _Sizes(total.texts * size.texts, total.multiples * size.multiples)
            if both.texts > MAX_INTERSECTION and is_product:
                raise _TooComplexError(path, "too complex: the patterns for one value are too large together")
            if both.multiples > MAX_MULTIPLE:
                raise _TooComplexError(path, f"too complex: multipleOf tells more than {MAX_MULTIPLE} remainders apart")
            if num_names > MAX_NAME_PATTERNS:
                raise _TooComplexError(path, "too complex: the patternProperties are too large together")
            total = both
        return total

    def _largest(self, choice: _Choice, depth: int) -> _Sizes:
        if depth > MAX_SCHEMA_DEPTH:
            raise _TooComplexError(_path(choice), "too complex: choices lead to choices without end")
        texts, multiples = [1], [1]
        for branch in choice.branches:
            self._count(_path(choice))
            size = self._size(self._expand(branch), measures_all=True, depth=depth + 1)
            texts.append(size.texts)
            multiples.append(size.multiples)
        return _Sizes(max(texts), max(multiples))

    def _below(self, parts: list[_Part], choices: list[_Choice]) -> Iterator[_Group]:
        """Yields the groups for the values inside a value: its properties and items."""
        having = [found for found in map(_inner, parts) if found]
        if not having and len(choices) <= 1:
            yield from (branch for choice in choices for branch in choice.branches)
        elif len(having) == 1 and not choices:
            yield from having[0].values()
        else:
            having += [self._inner_of(choice, 0) for choice in choices]
            for key in {key: None for each in having for key in each}:
                self._count(_path(*parts, *choices))
                yield [node for each in having for node in each.get(key, each.get(_rest_of(key), []))]
            # Each branch also constrains the value alone.
            yield from (branch for choice in choices for branch in choice.branches)

    def _inner_of(self, choice: _Choice, depth: int) -> _Inner:
        """Returns the groups for the values inside a value that a choice describes, by name or index."""
        if depth > MAX_SCHEMA_DEPTH:
            raise _TooComplexError(_path(choice), "too complex: choices lead to choices without end")
        found: dict[object, list[_Group]] = {}
        for branch in choice.branches:
            group = self._expand(branch)
            inner = [_inner(part) for part in _parts(group)]
            inner += [self._inner_of(each, depth + 1) for each in _choices(group)]
            for key in {key: None for each in inner for key in each}:
                self._count(_path(choice))
                nodes = [node for each in inner for node in each.get(key, each.get(_rest_of(key), []))]
                found.setdefault(key, []).append(nodes)
        return {key: several[0] if len(several) == 1 else [_Choice(several)] for key, several in found.items()}


def _sizes(schema: dict[str, Any]) -> _Sizes:
    pattern, multiple = schema.get("pattern"), schema.get("multipleOf")
    texts = pattern_size(pattern) if isinstance(pattern, str) else 1
    texts *= FORMAT_SIZE if "format" in schema else 1
    if isinstance(multiple, bool) or not isinstance(multiple, int | float):
        return _Sizes(texts, 1)
    return _Sizes(texts, multiple_size(multiple))


def _is_limited(schema: dict[str, Any]) -> bool:
    return not schema.keys().isdisjoint(("pattern", "format", "multipleOf"))


def _parts(group: _Group) -> list[_Part]:
    return [part for part in group if isinstance(part, _Part)]


def _choices(group: _Group) -> list[_Choice]:
    return [part for part in group if isinstance(part, _Choice)]


def _path(*group: _Part | _Choice) -> str:
    """Returns the path of the first part of a group."""
    for part in group:
        if isinstance(part, _Part):
            return part.path
        return next((_path(*branch) for branch in part.branches if branch), "")
    return ""


def _ids(group: _Group, *, is_deep: bool) -> Iterator[int]:
    for part in group:
        if isinstance(part, _Part):
            yield id(part.schema)
        elif is_deep:
            for branch in part.branches:
                yield from _ids(branch, is_deep=True)


def _listed(part: _Part, keyword: str) -> list[_Part]:
    several = part.schema.get(keyword)
    if not isinstance(several, list):
        return []
    return [_Part(f"{part.path}.{keyword}[{place}]", each) for place, each in enumerate(several)]


def _named(part: _Part, keyword: str) -> dict[str, _Part]:
    several = part.schema.get(keyword)
    if not isinstance(several, dict):
        return {}
    return {name: _Part(f"{part.path}.{keyword}.{name}", each) for name, each in several.items()}


def _inner(part: _Part) -> _Inner:
    """Returns the groups for the values inside a value, by name or index, and the groups for all others."""
    found: _Inner = {}
    # The patterns of `patternProperties` exclude each other: llguidance refuses overlapping ones.
    rest: list[_Group] = [[each] for each in _named(part, "patternProperties").values()]
    if "additionalProperties" in part.schema:
        rest.append([_Part(f"{part.path}.additionalProperties", part.schema["additionalProperties"])])
    others: _Group = [_Choice(rest)] if rest else []
    found.update({name: [each, *others] for name, each in _named(part, "properties").items()})
    if others:
        found[_REST_OF_NAMES] = others
    found.update({place: [each] for place, each in enumerate(_listed(part, "prefixItems"))})
    places = _listed(part, "items")
    found.update({place: [each] for place, each in enumerate(places)})
    keyword = "additionalItems" if places else "items"
    if keyword in part.schema:
        found[_REST_OF_PLACES] = [_Part(f"{part.path}.{keyword}", part.schema[keyword])]
    return found


def _rest_of(key: object) -> object:
    return _REST_OF_NAMES if isinstance(key, str) or key is _REST_OF_NAMES else _REST_OF_PLACES
