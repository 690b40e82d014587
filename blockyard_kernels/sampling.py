"""The sampling ops: how a backend chooses tokens from rows of logits, documented once for all backends.

This module defines shapes, dtypes and semantics. It knows no requests and no batch: the parameters of each row are in
columns of arrays. Logits are float32 [R, vocabulary], contiguous, on the backend's device; only `apply_masks` changes
them. A row's result depends on its own logits and parameters only, never on other rows, their number or the number of
threads.

Tokens are ordered by logit, the largest first; on ties the lower id comes first. A logit of -inf makes a token
impossible.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The sampling parameters of rows [R], one column for each parameter.

    The filters apply in the order `min_p`, `top_k`, `top_p`, each to the tokens that passed the filter before it;
    probabilities are the softmax of the logits divided by the temperature. The token is drawn from the tokens that pass
    all filters: the largest `logit / temperature - log(noise)` wins, which is a draw from their softmax (the Gumbel-max
    trick: Gumbel 1954; Maddison et al. 2014). The noise of a token is one word of Philox4x32-10, made exponential, with
    the seed as key and (token id / 4, position, sequence index, 0) as counter; nothing else influences it.
    """

    temperatures: Floats
    """0: greedy: the token with the largest logit, whatever the filters."""
    top_k: Integers
    """0: off."""
    top_p: Floats
    """In (0, 1]; 1: off."""
    min_p: Floats
    """0: off."""
    seeds: Integers
    """Seeds of 64 bits; the sign bit counts like any other."""
    positions: Integers
    """Index of the token among the output tokens, from 0."""
    sequence_indexes: Integers
    """The index of the sequence within its request."""

    def take(self, rows: npt.NDArray[np.integer[Any]] | Sequence[int]) -> Choices:
        return Choices(*(getattr(self, column.name)[rows] for column in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log probabilities of n rows: of the given token, if there is one, then of the most likely tokens in order."""

    token_ids: Integers
    """[n, candidates]."""
    logprobs: Floats
    """[n, candidates]: natural logarithms of the softmax over the whole vocabulary."""
    ranks: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    """[n]: the rank of each given token in its row, from 1; empty if no tokens were given."""


class SamplingOps(Protocol):
    """The sampling ops on one device."""

    def finite_rows(self, logits: Tensor) -> Flags:
        """Returns for each row whether all its logits are finite: [R]."""
        ...

    def apply_masks(self, logits: Tensor, rows: Integers, words: npt.NDArray[np.uint32]) -> None:
        """Sets the logits of masked tokens of some rows to -inf, in place. No other op changes logits.

        Args:
            logits: [R, vocabulary].
            rows: [n], indices of the rows to mask, all distinct.
            words: [n, vocabulary / 32, rounded up]: bit t % 32 of word t / 32 is set if token t stays possible.
        """

    def choose(self, logits: Tensor, choices: Choices) -> Integers:
        """Chooses a token of each row: ids [R].

        The id is -1 if no token of the row is possible or a logit is +inf, and arbitrary if a logit is NaN.
        """
        ...

    def launch_choose(self, logits: Tensor, choices: Choices) -> Tensor:
        """Like `choose`, but leaves the ids [R] int64 on the device, if possible without waiting for it."""
        ...

    def launch_finite_rows(self, logits: Tensor) -> Tensor:
        """Like `finite_rows`, but leaves the flags [R] bool on the device, without waiting for it."""
        ...

    def take_last_tokens(self, token_ids: Tensor, last_tokens: Tensor) -> Tensor:
        """Replaces placeholder ids by the tokens that rows sampled last, without waiting for the device.

        Args:
            token_ids: [T] int64 on the device; -1 - row is the placeholder for that row's last token.
            last_tokens: [rows] int64 on the device: the last token of each row, -1 if its sampling failed.

        Returns:
            [T] int64. A last token of -1 becomes 0; the result of a failed row is not used.
        """
        ...

    def put_last_tokens(self, last_tokens: Tensor, rows: Tensor, token_ids: Tensor) -> None:
        """Writes `token_ids` [R] to the distinct rows `rows` [R] of `last_tokens`; all are int64 on the device."""

    def token_logprobs(
        self, logits: Tensor, rows: Integers, token_ids: Integers | None, num_best: int
    ) -> TokenLogprobs:
        """Computes, for some rows, log probabilities of a given token and of the `num_best` most likely tokens.

        Args:
            logits: [R, vocabulary].
            rows: [n], indices of the rows.
            token_ids: [n], the given token of each row, first among its candidates; None: no token is given.
            num_best: from 0 to the size of the vocabulary.
        """
        ...

    def choose_bytes(self, num_rows: int, vocab_size: int) -> int:
        """Returns the peak memory of `choose` for `num_rows` rows in bytes, without their logits."""
        ...

    def token_logprobs_bytes(self, num_rows: int, vocab_size: int) -> int:
        """Returns the peak memory of `token_logprobs` for `num_rows` rows in bytes, without their logits."""
        ...
