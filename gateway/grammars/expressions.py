"""Writes output formats in llguidance's variant of Lark, alone or as parts of a larger grammar. Checks nothing.

start: REASONING </think> answer
answer: %json {"type": "object"}
"""

from __future__ import annotations

import json
import re
from typing import Any

from blockyard.contract.request import Choices, JsonObject, JsonSchema, Lark, OutputFormat, Regex
from gateway.grammars.schemas import walk

# A character class in a regular expression.
_CLASS = re.compile(r"\[(?:\\.|[^\]\\])+\]", re.DOTALL)
# White space needs a bound: a model that has nothing to say would write newlines up to its length limit.
WHITE_SPACE = r"[\x20\n\r\t]{0,12}"


def grammar_of(output: OutputFormat) -> str:
    """Returns the grammar for answers that consist of a format alone, for `SamplingOptions.grammar`."""
    return output.text if isinstance(output, Lark) else f"start: {expression_of(output)}"


def expression_of(output: OutputFormat) -> str:
    """Returns the Lark expression for a format, for the right side of a rule."""
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
    """Returns the Lark expression for JSON that a schema allows. The schema must have been checked."""
    tree: Any = json.loads(schema)
    if isinstance(tree, bool):
        tree = {} if tree else {"enum": []}
    white_space = {"whitespace_flexible": False} if compact else {"whitespace_pattern": WHITE_SPACE}
    # Replace the options in the client's schema: some of them would make llguidance ignore keywords.
    tree["x-guidance"] = {"lenient": False, **white_space, **_escapes(tree)}
    return f"%json {json.dumps(tree, ensure_ascii=False)}"


def _escapes(tree: Any) -> dict[str, str]:
    r"""Returns an option that forbids escapes which llguidance would wrongly match.

    llguidance 1.9 matches a class that contains control characters against escaped quotes and backslashes too: it
    allows \" for [^"]. If any pattern has such a class, no string of the schema may contain that escape.
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
    """Returns the Lark expression for texts that a regular expression matches as a whole."""
    return f"/{_escape(pattern)}/"


def _escape(pattern: str) -> str:
    """Escapes the characters that would end a regular expression in Lark: slashes and line ends."""
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
