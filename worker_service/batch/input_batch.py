"""The live sequences of the worker as rows: token ids, block tables, progress. Persistent, with stable indexes.

Owns the rows only: the cache engine owns block contents, and steps are checked before they come here. A decode step
like the one before loops over no row in Python: the array of its rows is cached until a row changes its sequence, and
its layout until a step differs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from worker_service.batch.drafts import NO_DRAFTS, BatchDrafts
from worker_service.batch.forward_batch import (
    UNKNOWN,
    ForwardBatch,
    LateRows,
    Layouts,
    PromptRows,
    StepLayout,
    divide_tables,
    find_pooled,
    find_rejections,
)
from worker_service.batch.row_requests import NO_LENGTH, RequestTable, RowRequests, with_rows
from worker_service.batch.rows import PROGRESS, RowProgress
from worker_service.batch.steady_rows import make_steady_rows
from worker_service.batch.tables import find_filled, find_kept
from worker_service.sampling.sampler import SampleRows
from worker_service.step import NO_IDS, Array, ForkedRow, NewRow, Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blockyard.errors import BlockyardError
    from blockyard_kernels.decoding import DecodeRows
    from blockyard_kernels.sampling import Flags
    from worker_service.batch.drafts import StepDrafts
    from worker_service.batch.row_requests import Followers
    from worker_service.batch.rows import BatchLimits
    from worker_service.batch.runs import Runs
    from worker_service.drafting.drafter import Drafter
    from worker_service.grammars.matchers import Grammars, GrammarState, Masks

_NOTHING_FOUND: tuple[tuple[int, ...], Array] = ((), NO_IDS)


class InputBatch:
    """The rows of live sequences."""

    def __init__(self, limits: BatchLimits, grammars: Grammars | None = None, drafter: Drafter | None = None) -> None:
        # `grammars` is None for models that do not sample, `drafter` for workers that do not draft.
        self.limits, self.grammars = limits, grammars
        self._drafts = BatchDrafts(drafter, limits.vocab_size) if drafter is not None else None
        # Sampled ids return with the next step; this rank never appends or finishes.
        self.takes_ids = False
        self._row_of: dict[int, int] = {}
        # Errors, by row, of sequences that were rejected at their start, and of their children. Their rows have ended.
        self._rejections: dict[int, BlockyardError] = {}
        self._free: list[int] = []
        self._requests = RequestTable(limits.vocab_size, limits.rule, grammars)
        # The last row of these two belongs to no sequence and stays zero.
        self._progress, self._fixed_tables = np.zeros(1, PROGRESS), np.zeros((1, limits.num_state_blocks), np.int32)
        self._token_ids = np.zeros((0, limits.max_model_len + 1), np.int32)
        self._block_tables = np.zeros((0, limits.max_num_blocks), np.int32)
        # The number of sequences that each row has had.
        self._owners = np.zeros(0, np.int64)
        self._found = _NOTHING_FOUND
        self._layouts = Layouts()
        # The rows that were last asked for, and whether steps with them may go on without Python.
        self._steady: tuple[Array, DecodeRows | None] = (NO_IDS, None)
        self._grow(limits.max_num_seqs)

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def num_rows(self) -> int:
        return len(self._token_ids)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._row_of

    def clear(self) -> None:
        """Forgets every sequence, and whether sampled ids come from the scheduler."""
        self.forget(tuple(self._row_of))
        self.takes_ids = False

    def unknown(self, sequence_ids: set[int]) -> set[int]:
        return sequence_ids.difference(self._row_of)

    def progress_of(self, sequence_ids: tuple[int, ...]) -> npt.NDArray[np.void]:
        """Copies the progress of sequences as records PROGRESS [n]; zeros for an unknown id."""
        return self._progress.take(self._find_rows(sequence_ids))

    def lora_ids(self, sequence_ids: tuple[int, ...] = ()) -> Array:
        """Copies the adapters of sequences [n], or of all; 0: no adapter, or the sequence is unknown or has ended."""
        rows = np.array([self._row_of.get(each, -1) for each in sequence_ids or self._row_of], np.int64)
        return np.where(self._progress["ended"][rows] | (rows < 0), 0, self._requests.columns["lora_id"][rows])

    def may_draft(self, sequence_ids: tuple[int, ...]) -> Flags:
        """Returns whether each sequence [n] is of a kind that may draft; an unknown sequence is not."""
        rows = self._find_rows(sequence_ids)
        columns = self._requests.columns[rows]
        return (rows >= 0) & (columns["max_length"] < NO_LENGTH) & (columns["num_beam_candidates"] == 0)

    def progress(self, sequence_id: int) -> RowProgress:
        """Returns the progress of a sequence; an unknown sequence has no progress."""
        return RowProgress(*self._progress[self._row_of.get(sequence_id, -1)].item())

    def _find_rows(self, sequence_ids: tuple[int, ...]) -> Array:
        """Returns the rows of sequences, -1 for an unknown one; the same array until a row changes hands."""
        known_ids, rows = self._found
        if known_ids != sequence_ids:
            rows = np.array([self._row_of.get(sequence_id, -1) for sequence_id in sequence_ids], np.int64)
            self._found = (sequence_ids, rows)
        return rows

    def token_ids(self, sequence_id: int) -> Array:
        row = self._row_of[sequence_id]
        return self._token_ids[row, : self._progress["num_tokens"][row]].astype(np.int64)

    def filled_blocks(self) -> list[int]:
        """Returns the device blocks that hold tokens of live sequences which some query may still see, sorted."""
        return find_filled(self._progress, self._block_tables, list(self._row_of.values()), self.limits)

    def filled_fixed_blocks(self) -> list[int]:
        """Returns the fixed blocks of live sequences that have computed tokens, sorted."""
        rows = list(self._row_of.values())
        return np.unique(self._fixed_tables[rows][self._progress["num_computed_tokens"][rows] > 0]).tolist()

    def fixed_tables_of(self, sequence_ids: tuple[int, ...]) -> Array:
        """Copies the fixed blocks of sequences [n, num_state_blocks]; zeros for an unknown id."""
        return self._fixed_tables[self._find_rows(sequence_ids)].astype(np.int64)

    def kept_blocks_of(self, sequence_ids: tuple[int, ...]) -> Array:
        """Returns the blocks of sequences in the KV groups that keep all tokens; of an unknown one none."""
        return find_kept(self._progress, self._block_tables, self._find_rows(sequence_ids), self.limits)

    def apply(self, step: Step) -> None:
        """Makes a checked step's changes to rows: fork, forget, add, take the scheduler's ids, update tables.

        A parent that starts in the same step is added before it is forked. A child gets its parent's ids without the id
        that this step appends to the parent; the step may append another id to the child. A replaced table overrides
        appended blocks.
        """
        self.takes_ids |= step.ids_from_scheduler
        new = {sequence.sequence_id for sequence in step.new_sequences}
        for fork in step.forks:
            if fork.parent_id not in new:
                self._fork(fork)
        self.forget(step.finished_sequence_ids)
        for sequence in step.new_sequences:
            self._add(sequence)
        for fork in step.forks:
            if fork.parent_id in new:
                self._fork(fork)
        if step.input_sequence_ids:
            self._append_inputs(step.input_sequence_ids, step.input_token_ids)
        if step.appended_sequence_ids:
            self._append_blocks(step.appended_sequence_ids, step.appended_block_ids)
        for sequence_id, block_ids in step.replaced_tables:
            self._write_table(self._row_of[sequence_id], block_ids)
        for sequence_id, fixed_ids in step.replaced_fixed_tables:
            self._fixed_tables[self._row_of[sequence_id]] = fixed_ids

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Frees the rows of sequences; unknown ids are ignored."""
        for sequence_id in sequence_ids:
            if (row := self._row_of.pop(sequence_id, None)) is not None:
                self._found = _NOTHING_FOUND
                self._rejections.pop(sequence_id, None)
                self._requests.forget(row)
                self._free.append(row)

    def _take_row(self, sequence_id: int) -> int:
        self._found = _NOTHING_FOUND
        if not self._free:
            self._grow(2 * len(self._token_ids))
        row = self._row_of[sequence_id] = self._free.pop()
        self._owners[row] += 1
        if self._drafts is not None:
            self._drafts.begin(row)
        return row

    def _grow(self, num_rows: int) -> None:
        """Adds rows. Pages of the new arrays cost memory only where a sequence uses them."""
        old = len(self._token_ids)
        token_ids = np.zeros((num_rows, self._token_ids.shape[1]), np.int32)
        for row, length in enumerate(self._progress["num_tokens"][:old].tolist()):
            token_ids[row, :length] = self._token_ids[row, :length]
        self._token_ids = token_ids
        self._progress = with_rows(self._progress, num_rows + 1)
        self._block_tables = with_rows(self._block_tables, num_rows)
        self._fixed_tables = with_rows(self._fixed_tables, num_rows + 1)
        self._owners = with_rows(self._owners, num_rows)
        if self._drafts is not None:
            self._drafts.grow(num_rows)
        self._requests.grow(num_rows)
        self._free.extend(range(num_rows - 1, old - 1, -1))

    def _add(self, sequence: NewRow) -> None:
        row = self._take_row(sequence.sequence_id)
        self._requests.add(row, sequence)
        if ended := sequence.rejection is not None:
            self._rejections[sequence.sequence_id] = sequence.rejection
        self._progress[row] = (len(sequence.token_ids), sequence.num_computed_tokens, 0, ended)
        self._token_ids[row, : len(sequence.token_ids)] = sequence.token_ids
        self._write_table(row, sequence.block_ids)
        self._fixed_tables[row] = sequence.fixed_block_ids

    def _fork(self, fork: ForkedRow) -> None:
        parent = self._row_of[fork.parent_id]
        child = self._take_row(fork.child_id)
        if fork.parent_id in self._rejections:
            self._rejections[fork.child_id] = self._rejections[fork.parent_id]
        num_tokens = self._progress["num_tokens"][parent]
        self._requests.fork(parent, child, fork.sequence_index)
        self._progress[child] = self._progress[parent]
        self._token_ids[child, :num_tokens] = self._token_ids[parent, :num_tokens]
        self._write_table(child, fork.block_ids)
        self._fixed_tables[child] = fork.fixed_block_ids

    def _write_table(self, row: int, block_ids: Array) -> None:
        self._block_tables[row, : len(block_ids)] = block_ids
        self._progress["num_blocks"][row] = len(block_ids)

    def _append_inputs(self, sequence_ids: tuple[int, ...], token_ids: Array) -> None:
        rows = np.array([self._row_of[sequence_id] for sequence_id in sequence_ids], np.int64)
        live = ~self._progress["ended"][rows]
        rows = rows[live]
        self._append_tokens(rows, self._requests.followers_of(rows), token_ids[live])

    def _append_tokens(self, rows: Array, followers: Followers, token_ids: Array) -> None:
        """Appends an id to each of the rows, and to the rows' token counts and grammar states."""
        num_tokens = self._progress["num_tokens"]
        lengths = num_tokens[rows]
        self._token_ids[rows, lengths] = token_ids
        num_tokens[rows] = lengths + 1
        for place, follower in followers:
            follower.add(int(token_ids[place]))

    def _append_blocks(self, sequence_ids: tuple[int, ...], block_ids: Array) -> None:
        num_blocks = self._progress["num_blocks"]
        for sequence_id, block_id in zip(sequence_ids, block_ids.tolist(), strict=True):
            row = self._row_of[sequence_id]
            self._block_tables[row, num_blocks[row]] = block_id
            num_blocks[row] += 1

    def make_forward_batch(self, step: Step) -> ForwardBatch:
        """Makes the forward batch of a step after its changes were applied."""
        rows, progress = self._find_rows(step.sequence_ids), self._progress
        lengths = progress["num_computed_tokens"][rows] + step.num_new_tokens
        drafted = self._draft(step, rows) if len(step.max_draft_tokens) else NO_DRAFTS
        ended, is_due = progress["ended"][rows], lengths == progress["num_tokens"][rows]
        layout = self._layouts.find(step, rows, ended, is_due, self._requests, drafted.num_drafts)
        seq_lens = (lengths if drafted.num_drafts is None else lengths + drafted.num_drafts)[layout.computing]
        return ForwardBatch(
            layout=layout,
            seq_lens=seq_lens,
            block_tables=self._tables(layout.rows, seq_lens),
            token_ids=self._inputs(layout, seq_lens),
            prompts=tuple(self._prompts(step, layout)) if layout.prompt_places else (),
            computed_lengths=lengths[layout.sources],
            pooled=find_pooled(step, layout, lengths, progress["num_tokens"], self._requests.poolings),
            rejections=find_rejections(step, self._rejections),
            proposal=drafted.proposal,
            fixed_tables=self._fixed_tables[layout.rows] if self.limits.num_state_blocks else None,
        )

    def _draft(self, step: Step, rows: Array) -> StepDrafts:
        """Writes drafts behind the known ids of the rows that may have some."""
        if self._drafts is None:
            return NO_DRAFTS
        return self._drafts.write(step, rows, self._progress, self._token_ids, self._requests)

    def _prompts(self, step: Step, layout: StepLayout) -> Iterator[PromptRows]:
        """Returns the pieces of prompts whose log probabilities the step can compute."""
        for place in layout.prompt_places:
            row = layout.step_rows[place]
            request, begin = self._requests.columns[row], int(self._progress["num_computed_tokens"][row]) + 1
            first, end = max(begin, int(request["num_virtual_tokens"]) + 1), begin + int(step.num_new_tokens[place])
            token_ids = self._token_ids[row, first : min(end, int(request["prompt_length"]))].astype(np.int64)
            if len(token_ids):
                first_hidden, num_best = int(layout.last_hidden[place]) + 1 - end + first, request["prompt_logprobs"]
                yield PromptRows(step.sequence_ids[place], first, token_ids, first_hidden, int(num_best))

    def _tables(self, rows: Array, seq_lens: Array) -> npt.NDArray[np.int32]:
        # Half the time of seq_lens.max().
        longest, num_groups = int(np.maximum.reduce(seq_lens, initial=0)), self.limits.num_kv_groups
        widest = -(-longest // self.limits.block_size)
        return divide_tables(self._block_tables[rows, : widest * num_groups], num_groups)

    def _inputs(self, layout: StepLayout, seq_lens: Array) -> Array:
        """Gathers the ids of each computing row, from the first token without KV on."""
        owners = layout.owners
        return self._token_ids[layout.rows[owners], seq_lens[owners] + layout.offsets].astype(np.int64)

    def sample_rows(self, requests: RowRequests) -> SampleRows:
        """Returns the sampler's input for some rows, without the grammar masks, which belong to a step."""
        positions = self._progress["num_tokens"][requests.rows] - requests.columns["prompt_length"]
        outputs = {place: self._output(requests.rows[place]) for place in requests.has_bad_words}
        return SampleRows(requests.columns, positions, requests.lists, outputs)

    def sample_run_rows(self, runs: Runs, places: Array) -> SampleRows:
        """Returns the sampler's input for some rows of runs, as if all drafts before them were known tokens."""
        rows, offsets = runs.requests.rows[places], runs.offsets[places]
        columns = runs.requests.columns[places]
        positions = self._progress["num_tokens"][rows] - columns["prompt_length"] + offsets
        lists = [runs.requests.lists[place] for place in places.tolist()]
        numbered = enumerate(zip(rows.tolist(), offsets.tolist(), lists, strict=True))
        outputs = {place: self._output(row, offset) for place, (row, offset, each) in numbered if each.bad_words}
        return SampleRows(columns, positions, lists, outputs)

    def begin_masks(self, states: list[tuple[int, GrammarState]]) -> Masks | None:
        """Begins the masks of grammar states, each with the place of its row; None: there are no states."""
        return self.grammars.begin_masks(states) if states and self.grammars is not None else None

    def find_last(self, runs: Runs, token_ids: Array) -> Flags:
        """Returns whether each row of runs [V] ends its sequence with its token."""
        num_tokens = self._progress["num_tokens"][runs.requests.rows] + runs.offsets
        return runs.requests.are_stops(token_ids, num_tokens)

    def _output(self, row: int, num_drafts: int = 0) -> npt.NDArray[np.int32]:
        begin, end = self._requests.columns["prompt_length"][row], self._progress["num_tokens"][row]
        return self._token_ids[row, begin : end + num_drafts]

    def commit(self, forward_batch: ForwardBatch, token_ids: Array, failed: Flags, counts: Array | None = None) -> None:
        """Records what a step computed and sampled: [R] each. Rows that failed or sampled a stop token have ended.

        `counts` [R], for steps with drafts: how many of `token_ids` each sequence has; its followers know them already.
        """
        progress, layout = self._progress, forward_batch.layout
        progress["num_computed_tokens"][layout.computed_rows] = forward_batch.computed_lengths
        if self.takes_ids:
            return
        if counts is not None:
            assert self._drafts is not None
            self._drafts.commit(forward_batch, progress, self._token_ids, token_ids, failed, counts)
            return
        sampled = layout.sampled
        is_stop = sampled.are_stops(token_ids, progress["num_tokens"][sampled.rows])
        progress["ended"][sampled.rows] = failed | is_stop
        self._append_tokens(sampled.rows, sampled.followers, token_ids)

    def find_slots(self, forward_batch: ForwardBatch, chosen: Flags) -> tuple[Array, Array]:
        """Finds the slots of some runs, which count nothing; `chosen` [R] -> (block ids, slots)."""
        runs, size, num_groups = forward_batch.layout.runs, self.limits.block_size, self.limits.num_kv_groups
        assert runs is not None
        of_chosen = np.flatnonzero(chosen[runs.owners])
        rows = runs.requests.rows[of_chosen]
        places = self._progress["num_computed_tokens"][rows] + runs.offsets[of_chosen]
        tables = self._block_tables[rows].reshape(len(rows), -1, num_groups)
        blocks = tables[np.arange(len(rows)), places // size].ravel().astype(np.int64)
        return blocks, (places % size).repeat(num_groups)

    def steady_rows(self, sequence_ids: tuple[int, ...], num_device_blocks: int) -> DecodeRows | None:
        """Returns the rows of sequences for steps without Python; None: they need it."""
        if self.takes_ids or not self._rejections.keys().isdisjoint(sequence_ids):
            return None
        if self._steady[0] is not (rows := self._find_rows(sequence_ids)):
            arrays = self._progress, self._token_ids, self._block_tables
            found = make_steady_rows(rows, arrays, self._requests, self._drafts, self.limits, num_device_blocks)
            self._steady = rows, found
        return self._steady[1]

    def must_wait(self, step: Step) -> bool:
        """Returns whether a step whose changes were applied needs the tokens of all steps before it on the host."""
        return len(step.max_draft_tokens) > 0 or bool(
            self._requests.columns["must_wait"][self._find_rows(step.sequence_ids)].any()
        )

    def advance(self, forward_batch: ForwardBatch) -> LateRows:
        """Records what a launched step will have computed, except the tokens that it samples."""
        progress, layout = self._progress, forward_batch.layout
        progress["num_computed_tokens"][layout.computed_rows] = forward_batch.computed_lengths
        rows = layout.sampled.rows
        places = progress["num_tokens"][rows]
        self._token_ids[rows, places] = UNKNOWN - rows
        progress["num_tokens"][rows] = places + 1
        return LateRows(layout.sampled, self._owners[rows], places)

    def settle(self, late: LateRows, token_ids: Array, failed: Flags) -> Flags:
        """Records the tokens of a launched step, and returns which of its rows had ended before it."""
        return late.settle(self._token_ids, self._progress["ended"], self._owners, token_ids, failed)

    def end(self, rows: Array) -> None:
        if not self.takes_ids:
            self._progress["ended"][rows] = True
