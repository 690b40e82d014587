"""Which sequences of a step compute, are sampled and are told of, and where: the same for most decodes in a row.

Knows how far sequences are only by what has ended and what is due. Owns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from worker_service.batch.forward_batch import StepRows
from worker_service.batch.row_requests import RequestTable
from worker_service.step import no_ids

if TYPE_CHECKING:
    from worker_service.step import Array, Step

Flags = npt.NDArray[np.bool_]

NO_ROWS = StepRows((), no_ids(), no_ids(), RequestTable(0).of(no_ids()))


@dataclass(frozen=True, slots=True, eq=False)
class StepState:
    """All that a layout follows from, beside forks and requests, which come and go with rows.

    `rows` [n] are those of the step's sequences; `is_due` tells which have all their tokens computed by this step.
    """

    rows: Array
    num_new_tokens: Array
    ended: Flags
    is_due: Flags

    def equals(self, other: StepState) -> bool:
        """Tells whether a layout can serve again: rows are the same array as long as none changed hands."""
        return self.rows is other.rows and self._flags() == other._flags()

    def _flags(self) -> tuple[bytes, bytes, bytes]:
        return self.num_new_tokens.tobytes(), self.ended.tobytes(), self.is_due.tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Who does what in a step, by places among its n sequences.

    `computing` [C] are the places of those that compute tokens, `rows` and `num_new_tokens` their columns. Token t of
    the step's T is one of sequence `owners[t]` of those C, and stands `offsets[t]` behind the end of what is computed.
    `asking` are places that may be told of their prompts, `last_hidden` [n] each one's last hidden row. What
    `computed_rows` have computed is what `sources` [places] have: a child has what its parent has.
    """

    state: StepState
    computing: Array
    rows: Array
    num_new_tokens: Array
    owners: Array
    offsets: Array
    last_hidden: Array
    asking: list[int]
    computed_rows: Array
    sources: Array
    sampled: StepRows
    beams: StepRows
    skipped_ids: tuple[int, ...]


def make_layout(step: Step, state: StepState, requests: RequestTable) -> StepLayout:
    """Finds who does what in a step whose changes were applied."""
    live = ~state.ended
    computes = live & (state.num_new_tokens > 0)
    children = live & (state.num_new_tokens == 0)
    computing = np.flatnonzero(computes)
    num_new_tokens = state.num_new_tokens[computing]
    ends = num_new_tokens.cumsum()
    last_hidden = np.zeros(len(state.rows), np.int64)
    last_hidden[computing] = ends - 1
    sources = np.arange(len(state.rows))
    if np.count_nonzero(children):
        sources[children] = _places_of_parents(step, children)
        last_hidden = last_hidden[sources]
    is_due = (computes & state.is_due) | children
    is_beam = requests.columns["num_beam_candidates"][state.rows] > 0
    asks = requests.columns["prompt_logprobs"][state.rows] >= 0

    def select(chosen: Flags) -> StepRows:
        if not np.count_nonzero(chosen):
            return NO_ROWS
        rows = state.rows[chosen]
        ids = tuple(compress(step.sequence_ids, chosen.tolist()))
        return StepRows(ids, rows, last_hidden[chosen], requests.of(rows))

    return StepLayout(
        state=state,
        computing=computing,
        rows=state.rows[computing],
        num_new_tokens=num_new_tokens,
        owners=np.arange(len(computing)).repeat(num_new_tokens),
        offsets=np.arange(num_new_tokens.sum()) - ends.repeat(num_new_tokens),
        last_hidden=last_hidden,
        asking=np.flatnonzero(computes & asks).tolist(),
        computed_rows=state.rows[live],
        sources=sources[live],
        sampled=select(is_due & ~is_beam),
        beams=select(is_due & is_beam),
        skipped_ids=tuple(compress(step.sequence_ids, state.ended.tolist())),
    )


def _places_of_parents(step: Step, children: Flags) -> list[int]:
    """Where in the step the parent of each child stands."""
    place = {sequence_id: index for index, sequence_id in enumerate(step.sequence_ids)}
    parent_of = {fork.child_id: fork.parent_id for fork in step.forks}
    return [place[parent_of[step.sequence_ids[child]]] for child in np.flatnonzero(children).tolist()]
