"""Runs: the rows of a step's sequences of which some compute drafts behind their last known token.

A run is the row of a sequence's last known token, and a row for each of its drafts. The token that is chosen in a row
counts if all drafts before it were chosen too. Knows how tokens are told right from wrong, and not how they are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from blockyard_kernels.sampling import Flags
    from worker_service.batch.row_requests import RowRequests
    from worker_service.step import Array


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """The runs of the R sequences that a step samples, of V rows together; a sequence without drafts has one row.

    `num_drafts` [R] are the drafts of each sequence, `firsts` [R] its first row among the V. Row v belongs to sequence
    `owners[v]` of the R and stands `offsets[v]` rows behind the first of its run. `requests` are the requests of all V,
    in which a sequence is repeated. `draft_places` [V] are the places of the drafts, among the step's tokens, that the
    rows lead to; that of a run's last row, which `is_last` marks, has no meaning.
    """

    num_drafts: Array
    firsts: Array
    owners: Array
    offsets: Array
    requests: RowRequests
    draft_places: Array
    is_last: Flags
    # Sequences whose next token depends on states that earlier tokens change, or that ask for log probabilities: their
    # rows are chosen one after another. [R]
    in_rounds: Flags

    def __len__(self) -> int:
        return len(self.owners)

    def has_not_finite(self, finite: Flags) -> Flags:
        """Returns whether each run with drafts [R] has a row whose logits are not finite; `finite`: [V]."""
        return np.logical_or.reduceat(~finite, self.firsts) & (self.num_drafts > 0)

    def find_drafts(self, token_ids: Array) -> Array:
        """Returns the draft behind each row [V], -1 behind the last of a run. `token_ids`: the step's tokens."""
        return np.where(self.is_last, -1, token_ids[self.draft_places])

    def rows_of(self, counts: Array) -> Array:
        """Returns the first so many rows of each run."""
        begins = counts.cumsum() - counts
        return (self.firsts - begins).repeat(counts) + np.arange(counts.sum())


def make_runs(sampled: RowRequests, num_drafts: Array) -> Runs:
    """Makes the runs of sampled sequences, of which `num_drafts` [R] have drafts behind their last known token."""
    lengths = 1 + num_drafts
    firsts = lengths.cumsum() - lengths
    owners = np.arange(len(lengths)).repeat(lengths)
    offsets = np.arange(len(owners)) - firsts.repeat(lengths)
    hidden = sampled.last_hidden[owners] + offsets
    is_last = offsets == num_drafts[owners]
    in_rounds = sampled.columns["logprobs"] >= 0
    in_rounds[[place for place, _ in sampled.followers]] = True
    places = np.where(is_last, 0, hidden + 1)
    return Runs(num_drafts, firsts, owners, offsets, sampled.repeated(owners, hidden), places, is_last, in_rounds)
