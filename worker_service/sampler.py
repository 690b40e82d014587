"""Chooses the next token of each row, or tells of its candidates: V1's order of edits, penalties and filters.

Knows no sequences' ids and no blocks. A row's token follows from its own logits and parameters: rows are grouped only
by what their own requests ask for, and kernels.reference.sampling keeps rows apart within a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.reference import sampling
from worker_service import logprobs
from worker_service.sampling_state import NUM_CANDIDATES, Method
from worker_service.step import NO_LOGPROBS, Logprobs, no_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from worker_service.sampling_state import SequenceLists
    from worker_service.step import Array

Flags = npt.NDArray[np.bool_]


# Logits from which tokens are chosen at a time: sorting a whole vocabulary takes many times their memory.
MAX_CHOSEN_LOGITS = 1 << 21
SORTING_COPIES = 12
# At most as many copies of all logits live at once: given, kept as they were, and two for log probabilities.
LOGITS_COPIES = 4


def sampling_bytes(num_rows: int, vocab_size: int) -> int:
    """The most memory that sampling so many rows takes, their logits among it."""
    num_chosen = min(num_rows * vocab_size, max(MAX_CHOSEN_LOGITS, vocab_size))
    return telling_bytes(num_rows, vocab_size) + SORTING_COPIES * num_chosen * torch.float32.itemsize


def telling_bytes(num_rows: int, vocab_size: int) -> int:
    """The most memory that telling the log probabilities of so many rows takes, their logits among it."""
    return LOGITS_COPIES * num_rows * vocab_size * torch.float32.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class SampleRows:
    """What is sampled in a step.

    `columns` are records [R] with SAMPLING_FIELDS, `positions` [R] the place of the token among the row's output from
    0, `lists` [R] the rows' lists, `outputs` the output so far of those that have bad words, by their place.
    """

    columns: npt.NDArray[np.void]
    positions: Array
    lists: Sequence[SequenceLists]
    outputs: Mapping[int, npt.NDArray[np.int32]]

    def __len__(self) -> int:
        return len(self.columns)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """What was chosen for rows [R].

    A row failed when its logits are not finite numbers or when edits left it no token; its token id means nothing.
    `logprobs` tell of the rows that are `told`: those that asked and did not fail.
    """

    token_ids: Array = field(default_factory=no_ids)
    failed: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    told: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    logprobs: Logprobs = NO_LOGPROBS


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The candidates of the rows that did not fail, of [R]."""

    failed: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))
    logprobs: Logprobs = NO_LOGPROBS


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
        """Gives the columns: rows, token ids, then each value."""
        parts = [self._rows, self._token_ids, *zip(*self._values, strict=True)]
        return [torch.from_numpy(np.concatenate(part)).to(device) for part in parts]

    def __bool__(self) -> bool:
        return bool(self._rows)


