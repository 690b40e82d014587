"""Drafts the next tokens of rows, and decides how many drafts a step computes.

All ranks draft the same: a draft depends only on the ids of its row and on what the scheduler sends, never on a clock.
Knows no sequence ids and no blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from blockyard_kernels.drafting import LEAST_MATCH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard_kernels.drafting import DraftingOps, DraftRows, Integers
    from blockyard_kernels.sampling import Flags
    from worker_service.grammars.matchers import GrammarState

    Floats = npt.NDArray[np.float64]

# Kinds of drafts by the number of ids that stood together before: 2, 3 and 4, 5 to 8, more.
KIND_BOUNDS = np.array([3, 5, 9])
FORCED = 4
"""The kind of drafts that a grammar forces."""
# How often a draft is right if all before it in its run are right: by kind, and as the first, second, third and a later
# one of its kind. Measured on edits of source code; the chance of a later draft is that of a longer match.
PRIOR = np.array(
    [
        [0.44, 0.60, 0.60, 0.75],
        [0.60, 0.68, 0.75, 0.85],
        [0.78, 0.85, 0.90, 0.94],
        [0.95, 0.97, 0.97, 0.98],
        [0.97, 0.98, 0.98, 0.98],
    ]
)
# The number of drafts that the prior counts for, and what is left of a row's counts after each of its steps.
PRIOR_WEIGHT = 4.0
DECAY = 0.97
PER_TOKEN = 1000.0
"""Prices are in thousandths of a token."""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """The drafts of rows [P]: `num_drafts` [P] of each, behind its known ids.

    The first `num_forced` [P] of them come from a grammar. `are_predicted` [P]: the request's prediction says the rest.
    `kept` [P] are the places of the rows among those that wanted drafts, `kinds` and `steps` [P, most] the kind of each
    draft and its place among those of its kind.
    """

    kept: Integers
    rows: Integers
    num_drafts: Integers
    kinds: Integers
    steps: Integers
    num_forced: Integers
    are_predicted: Flags

    def of_some(self, num_drafts: Integers) -> Proposal | None:
        """Returns the first drafts of the rows that keep some; None: no row keeps any."""
        kept = num_drafts.nonzero()[0]
        if not len(kept):
            return None
        num_drafts, num_forced = num_drafts[kept], np.minimum(self.num_forced[kept], num_drafts[kept])
        kinds, steps, are_predicted = self.kinds[kept], self.steps[kept], self.are_predicted[kept]
        return Proposal(kept, self.rows[kept], num_drafts, kinds, steps, num_forced, are_predicted)


class Drafter:
    """The drafts of one batch's rows, and how often those of each row were right."""

    def __init__(self, ops: DraftingOps, *, follows_grammars: bool = True) -> None:
        """`follows_grammars`: whether drafts come from grammars too. Only the sampling rank of a group has these."""
        self._ops = ops
        self._follows_grammars = follows_grammars
        # By row, kind and step: how many drafts were computed with all before them right, and how many were right too.
        self.tried = np.zeros((0, *PRIOR.shape))
        self.right = np.zeros((0, *PRIOR.shape))

    def grow(self, num_rows: int) -> None:
        new = np.zeros((num_rows - len(self.tried), *PRIOR.shape))
        self.tried, self.right = np.concatenate([self.tried, new]), np.concatenate([self.right, new])

    def begin(self, row: int) -> None:
        """Forgets what was known of a row, which belongs to another sequence now."""
        self.tried[row] = self.right[row] = 0

    def propose(
        self, wanted: DraftRows, grammars: Sequence[tuple[int, GrammarState]], prices: Integers
    ) -> Proposal | None:
        """Writes drafts behind the known ids of rows, and returns those that are worth their price.

        Args:
            wanted: the rows, and how many drafts each may have.
            grammars: the grammar states of those that have one, by place.
            prices: the price of the first, second, … draft of all rows together; empty: drafts cost nothing.
        """
        num_forced = np.zeros(len(wanted.rows), np.int64)
        if grammars and self._follows_grammars:
            num_forced = _write_forced(wanted, grammars)
            wanted = replace(wanted, lengths=wanted.lengths + num_forced, most=wanted.most - num_forced)
        found = self._ops.find_drafts(wanted)
        num_drafts = num_forced + found.num_drafts
        if not num_drafts.any():
            return None
        behind = np.arange(num_drafts.max()) - num_forced[:, None]
        kinds = np.where(behind < 0, FORCED, np.searchsorted(KIND_BOUNDS, found.num_matched, side="right")[:, None])
        steps = np.minimum(np.where(behind < 0, np.arange(behind.shape[1]), behind), PRIOR.shape[1] - 1)
        places, are_predicted = np.arange(len(num_drafts)), np.zeros(len(num_drafts), np.bool_)
        proposal = Proposal(places, wanted.rows, num_drafts, kinds, steps, num_forced, are_predicted)
        proposal = proposal.of_some(self._keep(proposal, prices) if len(prices) else num_drafts)
        if proposal is not None and any(text is not None for text in wanted.predicted):
            _find_predicted(wanted, proposal)
        return proposal

    def _keep(self, proposal: Proposal, prices: Integers) -> Integers:
        """Returns how many drafts of each row are kept: those that gain most over their prices together.

        Drafts are taken by their chance to be right, the largest first. Later ones may pay where earlier ones do not,
        since the rows of a step become cheaper in tiles.
        """
        of_row = proposal.rows[:, None], proposal.kinds, proposal.steps
        right = self.right[of_row] + PRIOR_WEIGHT * PRIOR[proposal.kinds, proposal.steps]
        chances = (right / (self.tried[of_row] + PRIOR_WEIGHT)).cumprod(1)
        exists = np.arange(chances.shape[1]) < proposal.num_drafts[:, None]
        # A run's later draft is no likelier than an earlier one, and stays behind it where both are as likely.
        order = np.argsort(-chances[exists], kind="stable")[: len(prices)]
        gains = (chances[exists][order] - prices[: len(order)] / PER_TOKEN).cumsum()
        if not len(gains) or gains.max() <= 0:
            return np.zeros_like(proposal.num_drafts)
        kept = np.nonzero(exists)[0][order[: gains.argmax() + 1]]
        return np.bincount(kept, minlength=len(proposal.rows))

    def learn(self, proposal: Proposal, num_right: Integers) -> None:
        """Takes how many drafts of each row [P] were right; below 0: the row is computed again."""
        rows, places = proposal.rows, np.arange(proposal.kinds.shape[1])
        is_right = places < num_right[:, None]
        was_tried = places < np.minimum(proposal.num_drafts, num_right + 1)[:, None]
        of_row = rows[:, None], proposal.kinds, proposal.steps
        for counts, took_place in ((self.tried, was_tried), (self.right, is_right)):
            counts[rows] *= DECAY
            # Later drafts share a place.
            np.add.at(counts, of_row, took_place)


