"""Cuts llguidance's variant of Lark into tokens. Imports no Blockyard code: the compiler process uses it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKEN = re.compile(
    r"[ \t\r\n]+|(?:\#|//)[^\n]*"
    r'|(?P<text>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<pattern>/(?:\\.|[^/\\])+/[imslux]*)"
    r"|(?P<json>%(?:json|llguidance|regex)(?![A-Za-z]))"
    r"|(?P<special><[^<>\s]+>)"
    r"|(?P<number>[+-]?[0-9]+)"
    r"|(?P<other>[_!?]*[A-Za-z][A-Za-z0-9_-]*|.)",
    re.DOTALL,
)
_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


class LarkToken(NamedTuple):
    """A token that is neither white space nor a comment. `kind`: text, pattern, json, special, number or other."""

    kind: str
    text: str
    start: int
    value: Any = None
    """For the kind json, the parsed JSON that follows; else None."""


def cut_lark(text: str) -> Iterator[LarkToken]:
    """Yields the tokens of a grammar; raises ValueError if no JSON follows a `%json`, `%llguidance` or `%regex`."""
    place = 0
    while found := _TOKEN.match(text, place):
        place = found.end()
        kind = found.lastgroup
        if kind == "json":
            space = _SPACE.match(text, place)
            assert space is not None
            try:
                value, place = _DECODER.raw_decode(text, space.end())
            except RecursionError:
                raise ValueError("nested too deep") from None
            yield LarkToken(kind, found[0], found.start(), value)
        elif kind is not None:
            yield LarkToken(kind, found[0], found.start())


def without_specials(text: str, special: str) -> str:
    """Replaces every special token of a grammar with `special`; raises ValueError as `cut_lark` does."""
    parts, place = list[str](), 0
    for token in cut_lark(text):
        if token.kind == "special":
            parts += text[place : token.start], special
            place = token.start + len(token.text)
    return "".join([*parts, text[place:]])