class Sampler:
    """Samples rows of logits on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: SampleRows) -> Sampled:
        """Chooses a token for each row.

        Args:
            logits: float32 [R, vocabulary], on the device; overwritten.
            rows: what the rows ask for.
        """
        asks = rows.columns["logprobs"] >= 0
        raw = logits[self._tensor(np.flatnonzero(asks))] if asks.any() else None
        sound = self._prepare(logits, rows)
        token_ids = self._choose(logits, rows, sound)
        failed = ~sound.cpu().numpy()
        told = asks & ~failed
        if raw is None or not told.any():
            return Sampled(token_ids.cpu().numpy(), failed, told)
        raw = raw if told[asks].all() else raw[self._tensor(told[asks])]
        found = logprobs.of_tokens(raw, token_ids[self._tensor(told)], rows.columns["logprobs"][told])
        return Sampled(token_ids.cpu().numpy(), failed, told, found)

    @torch.inference_mode()
    def candidates(self, logits: Tensor, rows: SampleRows) -> Candidates:
        """Finds the likeliest tokens of each row of a beam search, after the edits that come before the temperature.

        Args:
            logits: float32 [R, vocabulary], on the device; overwritten.
            rows: what the rows ask for.
        """
        sound = self._prepare(logits, rows)
        failed = ~sound.cpu().numpy()
        logits = logits[sound] if failed.any() else logits
        return Candidates(failed, logprobs.of_best(logits, rows.columns["num_beam_candidates"][~failed]))

    def _prepare(self, logits: Tensor, rows: SampleRows) -> Tensor:
        """Edits logits, in place, and tells which rows can be sampled: bool [R]."""
        sound = sampling.finite_rows(logits)
        if rows.columns["edits_logits"].any():
            self._edit(logits, rows)
            sound &= logits.max(-1).values > float("-inf")
        return sound

    def _choose(self, logits: Tensor, rows: SampleRows, sound: Tensor) -> Tensor:
        methods = rows.columns["method"]
        if not methods.any():
            return sampling.argmax(logits)
        if not bool(sound.all()):
            # Keeps what is not a number out of the filters' sums; these rows' tokens are dropped.
            logits[~sound] = 0
        token_ids = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        most = max(1, MAX_CHOSEN_LOGITS // logits.shape[1])
        for method in np.unique(methods).tolist():
            picked = np.flatnonzero(methods == method)
            for some in (picked[start : start + most] for start in range(0, len(picked), most)):
                index = torch.from_numpy(some).to(self._device)
                chosen = logits if len(some) == len(rows) else logits[index]
                token_ids[index] = self._apply(Method(method), chosen, rows.columns.take(some), rows.positions[some])
        return token_ids

    def _apply(self, method: Method, logits: Tensor, columns: npt.NDArray[np.void], positions: Array) -> Tensor:
        if method is Method.GREEDY:
            return sampling.argmax(logits)
        keys = sampling.DrawKeys(
            self._tensor(columns["seed"]), self._tensor(positions), self._tensor(columns["sequence_index"])
        )
        temperatures = self._tensor(columns["temperature"])
        if method is Method.DRAW:
            return sampling.draw(logits, temperatures, keys)
        filters = sampling.Filters(
            self._tensor(columns["top_k"]), self._tensor(columns["top_p"]), self._tensor(columns["min_p"])
        )
        num_candidates = NUM_CANDIDATES[method] or logits.shape[1]
        return sampling.draw_filtered(logits, temperatures, filters, keys, num_candidates)

    def _tensor(self, column: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(column.copy()).to(self._device)

    def _edit(self, logits: Tensor, rows: SampleRows) -> None:
        """Allows, masks, adds biases, applies penalties: in this order, each for all rows.

        What is masked completes a bad word, or is a stop token before min_tokens.
        """
        allowed, masked, biased, penalized = _FlatColumns(), _FlatColumns(), _FlatColumns(), _FlatColumns()
        for row in np.flatnonzero(rows.columns["edits_logits"]).tolist():
            columns, lists = rows.columns[row], rows.lists[row]
            if len(lists.allowed_token_ids):
                allowed.add(row, lists.allowed_token_ids)
            if lists.bad_words:
                masked.add(row, lists.bad_words.completing(rows.outputs[row]))
            if rows.positions[row] < columns["min_tokens"]:
                masked.add(row, lists.stop_token_ids)
            if len(lists.bias_token_ids):
                biased.add(row, lists.bias_token_ids, lists.bias_values)
            if lists.counts is not None:
                names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
                values = (columns[name] for name in names)
                penalized.add(row, lists.counts.token_ids, lists.counts.output_counts, *values)
        if allowed:
            sampling.allow_only(logits, *allowed.tensors(self._device))
        if masked:
            sampling.mask_tokens(logits, *masked.tensors(self._device))
        if biased:
            sampling.add_bias(logits, *biased.tensors(self._device))
        if penalized:
            at_rows, token_ids, counts, *penalties = penalized.tensors(self._device)
            repetition, frequency, presence = penalties
            sampling.apply_penalties(logits, at_rows, token_ids, counts, (repetition, frequency, presence))
