"""Chooses the tokens of a step from the logits that one rank or all have. Knows no network."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from worker_service.models.layers import SharedVocabulary
from worker_service.runner.run_choice import NOT_FINITE, RunChoice
from worker_service.sampling.sampler import BeamCandidates, Sampled, Sampler
from worker_service.step import NO_IDS, Array

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.capture import StepOutputs
    from blockyard_kernels.collectives import Collectives
    from blockyard_kernels.ops import Backend
    from blockyard_kernels.sampling import Flags
    from worker_service.batch.forward_batch import ForwardBatch, StepLayout
    from worker_service.batch.input_batch import InputBatch
    from worker_service.grammars.matchers import Masks


class Chooser:
    """The sampler of one model, at one rank.

    Where ranks share the vocabulary, every rank chooses the tokens of plain greedy rows from the best logits of all
    ranks. For all other rows rank 0 gathers the logits, chooses, and broadcasts its choice. The step alone decides
    which of the two ways is taken, never a number that was computed.
    """

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        self.sampler = Sampler(backend)
        self._vocab_size = vocab_size
        self.shared: SharedVocabulary | None = None
        """The sharded vocabulary, if other ranks hold parts of it."""
        self._masks: Masks | None = None
        # The last step's choice for the rows of its runs: see `RunChoice.verdict`.
        self._verdict: Array = NO_IDS

    def join(self, collectives: Collectives) -> None:
        self.shared = SharedVocabulary(self._vocab_size, collectives) if collectives.size > 1 else None

    def whole(self, logits: Tensor) -> Tensor | None:
        """Returns logits over the whole vocabulary; None if another rank gathers them."""
        return logits if self.shared is None else self.shared.gather(logits)

    def begin(self, layout: StepLayout, batch: InputBatch) -> None:
        """Begins the masks of a step's grammars, which are made while the network computes."""
        self._masks = batch.begin_masks(layout.sampled.grammars)

    def choose(
        self, logits: Tensor, forward_batch: ForwardBatch, batch: InputBatch, finite: Flags | None = None
    ) -> tuple[Sampled, BeamCandidates]:
        """Samples the first rows, and finds the candidates of the remaining rows, which belong to beams."""
        if self.shared is None:
            return self._choose_here(logits, forward_batch, batch, finite)
        if not len(logits):
            return Sampled(), BeamCandidates()
        return self._choose_together(self.shared, logits, forward_batch, batch)

    def choose_replayed(
        self, outputs: StepOutputs, forward_batch: ForwardBatch, batch: InputBatch
    ) -> tuple[Sampled, BeamCandidates]:
        """Chooses from the outputs of a captured step, which has no logits where all rows are plain greedy."""
        if outputs.logits is not None:
            return self.choose(outputs.logits, forward_batch, batch, outputs.finite)
        best, finite = outputs.best, outputs.finite
        assert best is not None
        assert finite is not None
        if self.shared is not None:
            ids = best + self.shared.first_token
            assert outputs.best_values is not None
            best, finite = self.shared.collectives.exchange_best(outputs.best_values, ids, finite)
        if forward_batch.layout.runs is not None:
            choice = RunChoice(forward_batch, batch, finite)
            choice.take_best(best)
            return choice.finish(), BeamCandidates()
        return Sampled(best, ~finite, np.zeros_like(finite), finite=finite), BeamCandidates()

    def _choose_here(
        self, logits: Tensor, forward_batch: ForwardBatch, batch: InputBatch, finite: Flags | None
    ) -> tuple[Sampled, BeamCandidates]:
        layout, sampled, candidates = forward_batch.layout, Sampled(), BeamCandidates()
        num_sampled = len(logits) - len(layout.beams)
        masks, self._masks = self._masks, None
        of_sampled, of_beams = (None, None) if finite is None else (finite[:num_sampled], finite[num_sampled:])
        if layout.runs is not None:
            sampled = self._choose_runs(logits[:num_sampled], forward_batch, batch, masks, of_sampled)
        elif num_sampled:
            rows = replace(batch.sample_rows(layout.sampled), masks=masks)
            sampled = self.sampler.sample(logits[:num_sampled], rows, of_sampled)
        if len(layout.beams):
            candidates = self.sampler.candidates(logits[num_sampled:], batch.sample_rows(layout.beams), of_beams)
        return sampled, candidates

    def _choose_runs(
        self,
        logits: Tensor,
        forward_batch: ForwardBatch,
        batch: InputBatch,
        masks: Masks | None,
        finite: Flags | None,
    ) -> Sampled:
        """Samples the rows of runs, and leaves the verdict for other ranks."""
        choice = RunChoice(forward_batch, batch, self.sampler.find_finite(logits) if finite is None else finite)
        choice.choose(self.sampler, logits, masks)
        sampled = choice.finish()
        self._verdict = choice.verdict(sampled)
        return sampled

    def _choose_together(
        self, shared: SharedVocabulary, logits: Tensor, forward_batch: ForwardBatch, batch: InputBatch
    ) -> tuple[Sampled, BeamCandidates]:
        """Lets rank 0 choose, and takes its choice: the token of each row, or a number below 0 where the row failed."""
        layout = forward_batch.layout
        whole, num_sampled = shared.gather(logits), len(logits) - len(layout.beams)
        choice = np.zeros(len(logits), np.int32)
        if whole is not None:
            sampled, candidates = self._choose_here(whole, forward_batch, batch, None)
            is_run = layout.runs is not None
            choice[:num_sampled] = self._verdict if is_run else np.where(sampled.failed, -1, sampled.token_ids)
            choice[num_sampled:] = np.where(candidates.failed, -1, 0)
            shared.collectives.broadcast(choice)
            return sampled, candidates
        choice = shared.collectives.broadcast(choice)
        failed = choice < 0
        of_sampled, of_beams = failed[:num_sampled], failed[num_sampled:]
        candidates = BeamCandidates(of_beams, finite=~of_beams)
        token_ids = choice[:num_sampled].astype(np.int64)
        if layout.runs is not None:
            runs = RunChoice(forward_batch, batch, token_ids != NOT_FINITE)
            runs.take_others(token_ids)
            return runs.finish(), candidates
        return Sampled(token_ids, of_sampled, np.zeros_like(of_sampled), finite=~of_sampled), candidates
