"""The drafts of the input batch's rows: writes them before a step, and takes what of them counts after it.

Owns the drafter, and which rows must do without drafts. The ids and the progress of rows belong to the input batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from blockyard_kernels.drafting import DraftRows
from worker_service.batch.row_requests import with_rows

if TYPE_CHECKING:
    import numpy.typing as npt

    from blockyard_kernels.drafting import Ids
    from blockyard_kernels.sampling import Flags
    from worker_service.batch.forward_batch import ForwardBatch
    from worker_service.batch.row_requests import RequestTable
    from worker_service.drafting.drafter import Drafter, Proposal
    from worker_service.step import Array, Step


@dataclass(frozen=True, slots=True, eq=False)
class StepDrafts:
    """The drafts of a step of n sequences, and how many each has [n]; None: there are none."""

    proposal: Proposal | None = None
    num_drafts: Array | None = None


NO_DRAFTS = StepDrafts()


class BatchDrafts:
    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self._vocab_size = vocab_size
        self.starts_over = np.zeros(0, np.bool_)
        """Rows whose last drafts made numbers that are not finite: they compute one token without drafts."""
        self._some_start_over = False

    def grow(self, num_rows: int) -> None:
        self.starts_over = with_rows(self.starts_over, num_rows)
        self.drafter.grow(num_rows)

    def begin(self, row: int) -> None:
        """Forgets what was known of a row, which belongs to another sequence now."""
        self.starts_over[row] = False
        self.drafter.begin(row)

    def write(
        self, step: Step, step_rows: Array, progress: npt.NDArray[np.void], all_token_ids: Ids, requests: RequestTable
    ) -> StepDrafts:
        """Writes drafts behind the known ids of the rows that a step lets draft.

        Args:
            step: a step that lets some sequences draft.
            step_rows: the rows [n] of its sequences.
            progress: the progress of all rows.
            all_token_ids: the tokens of all rows; written.
            requests: the requests of all rows.
        """
        lengths = progress["num_tokens"][step_rows]
        most = np.minimum(step.max_draft_tokens, requests.columns["max_length"][step_rows] - 1 - lengths)
        most *= ~progress["ended"][step_rows]
        if self._some_start_over:
            most *= ~self.starts_over[step_rows]
            self.starts_over[step_rows] = False
            self._some_start_over = bool(self.starts_over.any())
        most *= requests.may_draft(step_rows)
        rows, places = step_rows, (most > 0).nonzero()[0]
        if len(places) < len(most):
            rows, lengths, most = rows[places], lengths[places], most[places]
        if not len(places):
            return NO_DRAFTS
        wanted = DraftRows(all_token_ids, rows, lengths, most, requests.predicted(rows), self._vocab_size)
        proposal = self.drafter.propose(wanted, requests.grammars(rows), step.draft_prices)
        if proposal is None:
            return NO_DRAFTS
        num_drafts = np.zeros(len(step_rows), np.int64)
        num_drafts[places[proposal.kept]] = proposal.num_drafts
        return StepDrafts(proposal, num_drafts)

    def commit(
        self,
        forward_batch: ForwardBatch,
        progress: npt.NDArray[np.void],
        all_token_ids: Ids,
        token_ids: Array,
        failed: Flags,
        counts: Array,
    ) -> None:
        """Records the tokens of a step with drafts.

        Args:
            forward_batch: the step.
            progress: the progress of all rows; written.
            all_token_ids: the tokens of all rows; written.
            token_ids: the tokens that count, of one sampled sequence after the other.
            failed: [R], whether sampling failed for the sequence.
            counts: [R], how many of the tokens each sequence has; without a token a sequence that did not fail computes
                its last token again, alone.
        """
        sampled, runs, proposal = forward_batch.layout.sampled, forward_batch.layout.runs, forward_batch.proposal
        assert runs is not None
        assert proposal is not None
        rows, lengths = sampled.rows, progress["num_tokens"][sampled.rows]
        kept = runs.rows_of(counts)
        all_token_ids[runs.requests.rows[kept], lengths[runs.owners[kept]] + runs.offsets[kept]] = token_ids
        # The last token that counts is not computed yet.
        progress["num_computed_tokens"][rows] += np.where(failed, 0, counts - 1)
        progress["num_tokens"][rows] = lengths + counts
        has_some = counts > 0
        last_tokens = np.full(len(rows), -1)
        last_tokens[has_some] = token_ids[counts.cumsum()[has_some] - 1]
        progress["ended"][rows] = failed | (has_some & sampled.are_stops(last_tokens, lengths + counts - 1))
        if not has_some.all():
            self.starts_over[rows] = ~has_some & ~failed
            self._some_start_over = True
        self.drafter.learn(proposal, counts[runs.num_drafts > 0] - 1)
