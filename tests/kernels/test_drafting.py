"""Drafts of rows: the compiled search finds what its definition in numpy finds, id for id."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from blockyard.lora.virtual_tokens import FIRST_VIRTUAL_ID
from blockyard_kernels.drafting import DraftRows
from blockyard_kernels.suffixes import HostDrafting
from tests.kit.kernels.backends import COMPILED, KERNELS, in_dtype

if TYPE_CHECKING:
    from blockyard_kernels.drafting import DraftingOps, Drafts, Ids
    from tests.kit.kernels.backends import Kernels

VOCAB = 1000
NUM_ROWS = 10_000
PLACES = 96
for_each = pytest.mark.parametrize("kernels", in_dtype(KERNELS, torch.float32), ids=str)


def find(ops: DraftingOps, known: list[int], most: int, predicted: list[int] | None = None) -> tuple[list[int], int]:
    """Finds the drafts of one row, and the length of the match."""
    table = np.full((1, len(known) + most), -7, np.int32)
    table[0, : len(known)] = known
    lengths, wanted = np.array([len(known)]), np.array([most])
    text = None if predicted is None else np.array(predicted, np.int32)
    found = ops.find_drafts(DraftRows(table, np.zeros(1, np.int64), lengths, wanted, [text], VOCAB))
    return table[0, len(known) : len(known) + found.num_drafts[0]].tolist(), int(found.num_matched[0])


def random_text(generator: np.random.Generator, length: int) -> Ids:
    """A text of few ids that repeats itself, in which some ids are no tokens."""
    num_ids = int(generator.choice([1, 2, 3, 10, VOCAB]))
    text = generator.integers(0, num_ids, length).astype(np.int32)
    if length > 8 and generator.random() < 0.5:
        size, source, target = (int(each) for each in generator.integers(1, length // 2, 3))
        text[target : target + size] = text[source : source + size][: len(text[target : target + size])]
    if length and generator.random() < 0.2:
        no_tokens = [VOCAB, FIRST_VIRTUAL_ID, 2**31 - 1, -1]
        text[generator.integers(0, length, 1 + length // 40)] = generator.choice(no_tokens)
    return text


@cache
def random_rows() -> DraftRows:
    """Rows in any order, half of them with a second text."""
    generator = np.random.default_rng(5)
    table = np.full((NUM_ROWS, PLACES), -7, np.int32)
    rows, lengths = generator.permutation(NUM_ROWS), generator.integers(1, PLACES - 12, NUM_ROWS)
    for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
        table[row, :length] = random_text(generator, length)
    sizes = generator.integers(0, 2 * PLACES, NUM_ROWS).tolist()
    predicted = [random_text(generator, size) if size < PLACES else None for size in sizes]
    return DraftRows(table, rows, lengths, generator.integers(0, 13, NUM_ROWS), predicted, VOCAB)


def draft(ops: DraftingOps) -> tuple[Drafts, Ids]:
    """Finds drafts of the random rows -> (the drafts, the rows with them)."""
    rows = replace(random_rows(), token_ids=random_rows().token_ids.copy())
    return ops.find_drafts(rows), rows.token_ids


@cache
def expected() -> tuple[Drafts, Ids]:
    return draft(HostDrafting())


@pytest.mark.parametrize("kernels", in_dtype(COMPILED, torch.float32), ids=str)
def test_random_rows_get_the_drafts_of_the_definition(kernels: Kernels) -> None:
    truth, rows = expected()
    found, found_rows = draft(kernels.backend.drafting)
    assert np.array_equal(found.num_matched, truth.num_matched)
    assert np.array_equal(found.num_drafts, truth.num_drafts)
    assert np.array_equal(found_rows, rows)
    assert np.count_nonzero(truth.num_drafts) > NUM_ROWS // 4
    assert len(set(truth.num_matched.tolist())) > 20


@for_each
def test_the_longest_match_counts_and_of_equally_long_ones_the_last(kernels: Kernels) -> None:
    ops = kernels.backend.drafting
    assert find(ops, [1, 2, 3, 9, 2, 3, 8, 2, 3], 1) == ([8], 2)
    assert find(ops, [1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], 1) == ([9], 3)


@for_each
def test_a_text_goes_on_with_its_drafts(kernels: Kernels) -> None:
    assert find(kernels.backend.drafting, [4, 5, 6, 4, 5], 7) == ([6, 4, 5, 6, 4, 5, 6], 2)


@for_each
def test_a_single_id_is_no_match(kernels: Kernels) -> None:
    ops = kernels.backend.drafting
    assert find(ops, [1, 2, 3, 2], 4) == ([], 0)
    assert find(ops, [1], 4, [1, 2, 3]) == ([], 0)


@for_each
def test_a_second_text_counts_where_its_match_is_longer(kernels: Kernels) -> None:
    ops = kernels.backend.drafting
    assert find(ops, [7, 1, 2], 4, [7, 1, 2, 5]) == ([5], 3)
    assert find(ops, [1, 2, 8, 1, 2], 1, [9, 1, 2, 5]) == ([8], 2)
    assert find(ops, [3, 1, 2, 8, 3, 3, 1, 2], 3, [3, 3, 1, 2, 5, 6, 7, 8]) == ([5, 6, 7], 4)


@for_each
def test_ids_that_are_no_tokens_are_neither_drafted_nor_passed(kernels: Kernels) -> None:
    ops = kernels.backend.drafting
    assert find(ops, [1, 2, 3, FIRST_VIRTUAL_ID, 1, 2], 3) == ([], 0)
    assert find(ops, [FIRST_VIRTUAL_ID, 1, 2, 3, 1, 2], 3) == ([3, 1, 2], 2)
    assert find(ops, [5, 1, 2], 3, [1, 2, VOCAB]) == ([], 0)
