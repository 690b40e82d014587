"""Limits of grammars. Gateways and workers share them, so that no worker refuses what a gateway accepted.

Does not import llguidance, which is an extra; uses the names of its limits and checks whether it is installed.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from typing import Any

MAX_SCHEMA_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_GRAMMAR_BYTES = 320 * 1024
"""Bytes of the grammar's text that a worker reads: a schema and its wrapping."""
MAX_CHOICES = 4096
MAX_RULES = 1_000
"""Rules of a request's own grammar: the work for nested terminals grows much faster than their number."""
MAX_INTERSECTION = 100_000
"""Product of the state counts of patterns that apply to one text: an intersection is a product automaton."""
MAX_MULTIPLE = 25_000
"""Product of the `multipleOf` automata's state counts; each has one state per remainder."""
MAX_NAME_PATTERNS = 500
"""Characters of one object's `patternProperties`: llguidance compares all of them with each other and each name."""
MAX_MEETINGS = 20_000
"""How many parts of a schema may be compared to find intersections."""
MAX_CHECK_SECONDS = 1.0
"""CPU seconds to compile one grammar in a gateway. The counts above refuse most slow grammars before."""
MAX_REQUEST_SECONDS = 2.0
"""CPU seconds for all grammars of one request."""
MAX_CHECK_BYTES = 256 * 1024 * 1024
"""Bytes of memory to compile one grammar in a gateway."""

PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    # Each state takes one to two kilobytes per sequence.
    "max_lexer_states": 25_000,
    "max_grammar_size": 60_000,
    # Keep grammars and output out of errors and logs.
    "verbose_errors": False,
}
"""Arguments of llguidance.LLParserLimits for every grammar. At these limits one mask takes about 20 ms."""
RULE_LIMITS: dict[str, Any] = {"max_items_in_row": 300, "step_max_items": 5_000}
"""Replacements for PARSER_LIMITS in grammars whose rules may be ambiguous.

The work for a row grows at least with the cube of its items: with 300 a mask takes 0.15 s, with 1,000 it takes 5 s.
"""
MAX_LEXER_BYTES = 16 * 1024 * 1024
"""Bytes of a grammar's lexer states."""
_STATE_BYTES, _PATTERN_BYTES = 600, 8
# A compiled grammar takes up to 300 times the bytes of its text.
_COMPILED_FACTOR = 300
# Matches comments and strings first, so that slashes in them are not taken for patterns.
_PATTERN = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\])*"|(?P<pattern>/(?:\\.|[^/\\])+/)', re.DOTALL)

# A comment at the end of a grammar that marks its rules as possibly ambiguous.
_RULES_MARK = "\n// rules"

HINT = 'install it: pip install "blockyard[grammar]"'


def mark_rules(grammar: str) -> str:
    """Marks a grammar as possibly ambiguous, so that RULE_LIMITS apply wherever it is compiled."""
    return grammar if has_rules(grammar) else grammar + _RULES_MARK


def has_rules(grammar: str) -> bool:
    """Returns whether a grammar is marked as possibly ambiguous, or in a form that is not searched for rules."""
    # llguidance's JSON form of several grammars is not searched for rules.
    return grammar.endswith(_RULES_MARK) or grammar.lstrip().startswith("{")


def parser_limits(grammar: str) -> dict[str, Any]:
    """Returns the arguments of llguidance.LLParserLimits; more patterns allow fewer lexer states.

    A lexer state has an entry for each pattern that is still matching: with 900 patterns 25,000 states take 200 MB, and
    the states for one mask take half a second.
    """
    states = min(PARSER_LIMITS["max_lexer_states"], MAX_LEXER_BYTES // _bytes_of_state(grammar))
    return {**PARSER_LIMITS, **(RULE_LIMITS if has_rules(grammar) else {}), "max_lexer_states": states}


def full_size(grammar: str) -> int:
    """Estimates the bytes of a compiled grammar whose lexer has all its states."""
    return parser_limits(grammar)["max_lexer_states"] * _bytes_of_state(grammar) + _COMPILED_FACTOR * len(grammar)


def _bytes_of_state(grammar: str) -> int:
    if grammar.lstrip().startswith("{"):
        # Grammars in JSON have their patterns inside strings: count slashes.
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
    """Returns the library version and the limits, on which masks depend beside grammar and tokens."""
    return f"llguidance {library_version()} {PARSER_LIMITS} {RULE_LIMITS} {MAX_LEXER_BYTES}"


# Words in llguidance's messages about limits. Quoted parts are removed first: they are the client's names.
_QUOTED = re.compile(r"(['\"]).*?\1")
_LIMIT_WORDS = ("fuel", "limit", "max is", "too many", "too big", "too large", "too complex")


def is_limit(complaint: str) -> bool:
    """Returns whether an error of llguidance is about a limit rather than the grammar's content."""
    lower = _QUOTED.sub("", complaint.lower())
    return any(word in lower for word in _LIMIT_WORDS)


def is_panic(complaint: str) -> bool:
    """Returns whether an error of llguidance is a panic; its text has source locations, not for clients."""
    return complaint.startswith("panic:")


def is_dead_end(complaint: str) -> bool:
    """Returns whether an error of llguidance means that no token may follow, though the text must not end yet."""
    return complaint.startswith("NoExtensionBias")
