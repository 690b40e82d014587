"""The ids of virtual tokens: a soft prompt of n rows is n ids that no vocabulary has, before the ids of a prompt."""

from __future__ import annotations

FIRST_VIRTUAL_ID = 1 << 30
"""The id of a soft prompt's first row, whoever's it is: above all vocabularies, and below what a signed word holds."""
MAX_VIRTUAL_TOKENS = 1 << 14
"""The most rows of a soft prompt."""


def virtual_ids(num_virtual_tokens: int) -> range:
    """Returns the ids of a soft prompt of so many rows."""
    return range(FIRST_VIRTUAL_ID, FIRST_VIRTUAL_ID + num_virtual_tokens)
