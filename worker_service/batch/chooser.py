"""Chooses what a step's rows of logits are for: tokens of sampled rows, candidates of beams.

Where ranks share the vocabulary, all choose plain greedy rows alike from each one's best; for all others rank 0 has the
logits brought together, chooses, and tells the rest. Which of both follows from the step alone, never from numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from worker_service.models.vocabulary import SharedVocabulary
from worker_service.sampling.sampler import BeamCandidates, Sampled, Sampler

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.capture import StepOutputs
    from kernels.collectives import Collectives
    from kernels.ops import Backend
    from kernels.sampling import Flags
    from worker_service.batch.input_batch import InputBatch
    from worker_service.batch.step_layout import StepLayout
    from worker_service.grammars.matchers import Masks


class Chooser:
    """The sampler of one model, at one rank."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        self.sampler = Sampler(backend)
        self._vocab_size = vocab_size
        self.shared: SharedVocabulary | None = None
        """Of a network that other ranks hold the rest of."""
        self._masks: Masks | None = None

    def join(self, collectives: Collectives) -> None:
        """Sets the ranks that share the vocabulary."""
        self.shared = SharedVocabulary(self._vocab_size, collectives) if collectives.size > 1 else None

    def whole(self, logits: Tensor) -> Tensor | None:
        """Returns logits over the whole vocabulary; None where another rank has them."""
        return logits if self.shared is None else self.shared.gather(logits)

    def begin(self, layout: StepLayout, batch: InputBatch) -> None:
        """Begins what a step's choice needs beside its logits, to be there when these are."""
        states = layout.sampled.grammars
        self._masks = batch.grammars.begin_masks(states) if states and batch.grammars is not None else None

    def choose(
        self, logits: Tensor, layout: StepLayout, batch: InputBatch, finite: Flags | None = None
    ) -> tuple[Sampled, BeamCandidates]:
        """Samples the first rows and finds the candidates of the others, which are beams'."""
        if self.shared is None:
            return self._choose_here(logits, layout, batch, finite)
        return (
            self._choose_together(self.shared, logits, layout, batch) if len(logits) else (Sampled(), BeamCandidates())
        )

    def choose_replayed(
        self, outputs: StepOutputs, layout: StepLayout, batch: InputBatch
    ) -> tuple[Sampled, BeamCandidates]:
        """Does so with the outputs of a captured step, which made no logits where all rows are plain greedy."""
        if outputs.logits is not None:
            return self.choose(outputs.logits, layout, batch, outputs.finite)
        best, finite = outputs.best, outputs.finite
        assert best is not None
        assert finite is not None
        if self.shared is not None:
            ids = best + self.shared.first_token
            assert outputs.best_values is not None
            best, finite = self.shared.collectives.exchange_best(outputs.best_values, ids, finite)
        return Sampled(best, ~finite, np.zeros_like(finite), finite=finite), BeamCandidates()

    def _choose_here(
        self, logits: Tensor, layout: StepLayout, batch: InputBatch, finite: Flags | None
    ) -> tuple[Sampled, BeamCandidates]:
        sampled, candidates, num_sampled = Sampled(), BeamCandidates(), len(layout.sampled)
        masks, self._masks = self._masks, None
        of_sampled, of_beams = (None, None) if finite is None else (finite[:num_sampled], finite[num_sampled:])
        if num_sampled:
            rows = replace(batch.sample_rows(layout.sampled), masks=masks)
            sampled = self.sampler.sample(logits[:num_sampled], rows, of_sampled)
        if len(layout.beams):
            candidates = self.sampler.candidates(logits[num_sampled:], batch.sample_rows(layout.beams), of_beams)
        return sampled, candidates

    def _choose_together(
        self, shared: SharedVocabulary, logits: Tensor, layout: StepLayout, batch: InputBatch
    ) -> tuple[Sampled, BeamCandidates]:
        """Has rank 0 choose, and takes its choice: the token of each row, or -1 where it failed."""
        whole, num_sampled = shared.gather(logits), len(layout.sampled)
        choice = np.zeros(len(logits), np.int32)
        if whole is not None:
            sampled, candidates = self._choose_here(whole, layout, batch, None)
            choice[:num_sampled] = np.where(sampled.failed, -1, sampled.token_ids)
            choice[num_sampled:] = np.where(candidates.failed, -1, 0)
            shared.collectives.broadcast(choice)
            return sampled, candidates
        choice = shared.collectives.broadcast(choice)
        failed = choice < 0
        of_sampled, of_beams = failed[:num_sampled], failed[num_sampled:]
        token_ids = choice[:num_sampled].astype(np.int64)
        sampled = Sampled(token_ids, of_sampled, np.zeros_like(of_sampled), finite=~of_sampled)
        return sampled, BeamCandidates(of_beams, finite=~of_beams)
