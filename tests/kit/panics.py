"""Has llguidance panic as it does in service: with an exception that is no `Exception`."""

from __future__ import annotations

from llguidance import LLMatcher

GRAMMAR = 'start: %json {"type": "object", "required": "' + "🙂" * 50 + '"}'
"""What llguidance 1.9 panics at."""


def panic() -> None:
    """Raises a PanicException."""
    LLMatcher.validate_grammar_with_warnings(GRAMMAR)
    raise AssertionError("llguidance does not panic at this any more: give it something else")
