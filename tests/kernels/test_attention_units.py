"""Cuts of keys are units of work where tiles are few. Whoever computes them, a row has the bits of one thread."""

from __future__ import annotations

import pytest
import torch

from blockyard_kernels.shapes import AttentionShape
from tests.kernels.test_attention import TOLERANCE, Case, brute_force, make_case
from tests.kit.kernels.backends import COMPILED, Kernels, in_dtype

NUM_THREADS = (2, 3, 4, 8)
# New tokens and lengths of the sequences of a step: one decode, a decode and its drafts, pieces, and some of each.
STEPS = [
    ([1], [1500]),
    ([12], [1030]),
    ([7, 1], [800, 2000]),
    ([40], [600]),
    ([1, 3, 0, 1, 1], [300, 257, 9, 1300, 512]),
]
# One key-value head and several; a group wider than the scratch of a thread; heads that are no whole vectors.
SHAPES = [
    AttentionShape(9, 3, 64, 0.125),
    AttentionShape(14, 2, 64, 0.125),
    AttentionShape(64, 1, 8, 0.3),
    AttentionShape(6, 2, 20, 0.5, softcap=1.5),
]
for_compiled = pytest.mark.parametrize("kernels", COMPILED, ids=str)


def add_sinks(case: Case) -> Case:
    case.sinks = torch.randn(case.shape.num_heads, generator=torch.Generator().manual_seed(7)) * 2
    return case


@for_compiled
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (100, True), (700, True)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_threads_gives_the_bits_of_one(
    kernels: Kernels, shape: AttentionShape, window: int | None, has_sinks: bool
):
    for new, lens in STEPS:
        case = make_case(new, lens, kernels=kernels, shape=shape, block_size=32)
        if has_sinks:
            add_sinks(case)
        expected = case.compute(window)
        for num_threads in NUM_THREADS:
            kernels.backend.set_num_threads(num_threads)
            assert torch.equal(case.compute(window), expected), (new, lens, num_threads)
        kernels.backend.set_num_threads(1)


@pytest.mark.parametrize("kernels", in_dtype(COMPILED, torch.float32), ids=str)
def test_cuts_by_several_threads_are_right(kernels: Kernels):
    kernels.backend.set_num_threads(4)
    for new, lens in STEPS:
        case = add_sinks(make_case(new, lens, kernels=kernels))
        tolerance = TOLERANCE[kernels.dtype]
        torch.testing.assert_close(case.compute().double(), brute_force(case), rtol=tolerance, atol=tolerance)


@for_compiled
@pytest.mark.parametrize("num_drafts", [1, 5, 11])
def test_a_run_of_drafts_gives_the_bits_of_decodes_one_by_one(kernels: Kernels, num_drafts: int):
    """However many threads compute either."""
    case = add_sinks(make_case([1 + num_drafts], [1030], kernels=kernels))
    kernels.backend.set_num_threads(4)
    together = case.compute()
    for row in range(1 + num_drafts):
        end = 1030 - num_drafts + row
        batch = kernels.backend.plan_attention([1], [end], [case.batch.block_tables[0]], 16)
        for num_threads in (1, 3):
            kernels.backend.set_num_threads(num_threads)
            alone = kernels.backend.paged_attention(
                case.query[row : row + 1], batch, case.pool, 1, case.shape, None, case.sinks
            )
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("kernels", in_dtype(COMPILED, torch.bfloat16), ids=str)
def test_rows_that_see_those_behind_them_are_cut_as_well(kernels: Kernels):
    shape = AttentionShape(4, 1, 16, 0.25, is_causal=False)
    for window in (None, 300):
        case = make_case([3], [900], kernels=kernels, shape=shape)
        expected = case.compute(window)
        for num_threads in NUM_THREADS:
            kernels.backend.set_num_threads(num_threads)
            assert torch.equal(case.compute(window), expected)
        kernels.backend.set_num_threads(1)


@pytest.mark.parametrize("kernels", in_dtype(COMPILED, torch.bfloat16), ids=str)
def test_what_has_no_room_for_its_cuts_is_computed_by_tiles(kernels: Kernels):
    """Two tiles of 48 rows, of 128 numbers each, at 50,000 keys: 9 of the 8 MiB that two threads have."""
    shape = AttentionShape(16, 1, 128, 0.1)
    case = make_case([6], [50_000], kernels=kernels, shape=shape, block_size=256)
    expected = case.compute()
    kernels.backend.set_num_threads(2)
    assert torch.equal(case.compute(), expected)


@pytest.mark.parametrize("kernels", in_dtype(COMPILED, torch.bfloat16), ids=str)
def test_a_sequence_that_went_wrong_harms_itself_only_when_cut(kernels: Kernels):
    case = make_case([1, 1], [900, 700], kernels=kernels)
    expected = case.compute()
    case.pool[case.batch.block_tables[1, 3]] = float("nan")
    kernels.backend.set_num_threads(4)
    got = case.compute()
    assert torch.equal(got[0], expected[0])
    assert got[1].isnan().any()
