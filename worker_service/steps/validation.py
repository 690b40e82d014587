"""Checks a whole step against what the worker holds, before anything of it is touched.

Owns the rules of the step stream: identities, lengths, block numbers, order of reads and writes. Knows no tensors and
changes nothing. A violation is a bug of the scheduler, so all are reported together, up to MAX_VIOLATIONS. Long columns
are checked with numpy. Faults of single new sequences were found before (`new_sequences`).
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from blockyard.errors import BlockyardError, Violation, invalid
from worker_service.batch.rows import RowProgress
from worker_service.step import MAX_VIOLATIONS, Array, BlockPairs, ForkedRow, NewRow, Step
from worker_service.steps.block_owners import wrong_owners
from worker_service.steps.lora_rules import wrong_loras
from worker_service.steps.new_sequences import NO_SLOTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worker_service.batch.input_batch import InputBatch
    from worker_service.lora.slots import AdapterSlots


class _Enough(Exception):
    """Raised with the last violation that is reported."""


def check_step(
    step: Step, batch: InputBatch, num_device_blocks: int, num_host_blocks: int, slots: AdapterSlots = NO_SLOTS
) -> BlockyardError | None:
    """Returns the violations of a step as one error; None: there are none.

    The executor checks the step's epoch and step_id.
    """
    check = _StepCheck(step, batch, num_device_blocks)
    with suppress(_Enough):
        check.run()
        found = check_transfers(step, num_device_blocks, num_host_blocks)
        if slots.lora_ids.size or step.activated_lora_ids.size or any(new.lora_id for new in step.new_sequences):
            found.extend(wrong_loras(step, batch, slots))
        for violation in found:
            check.add_violation(violation.field, violation.description)
    return invalid(check.violations) if check.violations else None


class _StepCheck:
    """The check of one step. `_changed` holds the progress of sequences after the step's changes, by id."""

    def __init__(self, step: Step, batch: InputBatch, num_device_blocks: int) -> None:
        self.violations: list[Violation] = []
        self._step = step
        self._batch = batch
        self._num_device_blocks = num_device_blocks
        self._finished = set(step.finished_sequence_ids)
        self._new = {sequence.sequence_id for sequence in step.new_sequences}
        self._changed: dict[int, RowProgress] = {}
        # The tables that the step brings, by sequence: those of blocks, and those of fixed blocks.
        self._tables: dict[int, Array] = {}
        self._fixed: dict[int, Array] = {}

    def run(self) -> None:
        self._check_new_sequences()
        self._check_forks()
        self._check_inputs()
        self._check_tables()
        if self._columns_fit():
            progress = self._current_progress()
            self._check_scheduled(progress)
            has_changed = bool(self._fixed) or len(self._step.appended_block_ids) > 0
            if self._batch.limits.num_state_blocks and has_changed and not self.violations:
                for violation in wrong_owners(
                    self._step, self._batch, self._num_device_blocks, self._tables, self._fixed
                ):
                    self.add_violation(violation.field, violation.description)
            if len(self._step.max_draft_tokens) or len(self._step.draft_prices):
                self._check_drafts(progress)

    def add_violation(self, field: str, description: str) -> None:
        """Adds a violation; raises _Enough with the last that is reported."""
        self.violations.append(Violation(field, description))
        if len(self.violations) == MAX_VIOLATIONS:
            raise _Enough

    def _is_live(self, sequence_id: int) -> bool:
        """Returns whether the worker has the sequence when the step computes."""
        known = sequence_id in self._batch and sequence_id not in self._finished
        return known or sequence_id in self._changed

    def _progress(self, sequence_id: int) -> RowProgress:
        """Returns the progress of a live sequence, to be changed."""
        if sequence_id not in self._changed:
            self._changed[sequence_id] = self._batch.progress(sequence_id)
        return self._changed[sequence_id]

    def _check_block_ids(self, field: str, block_ids: Array) -> None:
        if len(block_ids) > self._batch.limits.max_num_blocks:
            self.add_violation(field, f"{len(block_ids)} blocks hold more than max_model_len")
        if len(block_ids) % max(self._batch.limits.num_kv_groups, 1):
            self.add_violation(field, f"there must be a block of each of {self._batch.limits.num_kv_groups} KV groups")
        elif any(map(self._out_of_range, self._parts(block_ids))):
            self.add_violation(field, f"device blocks must be from 1 to {self._num_device_blocks - 1}")

    def _check_fixed_ids(self, field: str, sequence_id: int, fixed_ids: Array) -> None:
        if len(fixed_ids) != self._batch.limits.num_state_blocks:
            self.add_violation(
                field,
                f"{len(fixed_ids)} blocks, and each sequence has {self._batch.limits.num_state_blocks} fixed ones",
            )
        elif self._out_of_range(fixed_ids):
            self.add_violation(field, f"device blocks must be from 1 to {self._num_device_blocks - 1}")
        elif len(fixed_ids):
            self._fixed[sequence_id] = fixed_ids

    def _parts(self, block_ids: Array) -> Iterable[Array]:
        """Yields the block ids of a table by KV group. In groups with a window 0 means no block, and is left out."""
        windows = self._batch.limits.kv_windows
        for group, window in enumerate(windows):
            part = block_ids[group :: len(windows)]
            yield part[part != 0] if window else part

    def _out_of_range(self, block_ids: Array) -> bool:
        return len(block_ids) > 0 and bool(np.count_nonzero((block_ids < 1) | (block_ids >= self._num_device_blocks)))

    def _check_new_sequences(self) -> None:
        for index, sequence in enumerate(self._step.new_sequences):
            name = f"new_sequences[{index}]"
            sequence_id = sequence.sequence_id
            if sequence_id in self._changed:
                self.add_violation(f"{name}.sequence_id", f"sequence {sequence_id} appears twice")
            elif sequence_id in self._batch and sequence_id not in self._finished:
                self.add_violation(f"{name}.sequence_id", f"sequence {sequence_id} is known already")
            self._check_new_sequence(name, sequence)
            self._changed[sequence_id] = RowProgress(
                len(sequence.token_ids),
                sequence.num_computed_tokens,
                len(sequence.block_ids),
                ended=sequence.rejection is not None,
            )

    def _check_new_sequence(self, name: str, sequence: NewRow) -> None:
        limits = self._batch.limits
        if sequence.num_computed_tokens > limits.count_slots(len(sequence.block_ids)):
            self.add_violation(f"{name}.num_computed_tokens", "more than the table's blocks hold")
        self._check_block_ids(f"{name}.block_ids", sequence.block_ids)
        self._check_fixed_ids(f"{name}.fixed_block_ids", sequence.sequence_id, sequence.fixed_block_ids)
        self._tables[sequence.sequence_id] = sequence.block_ids

    def _check_forks(self) -> None:
        children: set[int] = set()
        if self._step.forks and self._batch.limits.rule is not None:
            self.add_violation("forks", "a sequence that pools has no children")
        for index, fork in enumerate(self._step.forks):
            name = f"forks[{index}]"
            parent, child = fork.parent_id, fork.child_id
            if parent in children or not (parent in self._batch or parent in self._new):
                self.add_violation(f"{name}.parent_sequence_id", f"sequence {parent} is not known")
            if child in children or child in self._batch or child in self._new:
                self.add_violation(f"{name}.child_sequence_id", f"sequence {child} is known already")
            children.add(child)
            self._check_block_ids(f"{name}.block_ids", fork.block_ids)
            self._check_fixed_ids(f"{name}.fixed_block_ids", child, fork.fixed_block_ids)
            self._tables[child] = fork.block_ids
        for fork in self._step.forks:
            if fork.child_id not in self._finished:
                self._changed[fork.child_id] = self._child_progress(fork)

    def _child_progress(self, fork: ForkedRow) -> RowProgress:
        parent = fork.parent_id
        progress = self._changed[parent] if parent in self._new else self._batch.progress(parent)
        return replace(progress, num_blocks=len(fork.block_ids))

    def _check_inputs(self) -> None:
        """Checks the ids that the scheduler chose: each is its sequence's next and is computed by this step."""
        step = self._step
        if len(step.input_sequence_ids) != len(step.input_token_ids):
            self.add_violation("input_token_ids", "must have the length of input_sequence_ids")
            return
        if not step.input_sequence_ids:
            return
        if len(set(step.input_sequence_ids)) != len(step.input_sequence_ids):
            self.add_violation("input_sequence_ids", "a sequence appears twice")
        if (step.input_token_ids >= self._batch.limits.vocab_size).any():
            self.add_violation("input_token_ids", f"token ids must be below {self._batch.limits.vocab_size}")
        num_new_tokens = dict(zip(step.sequence_ids, step.num_new_tokens.tolist(), strict=False))
        for sequence_id in step.input_sequence_ids:
            self._check_input(sequence_id, num_new_tokens.get(sequence_id, 0))

    def _check_input(self, sequence_id: int, num_new_tokens: int) -> None:
        if not self._is_live(sequence_id):
            self.add_violation("input_sequence_ids", f"sequence {sequence_id} is not known")
            return
        progress = self._progress(sequence_id)
        if num_new_tokens != 1:
            self.add_violation(
                "input_sequence_ids", f"sequence {sequence_id}: the step does not compute one token of it"
            )
        elif not progress.ended and progress.num_computed_tokens != progress.num_tokens:
            self.add_violation("input_sequence_ids", f"sequence {sequence_id}: its next token is known already")
        progress.num_tokens += 1

    def _check_tables(self) -> None:
        step = self._step
        if len(step.appended_sequence_ids) != len(step.appended_block_ids):
            self.add_violation("appended_block_ids", "must have the length of appended_sequence_ids")
            return
        for sequence_id, num_blocks in Counter(step.appended_sequence_ids).items():
            self._grow_table(sequence_id, num_blocks)
        if self._out_of_range(step.appended_block_ids):
            self.add_violation("appended_block_ids", f"device blocks must be from 1 to {self._num_device_blocks - 1}")
        fixed_tables = dict(step.replaced_fixed_tables)
        for index, (sequence_id, block_ids) in enumerate(step.replaced_tables):
            name = f"replaced_tables[{index}]"
            self._check_block_ids(f"{name}.block_ids", block_ids)
            self._tables[sequence_id] = block_ids
            if sequence_id in fixed_tables:
                self._check_fixed_ids(f"{name}.fixed_block_ids", sequence_id, fixed_tables[sequence_id])
            if self._is_live(sequence_id):
                self._progress(sequence_id).num_blocks = len(block_ids)
            else:
                self.add_violation(f"{name}.sequence_id", f"sequence {sequence_id} is not known")

    def _grow_table(self, sequence_id: int, num_blocks: int) -> None:
        if not self._is_live(sequence_id):
            self.add_violation("appended_sequence_ids", f"sequence {sequence_id} is not known")
            return
        progress = self._progress(sequence_id)
        progress.num_blocks += num_blocks
        if progress.num_blocks > self._batch.limits.max_num_blocks:
            self.add_violation("appended_block_ids", f"sequence {sequence_id}: the table holds more than max_model_len")

    def _columns_fit(self) -> bool:
        step = self._step
        if len(step.sequence_ids) != len(step.num_new_tokens):
            self.add_violation("num_new_tokens", "must have the length of sequence_ids")
            return False
        limits = self._batch.limits
        if len(step.sequence_ids) > limits.max_num_seqs:
            self.add_violation(
                "sequence_ids", f"{len(step.sequence_ids)} are more than max_num_seqs, {limits.max_num_seqs}"
            )
        num_tokens, most = int(step.num_new_tokens.sum()), limits.max_num_batched_tokens
        if num_tokens > most:
            self.add_violation("num_new_tokens", f"{num_tokens} tokens are more than max_num_batched_tokens, {most}")
        named = set(step.sequence_ids)
        if len(named) != len(step.sequence_ids):
            self.add_violation("sequence_ids", "a sequence appears twice")
            return False
        unknown = (self._batch.unknown(named) | (named & self._finished)).difference(self._changed)
        if unknown:
            self.add_violation("sequence_ids", f"sequences {sorted(unknown)[:8]} are not known")
        return not unknown

    def _check_scheduled(self, progress: npt.NDArray[np.void]) -> None:
        """Checks the columns of what is computed: lengths, tables, children."""
        step, limits = self._step, self._batch.limits
        live, num_tokens = ~progress["ended"], progress["num_tokens"]
        lengths = progress["num_computed_tokens"] + step.num_new_tokens
        self._add_row_violation("num_new_tokens", live & (lengths > num_tokens), "computes more tokens than are known")
        self._add_row_violation(
            "num_new_tokens", live & (lengths > limits.max_model_len), "computes past max_model_len"
        )
        if limits.whole_prompts:
            self._add_row_violation("num_new_tokens", live & (lengths != num_tokens), "computes a prompt in pieces")
        short = lengths > limits.count_slots(progress["num_blocks"])
        self._add_row_violation("num_new_tokens", live & short, "has too short a block table")
        if np.count_nonzero(step.num_new_tokens) < len(live):
            children = live & (step.num_new_tokens == 0)
            samples = (lengths == num_tokens) & (step.num_new_tokens > 0) & live
            self._add_row_violation(
                "num_new_tokens", children & ~self._has_sampling_parent(samples), "has no parent that samples"
            )

    def _current_progress(self) -> npt.NDArray[np.void]:
        """Returns the progress of the step's sequences after its changes: records PROGRESS [n]."""
        progress = self._batch.progress_of(self._step.sequence_ids)
        if self._changed:
            for index, sequence_id in enumerate(self._step.sequence_ids):
                if sequence_id in self._changed:
                    progress[index] = self._changed[sequence_id].record()
        return progress

    def _check_drafts(self, progress: npt.NDArray[np.void]) -> None:
        """Checks the numbers of drafts that sequences may have: only decodes have some, and their tables have room."""
        step, limits, allowed, field = self._step, self._batch.limits, self._step.max_draft_tokens, "max_draft_tokens"
        if len(step.draft_prices) > limits.max_draft_rows:
            self.add_violation("draft_prices", f"at most {limits.max_draft_rows} tokens are drafted")
        if len(allowed) != len(step.sequence_ids):
            self.add_violation(field, "must have the length of sequence_ids")
            return
        # Python's own numbers: most steps with drafts have few sequences.
        counts = allowed.tolist()
        num_allowed = sum(counts)
        if max(counts, default=0) > limits.max_draft_tokens:
            self.add_violation(field, f"at most {limits.max_draft_tokens} for each sequence")
        if num_allowed > limits.max_draft_rows:
            self.add_violation(field, f"at most {limits.max_draft_rows} for all sequences")
        num_tokens, most = sum(step.num_new_tokens.tolist()) + num_allowed, limits.max_num_batched_tokens
        if num_tokens > most:
            self.add_violation(field, f"{num_tokens} tokens are more than max_num_batched_tokens, {most}")
        if self._batch.takes_ids or step.ids_from_scheduler:
            self.add_violation(field, "the scheduler brings the ids of this epoch")
        may = (allowed > 0) & ~progress["ended"]
        num_known = progress["num_tokens"]
        is_decode = (step.num_new_tokens == 1) & (progress["num_computed_tokens"] + 1 == num_known)
        if step.forks:
            parents = {fork.parent_id for fork in step.forks}
            is_decode &= np.array([sequence_id not in parents for sequence_id in step.sequence_ids], np.bool_)
        self._add_row_violation(field, may & ~is_decode, "only sequences that decode may draft")
        self._add_row_violation(field, may & ~self._drafting_sequences(), "has no max_length, or is a beam")
        room = limits.count_slots(progress["num_blocks"])
        self._add_row_violation(field, may & (num_known + allowed > room), "has too short a block table for its drafts")
        is_long = may & (num_known + allowed > limits.max_model_len)
        self._add_row_violation(field, is_long, "drafts past max_model_len")

    def _drafting_sequences(self) -> npt.NDArray[np.bool_]:
        """Returns whether each sequence of the step is of a kind that may draft."""
        may = self._batch.may_draft(self._step.sequence_ids)
        if not self._step.new_sequences:
            return may
        new = {each.sequence_id: each for each in self._step.new_sequences}
        for index, sequence_id in enumerate(self._step.sequence_ids):
            if sequence_id in new:
                may[index] = new[sequence_id].max_length > 0 and not new[sequence_id].num_beam_candidates
        return may

    def _add_row_violation(self, field: str, wrong: npt.NDArray[np.bool_], description: str) -> None:
        if np.count_nonzero(wrong):
            names = [self._step.sequence_ids[index] for index in np.flatnonzero(wrong)[:8].tolist()]
            self.add_violation(field, f"sequences {names}: {description}")

    def _has_sampling_parent(self, samples: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        step = self._step
        sampling = {step.sequence_ids[index] for index in np.flatnonzero(samples).tolist()}
        good = {fork.child_id for fork in step.forks if fork.parent_id in sampling}
        return np.array([sequence_id in good for sequence_id in step.sequence_ids], np.bool_)


def check_transfers(step: Step, num_device_blocks: int, num_host_blocks: int) -> list[Violation]:
    """Returns the faults of a step's swaps and copies: ids out of range, and reads of blocks that were overwritten."""
    out, into, copy = step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy
    if not any(len(pairs.sources) or len(pairs.destinations) for pairs in (out, into, copy)):
        return []
    device, host = (1, num_device_blocks), (0, num_host_blocks)
    found = [
        *_pair_violations("blocks_to_swap_out", out, device, host),
        *_pair_violations("blocks_to_swap_in", into, host, device),
        *_pair_violations("blocks_to_copy", copy, device, device),
    ]
    if np.intersect1d(copy.sources, copy.destinations).size:
        found.append(Violation("blocks_to_copy", "a destination is a source in the same list"))
    if np.intersect1d(into.sources, out.destinations).size:
        found.append(Violation("blocks_to_swap_in.sources", "a block is written by blocks_to_swap_out in this step"))
    if np.intersect1d(into.destinations, copy.destinations).size:
        found.append(Violation("blocks_to_copy.destinations", "a block is written by blocks_to_swap_in in this step"))
    return found


def _pair_violations(
    name: str, pairs: BlockPairs, sources: tuple[int, int], destinations: tuple[int, int]
) -> Iterable[Violation]:
    if len(pairs.sources) != len(pairs.destinations):
        yield Violation(name, "sources and destinations must have the same length")
    for side, column, (low, high) in (
        ("sources", pairs.sources, sources),
        ("destinations", pairs.destinations, destinations),
    ):
        if column.size and (column.min() < low or column.max() >= high):
            yield Violation(f"{name}.{side}", f"blocks must be from {low} to {high - 1}")
    if len(np.unique(pairs.destinations)) != len(pairs.destinations):
        yield Violation(f"{name}.destinations", "a block appears twice")
