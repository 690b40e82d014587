"""Follows the reasoning of a sequence, and ends it when its budget is spent.

The state depends only on the request and the tokens of the output: a sequence that is computed again, or by another
worker, has the same tokens. Knows no texts and no tensors.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.contract.sampling import ThinkingTokens
    from worker_service.step import Array


class ThinkingState:
    """The reasoning of one sequence, which takes the tokens of its output one by one.

    The tokens between the beginning and the end of reasoning count. When as many have come as the budget allows, the
    only possible token is the one that ends reasoning. If reasoning may begin anywhere, the budget is that of the whole
    output; else only reasoning at the output's beginning counts.
    """

    def __init__(self, budget: int, tokens: ThinkingTokens, output_token_ids: Iterable[int]) -> None:
        self._tokens = tokens
        self._end = np.array([tokens.end_token_id], np.int64)
        self._num_left = budget
        self._is_open = tokens.is_open
        self._is_over = False
        self._longest = max(map(len, tokens.begins), default=0)
        # The last tokens that may begin reasoning.
        self._recent: tuple[int, ...] = ()
        for token_id in output_token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Takes the next token of the output."""
        if self._is_open and token_id == self._tokens.end_token_id:
            self._is_open, self._is_over, self._recent = False, not self._tokens.begins_anywhere, ()
        elif self._is_open:
            self._num_left -= 1
        elif not self._is_over:
            self._look_for_begin(token_id)

    def _look_for_begin(self, token_id: int) -> None:
        self._recent = (*self._recent, token_id)
        begins = self._tokens.begins
        if self._tokens.begins_anywhere:
            self._is_open = any(self._recent[-len(begin) :] == begin for begin in begins)
            self._recent = self._recent[-self._longest :]
        else:
            self._is_open = self._recent in begins
            self._is_over = not self._is_open and len(self._recent) >= self._longest

    @property
    def forced_token_ids(self) -> Array | None:
        """The only token that may come next: int64 [1]; None while the output is free."""
        return self._end if self._is_open and self._num_left <= 0 else None

    def copy(self) -> ThinkingState:
        return copy(self)
