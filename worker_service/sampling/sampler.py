"""Chooses the next token of each row, or finds its candidates: edits, penalties and filters in vLLM V1's order.

Knows no sequence ids, no blocks and no arithmetic of filters. A row's token depends only on its own logits and
parameters: each edit changes named tokens of named rows, and `blockyard_kernels.sampling` keeps rows independent.

Edits of logits, float32 [rows, vocabulary], are in place, in plain torch. Each takes columns of equal length whose
entries name a row and a token, so that its cost grows with the named tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.contract.sampling import SamplingParams
from blockyard_kernels.launching import upload
from blockyard_kernels.sampling import Choices
from worker_service.sampling import logprobs
from worker_service.sampling.sampling_state import SAMPLING_FIELDS, SequenceLists, write_sampling
from worker_service.step import MAX_LOGPROBS, NO_LOGPROBS, Array, Logprobs, NewRow, no_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blockyard_kernels.ops import Backend
    from worker_service.grammars.matchers import Masks


# The largest logit after a penalty. Divided by the lowest temperature it is still finite; with an infinite logit the
# filters could keep no token.
_MAX_LOGIT = 1e30


def allow_only(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Makes all tokens of these rows impossible except `token_ids`, in place: int64 columns of the same length."""
    allowed = logits[rows, token_ids]
    logits[rows.unique()] = float("-inf")
    logits[rows, token_ids] = allowed


def mask_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Makes tokens impossible, in place: `rows` and `token_ids` are int64 columns of the same length."""
    logits[rows, token_ids] = float("-inf")


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> None:
    """Adds to the logits of tokens, in place: columns of the same length, with distinct (row, token) pairs."""
    logits[rows, token_ids] += bias


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    penalties: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Applies the repetition, frequency and presence penalty, in place and in this order.

    Args:
        logits: float32 [rows, vocabulary].
        rows, token_ids: int64 [n]: the distinct tokens in the prompt and the output of each row.
        output_counts: float32 [n]: the count of each token in the output; 0 if it is only in the prompt.
        penalties: repetition, frequency, presence: float32 [n], the penalties of each token's row.
    """
    repetition, frequency, presence = penalties
    values = logits[rows, token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition).clamp_(max=_MAX_LOGIT)
    values = values - frequency * output_counts
    logits[rows, token_ids] = values - presence * (output_counts > 0)


Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """The rows that a step samples.

    `columns` are records [R] with SAMPLING_FIELDS, `positions` [R] the index of the token in the row's output from 0,
    `lists` [R] the rows' lists, `outputs` the output so far of rows with bad words, by their place among the R, `masks`
    the masks of grammars.
    """

    columns: npt.NDArray[np.void]
    positions: Array
    lists: Sequence[SequenceLists]
    outputs: Mapping[int, npt.NDArray[np.int32]]
    masks: Masks | None = None

    def __len__(self) -> int:
        return len(self.columns)


