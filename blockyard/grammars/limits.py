"""The limits of grammars: counts, the same in gateways and workers, so that what one takes no other refuses.

Knows nothing of llguidance but how its limits are called, and whether it is there: it is an extra.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from typing import Any

MAX_SCHEMA_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_GRAMMAR_BYTES = 320 * 1024
"""Of the text that the worker reads: a schema and what stands around it."""
MAX_CHOICES = 4096
MAX_RULES = 1_000
"""Of a grammar that a request brings: the work for terminals made of terminals grows much faster than their number."""
MAX_INTERSECTION = 100_000
"""The states of patterns that hold of the same text, multiplied: the automata of an intersection are a product."""
MAX_MULTIPLE = 25_000
"""The remainders that multiples tell apart, which are the states of their automata, multiplied likewise."""
MAX_NAME_PATTERNS = 500
"""Characters of the patterns of one object's names: llguidance compares each with each, and with each name."""
MAX_MEETINGS = 20_000
"""How many parts of a schema may be compared for that."""
MAX_CHECK_SECONDS = 1.0
"""Of processor time, to compile a grammar in a gateway: behind the counts, so that few reach it on any machine."""
MAX_REQUEST_SECONDS = 2.0
"""Likewise, of all checks for one request."""
MAX_CHECK_BYTES = 256 * 1024 * 1024
"""Of memory, to compile a grammar in a gateway."""

PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    # Each state takes one to two kilobytes, for each sequence.
    "max_lexer_states": 25_000,
    "max_grammar_size": 60_000,
    # No grammars and no output in what is told and logged.
    "verbose_errors": False,
}
"""Arguments of llguidance.LLParserLimits for every grammar. At full use a mask takes some 20 ms."""
RULE_LIMITS: dict[str, Any] = {"max_items_in_row": 300, "step_max_items": 5_000}
"""Arguments in place of those above for rules that may be ambiguous.

The work for a row grows with the cube of its items, and more: with 300 a mask takes 0.15 s, with 1,000 it takes 5.
"""
MAX_LEXER_BYTES = 16 * 1024 * 1024
"""Of what the texts of all rows make of a grammar's patterns."""
_STATE_BYTES, _PATTERN_BYTES = 600, 8
# Compiled, a grammar takes up to 300 times its text.
_COMPILED_FACTOR = 300
# Comments and texts are skipped before a pattern is looked for; texts hold the patterns of schemas, too.
_PATTERN = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\])*"|(?P<pattern>/(?:\\.|[^/\\])+/)', re.DOTALL)

# Ends a grammar of rules that may be ambiguous, as a comment.
_RULES_MARK = "\n// rules"

HINT = 'install it: pip install "blockyard[grammar]"'


def mark_rules(grammar: str) -> str:
    """Returns a grammar as one whose rules may be ambiguous: RULE_LIMITS hold of it, wherever it is compiled."""
    return grammar if has_rules(grammar) else grammar + _RULES_MARK


def has_rules(grammar: str) -> bool:
    """Returns whether a grammar is marked as one whose rules may be ambiguous, or nobody could look for them."""
    # In llguidance's form of several grammars nobody does.
    return grammar.endswith(_RULES_MARK) or grammar.lstrip().startswith("{")


def parser_limits(grammar: str) -> dict[str, Any]:
    """Returns the arguments of llguidance.LLParserLimits: the more patterns, the fewer states of the lexer.

    A state has a place for each pattern that goes on beside the others: with 900 of them 25,000 states take 200 MB, and
    those that one mask makes half a second.
    """
    states = min(PARSER_LIMITS["max_lexer_states"], MAX_LEXER_BYTES // _bytes_of_state(grammar))
    return {**PARSER_LIMITS, **(RULE_LIMITS if has_rules(grammar) else {}), "max_lexer_states": states}


def full_size(grammar: str) -> int:
    """Returns how many bytes a compiled grammar takes when its lexer is full, some."""
    return parser_limits(grammar)["max_lexer_states"] * _bytes_of_state(grammar) + _COMPILED_FACTOR * len(grammar)


def _bytes_of_state(grammar: str) -> int:
    if grammar.lstrip().startswith("{"):
        # Grammars in JSON, and patterns in its texts.
        return _STATE_BYTES + _PATTERN_BYTES * (grammar.count("/") // 2)
    return _STATE_BYTES + _PATTERN_BYTES * sum(each["pattern"] is not None for each in _PATTERN.finditer(grammar))


@cache
def library_version() -> str:
    """Returns the version of llguidance; empty: it is not installed."""
    try:
        return metadata.version("llguidance")
    except metadata.PackageNotFoundError:
        return ""


def identity() -> str:
    """Returns what masks depend on beside grammar and tokens: the library and its limits."""
    return f"llguidance {library_version()} {PARSER_LIMITS} {RULE_LIMITS} {MAX_LEXER_BYTES}"


# Words of llguidance's messages about limits, and its quotations, which are the client's names.
_QUOTED = re.compile(r"(['\"]).*?\1")
_LIMIT_WORDS = ("fuel", "limit", "max is", "too many", "too big", "too large", "too complex")


def is_limit(complaint: str) -> bool:
    """Returns whether a complaint of llguidance is of a limit, and not of what the grammar says."""
    lower = _QUOTED.sub("", complaint.lower())
    return any(word in lower for word in _LIMIT_WORDS)


def is_panic(complaint: str) -> bool:
    """Returns whether a complaint of llguidance is that it panicked, with where it was: no client's business."""
    return complaint.startswith("panic:")


def is_dead_end(complaint: str) -> bool:
    """Returns whether a complaint of llguidance is that no token at all may follow a text that cannot end yet."""
    return complaint.startswith("NoExtensionBias")
