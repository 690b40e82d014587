"""Writes formats as llguidance's kind of Lark, alone or as parts of a larger grammar. Checks nothing.

start: REASONING </think> answer
answer: %json {"type": "object"}
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from blockyard.contract.request import Choices, JsonObject, JsonSchema, Lark, Regex
from gateway.grammars.schemas import walk

if TYPE_CHECKING:
    from blockyard.contract.request import OutputFormat

# Of characters, in a regular expression.
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])+\]", re.DOTALL)
# Without a bound a model that has nothing to say writes newlines until its length ends.
WHITE_SPACE = r"[\x20\n\r\t]{0,12}"


def grammar_of(output: OutputFormat) -> str:
    """Returns the grammar of answers that are nothing but this, for `SamplingOptions.grammar`."""
    return output.text if isinstance(output, Lark) else f"start: {expression_of(output)}"


def expression_of(output: OutputFormat) -> str:
    """Returns what stands for a format at the right side of a rule."""
    match output:
        case JsonSchema():
            return json_expression(output.schema, compact=output.compact)
        case JsonObject():
            return json_expression('{"type": "object"}')
        case Regex():
            return regex_expression(output.pattern)
        case Choices():
            # One pattern for all: llguidance allows at most 2,000 alternatives in a rule.
            return regex_expression("|".join(map(re.escape, output.texts)))
        case Lark():
            return f"%lark {{\n{output.text}\n}}"


def json_expression(schema: str, *, compact: bool = False) -> str:
    """Returns what stands for JSON that a schema allows; the schema was checked."""
    tree: Any = json.loads(schema)
    if isinstance(tree, bool):
        tree = {} if tree else {"enum": []}
    white_space = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITE_SPACE}
    # It stands for whatever options the schema itself brings: some of these would let keywords be ignored.
    tree["x-guidance"] = {"lenient": False, **white_space, **_escapes(tree)}
    return f"%json {json.dumps(tree, ensure_ascii=False)}"


def _escapes(tree: Any) -> dict[str, str]:
    r"""Leaves out escapes that llguidance would take wrongly.

    llguidance 1.9 takes a class that holds control characters for one that holds quotes and backslashes too: it allows
    \" for [^"]. Where a pattern has such a class, no string of the schema has that escape.
    """
    patterns = [place.value for place in walk(tree) if place.keyword == "pattern"]
    for place in walk(tree):
        patterns += place.value if place.keyword == "patternProperties" and isinstance(place.value, dict) else ()
    classes = {each for pattern in patterns if isinstance(pattern, str) for each in _CLASS.findall(pattern)}
    kept = [character for character in '"\\' if not any(_is_taken_wrongly(each, character) for each in classes)]
    return {} if len(kept) == 2 else {"json_allowed_escapes": "nrbtfu" + "".join(kept)}


def _is_taken_wrongly(character_class: str, character: str) -> bool:
    if "[" in character_class[1:] or any(each in character_class for each in ("&&", "--", "~~", "||")):
        # Rust's set operations in classes are not parsed here.
        return True
    try:
        known = re.compile(character_class)
    except re.error:
        return True
    return known.fullmatch("\x01") is not None and known.fullmatch(character) is None


def regex_expression(pattern: str) -> str:
    """Returns what stands for texts that a regular expression matches as a whole."""
    return f"/{_escape(pattern)}/"


def _escape(pattern: str) -> str:
    """Escapes what would end a regular expression in Lark: a slash, and ends of lines."""
    written: list[str] = []
    escaped = False
    for character in pattern:
        if character in "/\n\r":
            written.append({"/": "/", "\n": "n", "\r": "r"}[character] if escaped else _ESCAPES[character])
        else:
            written.append(character)
        escaped = character == "\\" and not escaped
    return "".join(written)


_ESCAPES = {"/": "\\/", "\n": "\\n", "\r": "\\r"}


def quote(text: str) -> str:
    return json.dumps(text)
