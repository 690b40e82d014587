"""The ops of sampling: how a backend chooses tokens of rows of logits, documented once.

Owns their shapes, dtypes and meaning. Knows no requests and no batch: whatever a row asks for is in columns. Logits are
float32 [R, vocabulary], contiguous, on the backend's device, and stay as they were, but for `apply_masks`; every other
array is numpy's. A row's result depends on its own logits and columns alone, never on other rows, their number or the
threads.

Tokens are ordered by value, the largest first, ties by the lower id. -inf is an impossible token.
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
    """How the tokens of rows [R] are chosen.

    A token must pass `min_p`, then `top_k`, then `top_p`, each a share or number of what the one before it leaves, of
    the softmax of the logits over the temperature. Among those that pass, it is drawn by a race of exponentials: the
    largest `logit / temperature - log(noise)` wins, which is a draw from their softmax (Gumbel 1954; Maddison et al.
    2014). The noise of a token is a word of Philox4x32-10 with the seed as its key and the counter (token id / 4,
    position, sequence index, 0), made exponential: a function of these alone, whatever else may be drawn.
    """

    temperatures: Floats
    """0: the first token, whatever the filters."""
    top_k: Integers
    """0: all."""
    top_p: Floats
    """Above 0; 1: all."""
    min_p: Floats
    """0: all."""
    seeds: Integers
    """64 bits, whatever their sign."""
    positions: Integers
    """Place among the output tokens, from 0."""
    sequence_indexes: Integers
    """The index of the sequence within its request."""

    def take(self, rows: npt.NDArray[np.integer[Any]] | Sequence[int]) -> Choices:
        return Choices(*(getattr(self, column.name)[rows] for column in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log probabilities of n rows: of a given token, if there is one, and then of the first tokens of the order."""

    token_ids: Integers
    """[n, candidates]."""
    logprobs: Floats
    """[n, candidates]: natural logarithms of the softmax over the whole vocabulary."""
    ranks: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    """[n]: the places of the tokens that stand there, from 1; empty without them."""


class SamplingOps(Protocol):
    """The ops, on one device."""

    def finite_rows(self, logits: Tensor) -> Flags:
        """Finds the rows that hold finite numbers alone: [R]."""
        ...

    def apply_masks(self, logits: Tensor, rows: Integers, words: npt.NDArray[np.uint32]) -> None:
        """Makes tokens of some rows impossible, in place: the one op that changes logits.

        Args:
            logits: of any number of rows.
            rows: [n], which, none twice.
            words: [n, vocabulary / 32, rounded up]: bit t % 32 of word t / 32 is set where token t stays possible.
        """
        ...

    def choose(self, logits: Tensor, choices: Choices) -> Integers:
        """Chooses a token of each row: ids [R].

        -1 where no token is possible, or where one is infinite; of no meaning where a logit is not a number.
        """
        ...

    def launch_choose(self, logits: Tensor, choices: Choices) -> Tensor:
        """Like `choose`, but leaves the ids [R] int64 on the device, and waits for nothing there."""
        ...

    def launch_finite_rows(self, logits: Tensor) -> Tensor:
        """Like `finite_rows`, but leaves the flags [R] bool on the device, and waits for nothing there."""
        ...

    def take_last_tokens(self, token_ids: Tensor, last_tokens: Tensor) -> Tensor:
        """Replaces ids that are not known yet, each by the token that a row sampled last, and waits for nothing.

        Args:
            token_ids: [T] int64 on the device, -1 - row where one is not known.
            last_tokens: [rows] int64 on the device.

        Returns:
            [T] int64, 0 in the place of a row's -1: a row that failed has no token, and nobody asks what comes of it.
        """
        ...

    def put_last_tokens(self, last_tokens: Tensor, rows: Tensor, token_ids: Tensor) -> None:
        """Writes the tokens [R] of rows [R], all int64 on the device and no two rows the same, into `last_tokens`."""
        ...

    def token_logprobs(
        self, logits: Tensor, rows: Integers, token_ids: Integers | None, num_best: int
    ) -> TokenLogprobs:
        """Computes log probabilities of given tokens of some rows, and of the first `num_best` tokens of each.

        Args:
            logits: of any number of rows.
            rows: [n], which.
            token_ids: [n], the token of each that comes first among its candidates, or None for no such token.
            num_best: up to the size of the vocabulary.
        """
        ...

    def choose_bytes(self, num_rows: int, vocab_size: int) -> int:
        """The most memory that `choose` takes for so many rows, beside their logits."""
        ...

    def token_logprobs_bytes(self, num_rows: int, vocab_size: int) -> int:
        """The most memory that `token_logprobs` takes for so many rows, beside their logits."""
        ...
