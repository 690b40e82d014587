"""A source of drafts that knows what comes next, and lies about it as it likes."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from blockyard_kernels.drafting import LEAST_MATCH, Drafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard_kernels.drafting import DraftRows


class HostileDrafts:
    """Drafts what really follows, with other ids among it: stop ids, those of the padding, any.

    Each draft is a function of the seed and the row's ids, so that all ranks draft the same.
    """

    def __init__(self, lies: Sequence[int], seed: int = 0, share_right: float = 0.75) -> None:
        """`lies`: ids that are likely among the wrong ones."""
        self.texts: list[list[int]] = []
        """Whole texts. A row's drafts go on as the text does whose beginning it is."""
        self.num_written = 0
        self._lies = list(lies)
        self._seed = seed
        self._share_right = share_right

    def find_drafts(self, wanted: DraftRows) -> Drafts:
        """See `blockyard_kernels.drafting.DraftingOps`."""
        drafted = []
        for row, length, most in zip(wanted.rows, wanted.lengths.tolist(), wanted.most.tolist(), strict=True):
            known = wanted.token_ids[row]
            ids = self._next(known[:length].tolist(), most, wanted.vocab_size)
            known[length : length + len(ids)] = ids
            drafted.append(len(ids))
        self.num_written += sum(drafted)
        counts = np.array(drafted, np.int64)
        return Drafts(counts, np.where(counts > 0, LEAST_MATCH, 0))

    def _next(self, known: list[int], most: int, vocab_size: int) -> list[int]:
        chooser = random.Random(f"{self._seed} {known}")
        text = next((each for each in self.texts if each[: len(known)] == known), known)
        following = text[len(known) :] + [chooser.randrange(vocab_size) for _ in range(most)]
        lies = [*self._lies, chooser.randrange(vocab_size)]
        ids = [each if chooser.random() < self._share_right else chooser.choice(lies) for each in following]
        return ids[: chooser.randint(0, most)]
