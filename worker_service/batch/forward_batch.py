"""The forward batch: the work of one step, resolved to rows. Knows neither the contents of rows nor their computation.

Consecutive decodes mostly share a `StepLayout`: the rows that compute, and the rows that are sampled. A `ForwardBatch`
adds the values that change with each step. `LateRows` are the sampled rows of a step that is launched but not finished.
Owns no row.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from worker_service.batch.row_requests import RequestTable, RowRequests
from worker_service.batch.runs import Runs, make_runs
from worker_service.step import NO_IDS, Array, Step

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from blockyard.errors import BlockyardError
    from blockyard_kernels.sampling import Flags
    from worker_service.drafting.drafter import Proposal
    from worker_service.pooling.rows import PoolingRequest

LayoutKey = tuple[bytes, bytes, bytes, bytes]

NO_ROWS = RequestTable(0).gather((), NO_IDS, NO_IDS)
# Layouts that are kept of steps with the same rows.
MAX_LAYOUTS = 16
# A token that a launched step samples in row r is written as UNKNOWN - r until the step is finished.
UNKNOWN = -1


def layout_key(step: Step, ended: Flags, is_due: Flags, num_drafts: Array | None = None) -> LayoutKey:
    """Makes the key of a step's layout; the flags [n] say which sequences have ended, and which it computes whole.

    The key and the rows determine the layout. Forks and requests also matter, but they always change the rows.
    """
    drafts = b"" if num_drafts is None else num_drafts.tobytes()
    return step.num_new_tokens.tobytes(), ended.tobytes(), is_due.tobytes(), drafts


@dataclass(frozen=True, slots=True, eq=False)
class StepLayout:
    """The plan of a step of n sequences, of which C compute tokens, T in all.

    `step_rows` [n] are the rows of the step's sequences, `last_hidden` [n] the last hidden row of each that is not a
    draft's. `computing` [C] are the places of the sequences that compute, `rows` [C] and `num_new_tokens` [C] their
    rows and token counts, drafts included. Token t of the T belongs to sequence `owners[t]` of the C, `offsets[t]`
    tokens after its computed tokens. `prompt_places` are the sequences that may get log probabilities of their prompts.
    After the step `computed_rows` have as many computed tokens as the places `sources`: a child has those of its
    parent. `sampled` rows get a token, `beams` get candidates. `runs` are those of the sampled rows, if some drafted.
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
    runs: Runs | None = None

    @property
    def chosen_hidden(self) -> Array:
        """The hidden rows whose logits are needed: those of the sampled rows, or of their runs, then of the beams."""
        sampled = self.sampled if self.runs is None else self.runs.requests
        return np.concatenate([sampled.last_hidden, self.beams.last_hidden])


def make_layout(
    step: Step,
    step_rows: Array,
    ended: Flags,
    is_due: Flags,
    requests: RequestTable,
    num_drafts: Array | None = None,
) -> StepLayout:
    """Makes the layout of a step after its changes were applied. `num_drafts` [n]: None, if there are no drafts."""
    live = ~ended
    computes = live & (step.num_new_tokens > 0)
    children = live & (step.num_new_tokens == 0)
    computing = np.flatnonzero(computes)
    num_new_tokens = (step.num_new_tokens if num_drafts is None else step.num_new_tokens + num_drafts)[computing]
    ends = num_new_tokens.cumsum()
    last_hidden = np.zeros(len(step_rows), np.int64)
    last_hidden[computing] = ends - 1 if num_drafts is None else ends - 1 - num_drafts[computing]
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

    sampled = select(samples & ~is_beam)
    return StepLayout(
        step_rows=step_rows,
        key=layout_key(step, ended, is_due, num_drafts),
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
        sampled=sampled,
        beams=select(samples & is_beam),
        skipped_ids=tuple(compress(step.sequence_ids, ended.tolist())),
        runs=None if num_drafts is None else make_runs(sampled, num_drafts[samples & ~is_beam]),
    )


class Layouts:
    """The layouts of the last steps with the same rows: the numbers of drafts change from step to step."""

    def __init__(self) -> None:
        self._rows = NO_IDS
        # The latest is the last.
        self._layouts: OrderedDict[LayoutKey, StepLayout] = OrderedDict()
        self._last: StepLayout | None = None

    def find(
        self,
        step: Step,
        step_rows: Array,
        ended: Flags,
        is_due: Flags,
        requests: RequestTable,
        num_drafts: Array | None,
    ) -> StepLayout:
        """Returns the layout of a step; see `make_layout`. The array of rows is another one after a row has changed."""
        if step_rows is not self._rows:
            self._layouts.clear()
            self._rows, self._last = step_rows, None
        key = layout_key(step, ended, is_due, num_drafts)
        if self._last is not None and self._last.key == key:
            return self._last
        found = self._layouts.pop(key, None)
        if found is None:
            found = make_layout(step, step_rows, ended, is_due, requests, num_drafts)
        self._layouts[key] = self._last = found
        if len(self._layouts) > MAX_LAYOUTS:
            self._layouts.popitem(last=False)
        return found


