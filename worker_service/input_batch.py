"""The live sequences of the worker as rows: token ids, block tables, sampler state. Persistent, with stable indexes.

Owns every row and nothing else: block contents are the cache engine's, and a step was checked before it comes here. A
steady step touches no row in Python: all that it needs stands in columns, indexed by the rows of the step. Records are
gathered with `take`, which costs a twentieth of indexing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from worker_service.sampler import SampleRows
from worker_service.sampling_state import SAMPLING_FIELDS, SequenceLists, write_sampling
from worker_service.work import PromptPiece, StepRows, Work

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from worker_service.step import Array, Fork, NewSequence, Step

ROW = np.dtype(
    [
        # Known ids: prompt and output.
        ("num_tokens", np.int64),
        ("prompt_length", np.int64),
        # Of those, the ones whose KV exists.
        ("num_computed_tokens", np.int64),
        ("num_blocks", np.int64),
        # A stop token was sampled, or the row failed: it computes nothing more.
        ("ended", np.bool_),
        *SAMPLING_FIELDS,
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The sizes that rows are made for."""

    max_model_len: int
    max_num_seqs: int
    block_size: int
    vocab_size: int

    @property
    def max_num_blocks(self) -> int:
        """Blocks of one table, at most: a full sequence's, and one that is handed out ahead."""
        return -(-self.max_model_len // self.block_size) + 1


class InputBatch:
    """Rows of live sequences."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._row_of: dict[int, int] = {}
        self._lists: dict[int, SequenceLists] = {}
        self._free: list[int] = []
        self._rows = np.zeros(0, ROW)
        self._token_ids = np.zeros((0, limits.max_model_len + 1), np.int32)
        self._block_tables = np.zeros((0, limits.max_num_blocks), np.int32)
        self._stop_token_ids = np.zeros((0, 1), np.int64)
        self._grow(limits.max_num_seqs)

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._row_of

    def clear(self) -> None:
        """Forgets every sequence."""
        self.forget(tuple(self._row_of))

    def facts(self, sequence_ids: Iterable[int]) -> npt.NDArray[np.void]:
        """Gives copies of rows, as records ROW [n]; an unknown id's are zero."""
        rows = np.array([self._row_of.get(sequence_id, -1) for sequence_id in sequence_ids], np.int64)
        facts = self._rows.take(rows)
        facts[rows < 0] = np.zeros((), ROW)
        return facts

    def token_ids(self, sequence_id: int) -> Array:
        """Gives a copy of a sequence's ids."""
        row = self._row_of[sequence_id]
        return self._token_ids[row, : self._rows["num_tokens"][row]].astype(np.int64)

    def block_table(self, sequence_id: int) -> Array:
        """Gives a copy of a sequence's block table."""
        row = self._row_of[sequence_id]
        return self._block_tables[row, : self._rows["num_blocks"][row]].astype(np.int64)

    def apply(self, step: Step) -> None:
        """Makes a checked step's changes to rows: fork, forget, add, take the scheduler's ids, update tables.

        A parent that starts in this very step is forked after it was added: there is nothing of it before. A child has
        its parent's ids without the one that this step brings, and may be brought another. A whole table is the last
        word on what a sequence's table is.
        """
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

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Frees the rows of sequences; unknown ids are no error."""
        for sequence_id in sequence_ids:
            row = self._row_of.pop(sequence_id, None)
            if row is not None:
                del self._lists[row]
                self._free.append(row)

    def _take_row(self, sequence_id: int) -> int:
        if not self._free:
            self._grow(2 * len(self._rows))
        row = self._row_of[sequence_id] = self._free.pop()
        return row

    def _grow(self, num_rows: int) -> None:
        """Adds rows. Pages of the new arrays cost memory only where a sequence uses them."""
        old = len(self._rows)
        lengths = self._rows["num_tokens"].tolist()
        token_ids = np.zeros((num_rows, self._token_ids.shape[1]), np.int32)
        for row, length in enumerate(lengths):
            token_ids[row, :length] = self._token_ids[row, :length]
        self._token_ids = token_ids
        self._rows = _with_rows(self._rows, num_rows)
        self._block_tables = _with_rows(self._block_tables, num_rows)
        self._stop_token_ids = _with_rows(self._stop_token_ids, num_rows)
        self._free.extend(range(num_rows - 1, old - 1, -1))

    def _add(self, sequence: NewSequence) -> None:
        row = self._take_row(sequence.sequence_id)
        lists = self._lists[row] = SequenceLists(sequence, self.limits.vocab_size)
        record: Any = self._rows[row]
        write_sampling(record, sequence, lists, self.limits.vocab_size)
        record["num_tokens"] = len(sequence.token_ids)
        record["prompt_length"] = sequence.prompt_length
        record["num_computed_tokens"] = sequence.num_computed_tokens
        record["ended"] = False
        self._token_ids[row, : len(sequence.token_ids)] = sequence.token_ids
        self._write_table(row, sequence.block_ids)
        self._write_stop_token_ids(row, lists.stop_token_ids)

    def _write_stop_token_ids(self, row: int, token_ids: Array) -> None:
        missing = len(token_ids) - self._stop_token_ids.shape[1]
        if missing > 0:
            self._stop_token_ids = np.pad(self._stop_token_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_token_ids[row] = -1
        self._stop_token_ids[row, : len(token_ids)] = token_ids

    def _fork(self, fork: Fork) -> None:
        parent = self._row_of[fork.parent_id]
        child = self._take_row(fork.child_id)
        num_tokens = self._rows["num_tokens"][parent]
        self._rows[child] = self._rows[parent]
        self._rows["sequence_index"][child] = fork.sequence_index
        self._token_ids[child, :num_tokens] = self._token_ids[parent, :num_tokens]
        self._stop_token_ids[child] = self._stop_token_ids[parent]
        self._lists[child] = self._lists[parent].copy()
        self._write_table(child, fork.block_ids)

    def _write_table(self, row: int, block_ids: Array) -> None:
        self._block_tables[row, : len(block_ids)] = block_ids
        self._rows["num_blocks"][row] = len(block_ids)

    def _append_inputs(self, sequence_ids: tuple[int, ...], token_ids: Array) -> None:
        rows = np.array([self._row_of[sequence_id] for sequence_id in sequence_ids], np.int64)
        live = ~self._rows["ended"][rows]
        self._append_tokens(rows[live], token_ids[live])

    def _append_tokens(self, rows: Array, token_ids: Array) -> None:
        """Adds an id to each of these rows."""
        picked = self._rows.take(rows)
        self._token_ids[rows, picked["num_tokens"]] = token_ids
        self._rows["num_tokens"][rows] = picked["num_tokens"] + 1
        for place in np.flatnonzero(picked["edits_logits"]).tolist():
            counts = self._lists[int(rows[place])].counts
            if counts is not None:
                counts.add(int(token_ids[place]))

    def _append_blocks(self, sequence_ids: tuple[int, ...], block_ids: Array) -> None:
        num_blocks = self._rows["num_blocks"]
        for sequence_id, block_id in zip(sequence_ids, block_ids.tolist(), strict=True):
            row = self._row_of[sequence_id]
            self._block_tables[row, num_blocks[row]] = block_id
            num_blocks[row] += 1

    def plan(self, step: Step) -> Work:
        """Resolves what a step computes; its changes were applied."""
        row_of = self._row_of
        rows = np.array([row_of[sequence_id] for sequence_id in step.sequence_ids], np.int64)
        picked = self._rows.take(rows)
        live = ~picked["ended"]
        computes = live & (step.num_new_tokens > 0)
        num_new_tokens = step.num_new_tokens[computes]
        seq_lens = picked["num_computed_tokens"] + step.num_new_tokens
        is_due = computes & (seq_lens == picked["num_tokens"])
        last_hidden = np.zeros(len(rows), np.int64)
        last_hidden[computes] = np.cumsum(num_new_tokens) - 1
        children = live & (step.num_new_tokens == 0)
        if children.any():
            parents = _places_of_parents(step, children)
            last_hidden[children] = last_hidden[parents]
            seq_lens[children] = seq_lens[parents]
            is_due = is_due | children
        all_rows = StepRows(step.sequence_ids, rows, last_hidden)
        is_beam = picked["num_beam_candidates"] > 0
        asks = computes & (picked["prompt_logprobs"] >= 0)
        return Work(
            rows=rows[computes],
            num_new_tokens=num_new_tokens,
            seq_lens=seq_lens[computes],
            block_tables=self._tables(rows[computes], seq_lens[computes]),
            token_ids=self._inputs(rows[computes], num_new_tokens, seq_lens[computes]),
            sampled=all_rows.select(is_due & ~is_beam),
            beams=all_rows.select(is_due & is_beam),
            prompts=tuple(self._prompts(all_rows.select(asks), step.num_new_tokens[asks])),
            computed_rows=rows[live],
            computed_lengths=seq_lens[live],
            skipped_ids=tuple(compress(step.sequence_ids, (~live).tolist())),
        )

    def _prompts(self, asking: StepRows, num_new_tokens: Array) -> Iterator[PromptPiece]:
        """Finds what the step can tell of prompts; nothing of one that is past."""
        counts = num_new_tokens.tolist()
        for sequence_id, row, last, count in zip(
            asking.sequence_ids, asking.rows, asking.last_hidden, counts, strict=True
        ):
            record = self._rows[row]
            first = int(record["num_computed_tokens"]) + 1
            token_ids = self._token_ids[row, first : min(first + count, int(record["prompt_length"]))]
            if len(token_ids):
                num_best = int(record["prompt_logprobs"])
                yield PromptPiece(sequence_id, first, token_ids.astype(np.int64), int(last) + 1 - count, num_best)

    def _tables(self, rows: Array, seq_lens: Array) -> npt.NDArray[np.int32]:
        widest = int(-(-seq_lens.max(initial=0) // self.limits.block_size))
        return self._block_tables[:, :widest][rows]

    def _inputs(self, rows: Array, num_new_tokens: Array, seq_lens: Array) -> Array:
        """Gathers the ids of each row from its first token that has no KV."""
        ends = np.cumsum(num_new_tokens)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(seq_lens - ends, num_new_tokens)
        return self._token_ids[np.repeat(rows, num_new_tokens), places].astype(np.int64)

    def sample_rows(self, rows: StepRows) -> SampleRows:
        """Gives the sampler what some rows ask for."""
        columns = self._rows.take(rows.rows)
        positions = columns["num_tokens"] - columns["prompt_length"]
        lists = [self._lists[row] for row in rows.rows.tolist()]
        outputs = {
            place: self._output(rows.rows[place])
            for place in np.flatnonzero(columns["edits_logits"]).tolist()
            if lists[place].bad_words
        }
        return SampleRows(columns, positions, lists, outputs)

    def _output(self, row: int) -> npt.NDArray[np.int32]:
        return self._token_ids[row, self._rows["prompt_length"][row] : self._rows["num_tokens"][row]]

    def commit(self, work: Work, token_ids: Array, failed: npt.NDArray[np.bool_]) -> None:
        """Takes what a step computed and sampled: [R] each. Rows that failed or sampled a stop token have ended."""
        self._rows["num_computed_tokens"][work.computed_rows] = work.computed_lengths
        rows = work.sampled.rows
        picked = self._rows.take(rows)
        positions = picked["num_tokens"] - picked["prompt_length"]
        is_stop = (self._stop_token_ids[rows] == token_ids[:, None]).any(-1)
        self._rows["ended"][rows] = failed | (is_stop & (positions >= picked["min_tokens"]))
        self._append_tokens(rows, token_ids)

    def end(self, rows: StepRows, failed: npt.NDArray[np.bool_]) -> None:
        """Ends rows that failed."""
        self._rows["ended"][rows.rows[failed]] = True


def _with_rows(array: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    grown = np.zeros((num_rows, *array.shape[1:]), array.dtype)
    grown[: len(array)] = array
    return grown


def _places_of_parents(step: Step, children: npt.NDArray[np.bool_]) -> list[int]:
    """Where in the step the parent of each child stands."""
    place = {sequence_id: index for index, sequence_id in enumerate(step.sequence_ids)}
    parent_of = {fork.child_id: fork.parent_id for fork in step.forks}
    return [place[parent_of[step.sequence_ids[child]]] for child in np.flatnonzero(children).tolist()]
