"""The drafting ops: guesses at the next ids of rows from texts that are known. Documented once for all backends.

Knows no requests: whose texts they are and whether a guess is worth its time is decided elsewhere. A guess depends only
on the ids of its row's texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

Integers = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]

LEAST_MATCH = 2
"""The fewest ids that must have stood together before."""
LONGEST_MATCH = 32
"""Matches are compared up to this length: longer ones are equally long."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """Rows [n] that want drafts."""

    token_ids: Ids
    """[all rows, places], C-contiguous. The drafts of a row are written behind its known ids."""
    rows: Integers
    """[n]: which of all rows."""
    lengths: Integers
    """[n]: the known ids of each row."""
    most: Integers
    """[n]: how many drafts each row wants at most; there are places for them."""
    predicted: Sequence[Ids | None]
    """[n]: a second text of each row, contiguous; None: there is none."""
    vocab_size: int
    """Ids from here on are no tokens: no draft has one, and what stands before them in a text is not searched."""


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """The drafts that were written for rows [n]."""

    num_drafts: Integers
    num_matched: Integers
    """The number of ids that stood together before; 0: nothing was found."""


class DraftingOps(Protocol):
    """The drafting ops of one backend, on the host."""

    def find_drafts(self, wanted: DraftRows) -> Drafts:
        """Writes drafts: the ids that followed where the last ids of a row stood before.

        The longest match counts, from LEAST_MATCH ids on; of equally long ones the one that ends last, and one in the
        row's own ids before one in its second text. If the row's own ids end before the drafts do, they go on with
        the drafts.
        """
        ...
