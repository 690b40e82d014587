"""Token ids of soft prompts: a soft prompt of n rows is n ids above every vocabulary, before the prompt's ids."""

from __future__ import annotations

FIRST_VIRTUAL_ID = 1 << 30
"""The id of any soft prompt's first row: above every vocabulary, and within a signed 32-bit integer."""
MAX_VIRTUAL_TOKENS = 1 << 14
"""The most rows of a soft prompt."""


def virtual_ids(num_virtual_tokens: int) -> range:
    """Returns the ids of a soft prompt of `num_virtual_tokens` rows."""
    return range(FIRST_VIRTUAL_ID, FIRST_VIRTUAL_ID + num_virtual_tokens)