def _places_of_parents(step: Step, children: Flags) -> list[int]:
    """Returns the place in the step of each child's parent."""
    place = {sequence_id: index for index, sequence_id in enumerate(step.sequence_ids)}
    parent_of = {fork.child_id: fork.parent_id for fork in step.forks}
    return [place[parent_of[step.sequence_ids[child]]] for child in np.flatnonzero(children).tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class PromptRows:
    """Prompt tokens whose log probabilities a step can compute, since it computes the tokens before them.

    `token_ids` [n] stand in the prompt from `first_position` on; the hidden row of the first is `first_hidden`. Each
    gets the log probabilities of the `num_best` likeliest tokens too.
    """

    sequence_id: int
    first_position: int
    token_ids: Array
    first_hidden: int
    num_best: int


@dataclass(frozen=True, slots=True)
class PooledPiece:
    """Hidden rows of a sequence that pools: `num_rows` from `first_hidden` on; `is_due`: the last one is among them."""

    sequence_id: int
    row: int
    request: PoolingRequest
    first_hidden: int
    num_rows: int
    is_due: bool


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """The work of a step: its layout, and the columns that differ from step to step.

    `seq_lens` int64 [C], `block_tables` int32 [groups * C, widest], those of one KV group after those of another, and
    `token_ids` int64 [T] feed the forward pass, together with the layout's `num_new_tokens`; each is contiguous.
    `computed_lengths` are those of the layout's `computed_rows`, without drafts. `rejections` are sequences of the
    step, among the layout's `skipped_ids`, that fail, and why. `proposal`: the drafts, if there are any. Two steps may
    share a layout: its arrays are never written to.
    """

    layout: StepLayout
    seq_lens: Array
    block_tables: npt.NDArray[np.int32]
    token_ids: Array
    prompts: tuple[PromptRows, ...]
    computed_lengths: Array
    pooled: tuple[PooledPiece, ...] = ()
    rejections: tuple[tuple[int, BlockyardError], ...] = ()
    proposal: Proposal | None = None
    fixed_tables: npt.NDArray[np.int32] | None = None
    """[C, fixed blocks of a sequence], contiguous; None: sequences have none."""

    @property
    def pooled_rows(self) -> Array:
        """The rows of the sequences whose last token this step computes, of a model that pools."""
        return np.array([piece.row for piece in self.pooled if piece.is_due], np.int64) if self.pooled else NO_IDS

    @property
    def num_new_tokens(self) -> Array:
        """[C]: tokens that the step computes of each sequence."""
        return self.layout.num_new_tokens


def find_pooled(
    step: Step, layout: StepLayout, lengths: Array, num_tokens: Array, requests: Mapping[int, PoolingRequest]
) -> tuple[PooledPiece, ...]:
    """Finds the hidden rows of sequences that pool.

    Args:
        step: the step, after its changes were applied.
        layout: the step's layout.
        lengths: [n], computed tokens of the step's sequences after the step.
        num_tokens: the number of tokens of every row.
        requests: the pooling requests by row.
    """
    if not requests:
        return ()
    return tuple(
        PooledPiece(
            step.sequence_ids[place],
            row := int(layout.step_rows[place]),
            requests[row],
            int(layout.last_hidden[place] + 1 - step.num_new_tokens[place]),
            int(step.num_new_tokens[place]),
            bool(lengths[place] == num_tokens[row]),
        )
        for place in layout.computing.tolist()
    )


def find_rejections(step: Step, rejections: Mapping[int, BlockyardError]) -> tuple[tuple[int, BlockyardError], ...]:
    """Returns the errors of the step's rejected sequences. `rejections`: the errors of all rejected rows."""
    if not rejections:
        return ()
    return tuple((each, rejections[each]) for each in step.sequence_ids if each in rejections)


def divide_tables(tables: npt.NDArray[np.int32], num_groups: int) -> npt.NDArray[np.int32]:
    """Divides tables [n, width * groups] by KV groups -> [groups * n, width], contiguous."""
    if num_groups == 1:
        return tables
    count, width = len(tables), tables.shape[1] // max(num_groups, 1)
    by_group = tables.reshape(count, width, num_groups).transpose(2, 0, 1)
    return np.ascontiguousarray(by_group).reshape(num_groups * count, width)


@dataclass(frozen=True, slots=True, eq=False)
class LateRows:
    """The rows [R] that a launched step samples.

    `owners` counts the sequences that each row has had so far, `places` are the places of the sampled tokens.
    """

    requests: RowRequests
    owners: Array
    places: Array

    def settle(
        self,
        all_token_ids: npt.NDArray[np.int32],
        ended: Flags,
        owners_now: Array,
        token_ids: Array,
        failed: Flags,
    ) -> Flags:
        """Writes the tokens and ends of rows; a row may have another owner by now, or none.

        Args:
            all_token_ids: [rows, places], the tokens of all rows; written.
            ended: whether each of all rows has ended; written.
            owners_now: the current number of sequences that each of all rows has had.
            token_ids: [R], the tokens that the step has sampled.
            failed: [R], whether sampling failed for the row.

        Returns:
            [R], whether the row had ended before, so that its result does not count.
        """
        rows = self.requests.rows
        is_here = owners_now[rows] == self.owners
        had_ended = is_here & ended[rows]
        live = is_here & ~had_ended
        all_token_ids[rows[live], self.places[live]] = token_ids[live]
        ended[rows[live]] = (failed | self.requests.are_stops(token_ids, self.places))[live]
        return had_ended