def _find_predicted(wanted: DraftRows, proposal: Proposal) -> None:
    """Finds the rows whose drafts stand in what their request predicts, behind the same ids: there or elsewhere too."""
    for place, kept in enumerate(proposal.kept.tolist()):
        text, num_found = wanted.predicted[kept], proposal.num_drafts[place] - proposal.num_forced[place]
        if text is not None and num_found > 0:
            begin = wanted.lengths[kept] - LEAST_MATCH
            run = wanted.token_ids[wanted.rows[kept], begin : begin + LEAST_MATCH + num_found]
            proposal.are_predicted[place] = _contains(text.tobytes(), run.tobytes(), run.itemsize)


def _contains(text: bytes, run: bytes, item_size: int) -> bool:
    at = text.find(run)
    while at > 0 and at % item_size:
        at = text.find(run, at + 1)
    return at >= 0


def _write_forced(wanted: DraftRows, grammars: Sequence[tuple[int, GrammarState]]) -> Integers:
    """Writes the tokens that grammars force behind the known ids of their rows, and returns how many: [n]."""
    num_forced = np.zeros(len(wanted.rows), np.int64)
    for place, state in grammars:
        ids = state.forced_token_ids(int(wanted.most[place]), wanted.vocab_size)
        begin = wanted.lengths[place]
        wanted.token_ids[wanted.rows[place], begin : begin + len(ids)] = ids
        num_forced[place] = len(ids)
    return num_forced
