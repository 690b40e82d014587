"""Checks that fixed blocks have one owner: a step of a model whose sequences have some, before it changes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from blockyard.errors import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from worker_service.batch.input_batch import InputBatch
    from worker_service.step import Array, Step


def wrong_owners(
    step: Step,
    batch: InputBatch,
    num_device_blocks: int,
    tables: Mapping[int, Array],
    fixed_tables: Mapping[int, Array],
) -> Iterable[Violation]:
    """Yields fixed blocks of the step's sequences that are in another table of these sequences.

    The tables of other sequences may be old: their blocks may have gone to others. So may those of a KV group with a
    window, from which blocks are given back.

    Args:
        step: the step, in which every sequence is known and every block exists.
        batch: the rows before the step.
        num_device_blocks: the blocks of the pool.
        tables: the tables that the step brings, by sequence.
        fixed_tables: the fixed blocks that the step brings, by sequence.
    """
    fixed = batch.fixed_tables_of(step.sequence_ids)
    for index, sequence_id in enumerate(step.sequence_ids):
        if sequence_id in fixed_tables:
            fixed[index] = fixed_tables[sequence_id]
    is_fixed = np.zeros(num_device_blocks, np.bool_)
    is_fixed[fixed] = True
    if np.count_nonzero(is_fixed) < fixed.size:
        yield Violation("fixed_block_ids", "a block is fixed twice")
    others = np.concatenate([*_find_changed(step, batch, tables), _find_unchanged(step, batch, tables, fixed_tables)])
    both = others[is_fixed[others]]
    if len(both):
        yield Violation("fixed_block_ids", f"blocks {both[:8].tolist()} hold tokens of a sequence as well")


def _find_changed(step: Step, batch: InputBatch, tables: Mapping[int, Array]) -> Iterable[Array]:
    """Yields the blocks that the step brings into tables that keep all tokens, of sequences that it computes."""
    windows, computed = batch.limits.kv_windows, set(step.sequence_ids)
    for sequence_id, block_ids in tables.items():
        if sequence_id in computed:
            yield from (block_ids[group :: len(windows)] for group, window in enumerate(windows) if not window)
    if not any(windows):
        is_computed = np.array([each in computed for each in step.appended_sequence_ids], np.bool_)
        yield step.appended_block_ids[is_computed]


def _find_unchanged(
    step: Step, batch: InputBatch, tables: Mapping[int, Array], fixed_tables: Mapping[int, Array]
) -> Array:
    """Returns the blocks of tables as they were, if the step fixes others."""
    unchanged = tuple(each for each in step.sequence_ids if each not in tables)
    return batch.kept_blocks_of(unchanged if fixed_tables else ())