def worst_rows(num_rows: int, vocab_size: int) -> SampleRows:
    """Makes the most expensive rows for the sampler: both filters, a top_k over the whole vocabulary, logprobs."""
    sampling = SamplingParams(top_k=vocab_size - 1, top_p=0.99, logprobs=MAX_LOGPROBS)
    sequence = NewRow(0, 0, no_ids(), 0, 0, no_ids(), sampling)
    lists = SequenceLists(sequence, vocab_size)
    columns = np.zeros(num_rows, np.dtype(SAMPLING_FIELDS, align=True))
    write_sampling(columns, sequence, lists, vocab_size)
    return SampleRows(columns, np.zeros(num_rows, np.int64), [lists] * num_rows, {})


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The tokens chosen for rows [R].

    A row failed if its logits are not `finite` or if edits left no token; its token id is arbitrary. `logprobs` belong
    to the rows that `has_logprobs` marks: rows that requested them and did not fail.

    In a step with drafts the R are sequences, `counts` [R] says how many of `token_ids` belong to each in turn, and
    `has_logprobs` marks tokens. A sequence that has none and did not fail computes its last known token again.
    """

    token_ids: Array = field(default_factory=no_ids)
    failed: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    has_logprobs: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    logprobs: Logprobs = NO_LOGPROBS
    finite: Flags = field(default_factory=lambda: np.ones(0, np.bool_))
    counts: Array | None = None

    @property
    def starts_over(self) -> Flags | None:
        """Whether each sequence [R] computes its last known token again; None: none does."""
        if self.counts is None:
            return None
        starts_over = (self.counts == 0) & ~self.failed
        return starts_over if starts_over.any() else None


@dataclass(frozen=True, slots=True, eq=False)
class BeamCandidates:
    """The candidates of the rows [R] that did not fail; rows fail as in `Sampled`."""

    failed: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    logprobs: Logprobs = NO_LOGPROBS
    finite: Flags = field(default_factory=lambda: np.ones(0, np.bool_))


class _FlatColumns:
    """Collects (row, token id, values…) entries of many rows for one indexed operation."""

    def __init__(self) -> None:
        self._rows: list[Array] = []
        self._token_ids: list[Array] = []
        self._values: list[tuple[npt.NDArray[Any], ...]] = []

    def add(self, row: int, token_ids: Array, *values: Any) -> None:
        """Adds entries of one row; a value is an array of their length, or a scalar of the row."""
        self._rows.append(np.full(len(token_ids), row, np.int64))
        self._token_ids.append(token_ids)
        self._values.append(tuple(np.broadcast_to(np.float32(value), len(token_ids)) for value in values))

    def tensors(self, device: torch.device) -> list[Tensor]:
        """Returns the columns: rows, token ids, then each value."""
        parts = [self._rows, self._token_ids, *zip(*self._values, strict=True)]
        return [upload(np.concatenate(part), device) for part in parts]

    def __bool__(self) -> bool:
        return bool(self._rows)


class Sampler:
    """Samples rows of logits on one device."""

    def __init__(self, backend: Backend) -> None:
        self._ops = backend.sampling
        self._device = backend.device

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: SampleRows, finite: Flags | None = None) -> Sampled:
        """Chooses a token for each row.

        Args:
            logits: float32 [R, vocabulary], on the device; overwritten.
            rows: the rows' sampling parameters.
            finite: [R], whether all logits of each row are finite, if that is known.
        """
        columns = rows.columns
        if finite is None:
            finite = self._ops.finite_rows(logits)
        asks, edited = columns["logprobs"] >= 0, columns["edits_logits"]
        # Log probabilities come from the logits before any edit.
        spoiled = self._tensor(np.flatnonzero(asks & edited))
        raw = logits[spoiled]
        if edited.any():
            self._edit(logits, rows)
        token_ids = self._ops.choose(logits, _choices(rows))
        failed = ~finite | (token_ids < 0)
        has_logprobs = asks & ~failed
        if not has_logprobs.any():
            return Sampled(token_ids, failed, has_logprobs, finite=finite)
        logits[spoiled] = raw
        places = np.flatnonzero(has_logprobs)
        found = logprobs.of_tokens(self._ops, logits, places, token_ids[places], columns["logprobs"][places])
        return Sampled(token_ids, failed, has_logprobs, found, finite)

    def find_finite(self, logits: Tensor) -> Flags:
        """Returns whether all logits of each row are finite."""
        return self._ops.finite_rows(logits)

    @torch.inference_mode()
    def launch(self, logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
        """Chooses a token for each row without waiting for the device. No row may request log probabilities.

        Args: as in `sample`.

        Returns:
            Token ids int64 [R], -1 if no token is possible, and whether all logits are finite bool [R], on the device.
        """
        finite = self._ops.launch_finite_rows(logits)
        if rows.columns["edits_logits"].any():
            self._edit(logits, rows)
        return self._ops.launch_choose(logits, _choices(rows)), finite

    @torch.inference_mode()
    def candidates(self, logits: Tensor, rows: SampleRows, finite: Flags | None = None) -> BeamCandidates:
        """Finds the likeliest tokens of each row of a beam search, after the edits that come before the temperature.

        Args: as in `sample`.
        """
        if finite is None:
            finite = self._ops.finite_rows(logits)
        if rows.columns["edits_logits"].any():
            self._edit(logits, rows)
        places = np.flatnonzero(finite)
        found = logprobs.of_best(self._ops, logits, places, rows.columns["num_beam_candidates"][places])
        has_some = found.num_candidates > 0
        failed = np.ones(len(rows), np.bool_)
        failed[places[has_some]] = False
        return BeamCandidates(failed, replace(found, num_candidates=found.num_candidates[has_some]), finite)

    def _tensor(self, column: npt.NDArray[Any]) -> Tensor:
        return upload(column, self._device)

    def _edit(self, logits: Tensor, rows: SampleRows) -> None:
        """Applies grammars, allowed tokens, masks, biases and penalties in this order, each to all rows.

        Tokens that would complete a bad word are masked, and stop tokens before min_tokens, unless a grammar allows
        nothing else. The token that ends reasoning is the only one possible when the reasoning's budget is spent.
        """
        if rows.masks is not None:
            self._ops.apply_masks(logits, rows.masks.rows, rows.masks.join())
        allowed, masked, biased, penalized = _FlatColumns(), _FlatColumns(), _FlatColumns(), _FlatColumns()
        for row in np.flatnonzero(rows.columns["edits_logits"]).tolist():
            columns, lists = rows.columns[row], rows.lists[row]
            if (forced := _forced_token_ids(rows, row)) is not None:
                # No other edit concerns the only token that is possible.
                allowed.add(row, forced)
                continue
            if len(lists.allowed_token_ids):
                allowed.add(row, lists.allowed_token_ids)
            for token_ids in _masked_token_ids(rows, row):
                masked.add(row, token_ids)
            if len(lists.bias_token_ids):
                biased.add(row, lists.bias_token_ids, lists.bias_values)
            if lists.counts is not None:
                names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
                values = (columns[name] for name in names)
                penalized.add(row, lists.counts.token_ids, lists.counts.output_counts, *values)
        if allowed:
            allow_only(logits, *allowed.tensors(self._device))
        if masked:
            mask_tokens(logits, *masked.tensors(self._device))
        if biased:
            add_bias(logits, *biased.tensors(self._device))
        if penalized:
            at_rows, token_ids, counts, *penalties = penalized.tensors(self._device)
            repetition, frequency, presence = penalties
            apply_penalties(logits, at_rows, token_ids, counts, (repetition, frequency, presence))


def _forced_token_ids(rows: SampleRows, row: int) -> Array | None:
    """Returns the token that must end the row's reasoning now; None if several tokens are possible.

    A grammar allows no end within a character whose bytes are several tokens: the end then waits for its last byte.
    """
    forced = rows.lists[row].forced_token_ids
    if forced is None or (rows.masks is not None and not rows.masks.allows(row, int(forced[0]))):
        return None
    return forced


def _masked_token_ids(rows: SampleRows, row: int) -> Iterator[Array]:
    """Yields the tokens that would complete a bad word, and the stop tokens if the row must not end yet."""
    lists = rows.lists[row]
    if lists.bad_words:
        yield lists.bad_words.completing(rows.outputs[row])
    if rows.positions[row] < rows.columns[row]["min_tokens"] and not _must_end(rows, row):
        yield lists.stop_token_ids


def _must_end(rows: SampleRows, row: int) -> bool:
    """Returns whether a row's grammar allows nothing but an end."""
    return rows.masks is not None and rows.masks.leaves_only(row, rows.lists[row].stop_token_ids)


def _choices(rows: SampleRows) -> Choices:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "sequence_index")
    temperature, top_k, top_p, min_p, seed, index = (np.ascontiguousarray(rows.columns[name]) for name in names)
    return Choices(temperature, top_k, top_p, min_p, seed, rows.positions, index)
