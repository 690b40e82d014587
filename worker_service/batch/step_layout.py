"""The part of a forward batch that most decodes in a row have in common: which rows compute, and which are due.

Knows how far sequences are only by what has ended and what is due. Owns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from worker_service.batch.row_requests import RequestTable
from worker_service.step import NO_IDS

if TYPE_CHECKING:
    from worker_service.batch.row_requests import RowRequests
    from worker_service.step import Array, Step

Flags = npt.NDArray[np.bool_]
LayoutKey = tuple[bytes, bytes, bytes]

NO_ROWS = RequestTable(0).gather((), NO_IDS, NO_IDS)


def layout_key(step: Step, ended: Flags, is_due: Flags) -> LayoutKey:
    """Makes the key of a step's layout; the flags [n] say which sequences have ended, and which it computes whole.

    With the rows it decides the layout. Forks and requests do too, but rows change hands whenever one comes or goes.
    """
    return step.num_new_tokens.tobytes(), ended.tobytes(), is_due.tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """Who does what in a step of n sequences, of which C compute tokens, T in all.

    `step_rows` [n] are the rows of the step's sequences, `last_hidden` [n] the last hidden row of each. `computing` [C]
    are the places of those that compute, `rows` and `num_new_tokens` their columns. Token t of the T belongs to
    sequence `owners[t]` of the C, `offsets[t]` behind the end of what is computed. `prompt_places` are those that may
    get log probabilities of their prompts. After the step `computed_rows` have as many computed tokens as the places
    `sources`: a child has those of its parent. `sampled` rows get a token, `beams` get candidates.
    """

    step_rows: Array
    key: LayoutKey
    computing: Array
    rows: Array
    num_new_tokens: Array
    owners: Array
    offsets: Array
    last_hidden: Array
    prompt_places: list[int]
    computed_rows: Array
    sources: Array
    lora_ids: Array
    sampled: RowRequests
    beams: RowRequests
    skipped_ids: tuple[int, ...]

    def holds_for(self, step_rows: Array, key: LayoutKey) -> bool:
        """Returns whether another step has this layout: its rows are the same array as long as none changed hands."""
        return self.step_rows is step_rows and self.key == key


def make_layout(step: Step, step_rows: Array, ended: Flags, is_due: Flags, requests: RequestTable) -> StepLayout:
    """Makes the layout of a step whose changes were applied."""
    live = ~ended
    computes = live & (step.num_new_tokens > 0)
    children = live & (step.num_new_tokens == 0)
    computing = np.flatnonzero(computes)
    num_new_tokens = step.num_new_tokens[computing]
    ends = num_new_tokens.cumsum()
    last_hidden = np.zeros(len(step_rows), np.int64)
    last_hidden[computing] = ends - 1
    sources = np.arange(len(step_rows))
    if np.count_nonzero(children):
        sources[children] = _places_of_parents(step, children)
        last_hidden = last_hidden[sources]
    samples = ((computes & is_due) | children) & (requests.rule is None)
    is_beam = requests.columns["num_beam_candidates"][step_rows] > 0
    asks = requests.columns["prompt_logprobs"][step_rows] >= 0

    def select(chosen: Flags) -> RowRequests:
        if not np.count_nonzero(chosen):
            return NO_ROWS
        ids = tuple(compress(step.sequence_ids, chosen.tolist()))
        return requests.gather(ids, step_rows[chosen], last_hidden[chosen])

    return StepLayout(
        step_rows=step_rows,
        key=layout_key(step, ended, is_due),
        computing=computing,
        rows=step_rows[computing],
        num_new_tokens=num_new_tokens,
        owners=np.arange(len(computing)).repeat(num_new_tokens),
        offsets=np.arange(num_new_tokens.sum()) - ends.repeat(num_new_tokens),
        last_hidden=last_hidden,
        prompt_places=np.flatnonzero(computes & asks).tolist(),
        computed_rows=step_rows[live],
        sources=sources[live],
        lora_ids=requests.columns["lora_id"][step_rows[computing]],
        sampled=select(samples & ~is_beam),
        beams=select(samples & is_beam),
        skipped_ids=tuple(compress(step.sequence_ids, ended.tolist())),
    )


def _places_of_parents(step: Step, children: Flags) -> list[int]:
    """Finds where in the step the parent of each child stands."""
    place = {sequence_id: index for index, sequence_id in enumerate(step.sequence_ids)}
    parent_of = {fork.child_id: fork.parent_id for fork in step.forks}
    return [place[parent_of[step.sequence_ids[child]]] for child in np.flatnonzero(children).tolist()]
