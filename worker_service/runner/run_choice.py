"""Chooses the tokens of runs: of each sequence's last known token, and of the drafts behind it.

Every row's token is chosen as if it were decoded alone, by the row's position, so a draft changes nothing but time. A
row counts if all drafts before it were chosen; a choice that depends on earlier tokens waits until they are known.
Knows no network.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from worker_service.batch.row_requests import find_grammars
from worker_service.sampling import logprobs
from worker_service.sampling.sampler import Sampled

if TYPE_CHECKING:
    import torch

    from blockyard_kernels.sampling import Flags
    from worker_service.batch.forward_batch import ForwardBatch
    from worker_service.batch.input_batch import InputBatch
    from worker_service.batch.runs import Runs
    from worker_service.grammars.matchers import Masks
    from worker_service.sampling.sampler import Sampler
    from worker_service.step import Array, Logprobs

# Stand-ins for the token of a row: none was chosen, no token is possible, the logits are not finite.
NOT_CHOSEN, NO_TOKEN, NOT_FINITE = -3, -2, -1


class RunChoice:
    """The choice of the tokens of one step's runs."""

    def __init__(self, forward_batch: ForwardBatch, batch: InputBatch, finite: Flags) -> None:
        """`finite` [V]: whether the logits of each row are finite."""
        runs = forward_batch.layout.runs
        assert runs is not None
        self._runs: Runs = runs
        self._batch = batch
        self._drafts = runs.find_drafts(forward_batch.token_ids)
        self._finite = finite
        self._starts_over = runs.has_not_finite(finite)
        self.token_ids = np.full(len(runs), NOT_CHOSEN)
        self._logprobs: list[tuple[Array, Logprobs]] = []

    def take_best(self, token_ids: Array) -> None:
        """Takes the likeliest token of each row [V]: all rows are plain greedy."""
        self.token_ids = np.where(self._finite, token_ids, NOT_FINITE)

    def choose(self, sampler: Sampler, logits: torch.Tensor, masks: Masks | None) -> None:
        """Chooses from logits [V, vocabulary], which are overwritten. `masks`: those of the runs' first rows."""
        runs = self._runs
        of_rounds = runs.in_rounds[runs.owners]
        places = np.flatnonzero((~of_rounds | (runs.offsets == 0)) & ~self._starts_over[runs.owners])
        if masks is not None:
            masks = masks.of_places(np.searchsorted(places, runs.firsts), ~self._starts_over)
        while len(places):
            self._choose_some(sampler, logits, places, masks)
            self._tell_followers(places[of_rounds[places]])
            goes_on = self._go_on()[places] & of_rounds[places]
            places = places[goes_on] + 1
            lists = (runs.requests.lists[place] for place in places.tolist())
            masks = self._batch.begin_masks(find_grammars(lists))

    def _choose_some(self, sampler: Sampler, logits: torch.Tensor, places: Array, masks: Masks | None) -> None:
        rows = replace(self._batch.sample_run_rows(self._runs, places), masks=masks)
        of_rows = logits if len(places) == len(logits) else logits[places]
        sampled = sampler.sample(of_rows, rows, self._finite[places])
        failed = np.where(sampled.finite, NO_TOKEN, NOT_FINITE)
        self.token_ids[places] = np.where(sampled.failed, failed, sampled.token_ids)
        if sampled.has_logprobs.any():
            self._logprobs.append((places[sampled.has_logprobs], sampled.logprobs))

    def _go_on(self) -> Flags:
        """Returns whether the row behind each row [V] counts: its draft was chosen, and does not end the sequence."""
        is_draft = (self.token_ids == self._drafts) & (self._drafts >= 0)
        return is_draft & ~self._batch.find_last(self._runs, self.token_ids)

    def _tell_followers(self, places: Array) -> None:
        """Adds the tokens of rows, which count, to the states that follow their sequences."""
        for place in places.tolist():
            token_id = int(self.token_ids[place])
            if token_id >= 0:
                for follower in self._runs.requests.lists[place].followers:
                    follower.add(token_id)

    def take_others(self, token_ids: Array) -> None:
        """Takes what another rank has chosen for each row [V], in the form of `verdict`."""
        self.token_ids = token_ids
        self._tell_followers(np.flatnonzero((token_ids >= 0) & self._runs.in_rounds[self._runs.owners]))

    def finish(self) -> Sampled:
        """Returns the tokens that count."""
        runs = self._runs
        ends = np.flatnonzero(~self._go_on())
        last = ends[np.searchsorted(ends, runs.firsts)]
        # A row that fails behind the first is computed again in the next step, and fails there.
        counts = last - runs.firsts + (self.token_ids[last] >= 0)
        counts[self._starts_over] = 0
        kept = runs.rows_of(counts)
        has_logprobs = runs.requests.columns["logprobs"][kept] >= 0
        return Sampled(
            self.token_ids[kept],
            failed=(counts == 0) & ~self._starts_over,
            has_logprobs=has_logprobs,
            logprobs=logprobs.in_order(self._logprobs),
            finite=self._finite[runs.firsts],
            counts=counts,
        )

    def verdict(self, sampled: Sampled) -> Array:
        """Returns what other ranks must know of each row [V]: the tokens that count, and why there are none."""
        runs, counts = self._runs, sampled.counts
        assert counts is not None
        told = np.full(len(runs), NOT_CHOSEN)
        told[runs.firsts] = np.where(self._starts_over, NOT_FINITE, self.token_ids[runs.firsts])
        told[runs.rows_of(counts)] = sampled.token_ids
        return told
