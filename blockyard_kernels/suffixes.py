"""The drafting ops in numpy, for backends without their own. See `blockyard_kernels.drafting`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from blockyard_kernels.drafting import LEAST_MATCH, LONGEST_MATCH, DraftRows, Drafts

if TYPE_CHECKING:
    from blockyard_kernels.drafting import Ids


class HostDrafting:
    def find_drafts(self, wanted: DraftRows) -> Drafts:
        """Writes the drafts of rows one by one."""
        num_drafts, num_matched = np.zeros(len(wanted.rows), np.int64), np.zeros(len(wanted.rows), np.int64)
        for place, row in enumerate(wanted.rows.tolist()):
            length, most = int(wanted.lengths[place]), int(wanted.most[place])
            known = wanted.token_ids[row]
            ids, matched = _find(known[:length], wanted.predicted[place], most, wanted.vocab_size)
            known[length : length + len(ids)] = ids
            num_drafts[place], num_matched[place] = len(ids), matched
        return Drafts(num_drafts, num_matched)


def _find(known: Ids, predicted: Ids | None, most: int, vocab_size: int) -> tuple[list[int], int]:
    """Returns the drafts of one row, and the length of the match that they follow."""
    text = _tokens_at_the_end(known, vocab_size)
    suffix = text[-LONGEST_MATCH:].tolist()
    end, matched = _longest_match(text, suffix)
    if predicted is not None:
        other = _tokens_at_the_end(predicted, vocab_size)
        other_end, other_matched = _longest_match(other, suffix)
        if other_matched > matched:
            return other[other_end : other_end + most].tolist(), other_matched
    if not matched:
        return [], 0
    ids = text.tolist()
    for place in range(end, end + most):
        ids.append(ids[place])
    return ids[len(text) :], matched


def _tokens_at_the_end(text: Ids, vocab_size: int) -> Ids:
    """Returns what stands behind the last id that is no token."""
    others = np.flatnonzero((text < 0) | (text >= vocab_size))
    return text[others[-1] + 1 :] if len(others) else text


def _longest_match(text: Ids, suffix: list[int]) -> tuple[int, int]:
    """Returns where the longest match ends, the last of equally long ones, and its length; (0, 0): there is none."""
    best = (0, 0)
    if len(suffix) < LEAST_MATCH:
        return best
    ends = np.flatnonzero((text[:-2] == suffix[-2]) & (text[1:-1] == suffix[-1])) + 2
    ids = text.tolist() if len(ends) else []
    for end in ends.tolist():
        matched = LEAST_MATCH
        while matched < min(len(suffix), end) and ids[end - 1 - matched] == suffix[-1 - matched]:
            matched += 1
        if matched >= best[1]:
            best = end, matched
    return best
