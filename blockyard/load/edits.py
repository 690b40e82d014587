"""Requests to repeat a part of a source file with a change: most of the answer stands in the prompt.

The edits are from the commits of Blockyard's repository (`benchmarks/kit/pack_edits.py`).
"""

from __future__ import annotations

import json
import random
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from blockyard.load.load import Request, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator


class Edit(NamedTuple):
    """A change of source code: what it does, and the code before and after."""

    title: str
    before: str
    after: str

    def make_prompt(self, salt: int) -> str:
        """Makes a text that asks for the code after the change. Prompts with other salts share no prefix."""
        return f"# {salt:08x}: {self.title}\n# Before:\n{self.before}\n# After:\n"


def read_edits() -> list[Edit]:
    text = (files("blockyard.load") / "edits.json").read_text(encoding="utf-8")
    return [Edit(**each) for each in json.loads(text)]


def draw_edits(shape: Shape, seed: int) -> Iterator[Request]:
    """Yields requests for edits without end; the same seed yields the same. The edits decide how long prompts are."""
    draws, edits = random.Random(seed), read_edits()
    while True:
        for edit in draws.sample(edits, len(edits)):
            salt, num_tokens = draws.getrandbits(32), draws.randint(*shape.output_tokens)
            text = edit.make_prompt(salt)
            yield Request(salt, 0, num_tokens, shape.temperature, shape.ignore_eos, text)
