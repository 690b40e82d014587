"""Paged attention against a brute force in float64, and the bits of its rows under every arrangement of a step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from blockyard_kernels import planning
from blockyard_kernels.ops import BLOCK_SIZES, AttentionBatch, kv_pool_shape
from blockyard_kernels.reference import attention
from blockyard_kernels.shapes import AttentionShape
from tests.kit.kernels.backends import COMPILED, KERNELS, REFERENCE, Kernels, in_dtype, store

FLOAT32 = in_dtype(KERNELS, torch.float32)
REFERENCE32 = Kernels(REFERENCE, torch.float32)
USUAL = AttentionShape(4, 2, 16, 0.25)
# Of values whose standard deviation is 1: what sums in another order differ by, and bfloat16's last place.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
for_all = pytest.mark.parametrize("kernels", KERNELS, ids=str)
in_float32 = pytest.mark.parametrize("kernels", FLOAT32, ids=str)


@dataclass
class Case:
    """Sequences whose keys and values lie in a pool that is NaN elsewhere, and the queries of a step."""

    kernels: Kernels
    shape: AttentionShape
    batch: AttentionBatch
    pool: torch.Tensor
    query: torch.Tensor
    keys_values: list[torch.Tensor]
    """For each sequence [2, length, K, D]."""
    sinks: torch.Tensor | None = None

    def compute(self, window: int | None = None) -> torch.Tensor:
        self.kernels.is_exact(self.shape)
        backend = self.kernels.backend
        return backend.paged_attention(self.query, self.batch, self.pool, 1, self.shape, window, self.sinks)


def make_case(
    new: list[int],
    lens: list[int],
    *,
    kernels: Kernels = REFERENCE32,
    shape: AttentionShape = USUAL,
    block_size: int = 16,
    seed: int = 0,
) -> Case:
    """The same keys, values and queries of each (sequence, position) whatever the seed, which places the blocks."""
    num_blocks = [-(-length // block_size) for length in lens]
    places = list(range(sum(num_blocks) + 3))
    random.Random(seed).shuffle(places)
    tables = [[places.pop() for _ in range(count)] for count in num_blocks]
    pool_shape = kv_pool_shape(sum(num_blocks) + 3, 2, shape.num_kv_heads, block_size, shape.head_dim)
    pool = torch.full(pool_shape, float("nan"), dtype=kernels.dtype)
    keys_values: list[torch.Tensor] = []
    queries: list[torch.Tensor] = []
    for index, (count, length) in enumerate(zip(new, lens, strict=True)):
        generator = torch.Generator().manual_seed(index)
        stored = torch.randn(2, length, shape.num_kv_heads, shape.head_dim, generator=generator).to(kernels.dtype)
        asked = torch.randn(length, shape.num_heads, shape.head_dim, generator=generator).to(kernels.dtype)
        keys_values.append(stored)
        queries.append(asked[length - count :])
    store(kernels.backend, pool, 1, tables, keys_values)
    batch = kernels.backend.plan_attention(new, lens, tables, block_size)
    return Case(kernels, shape, batch, pool, torch.cat(queries), keys_values)


def assert_kept(case: Case, got: torch.Tensor, expected: torch.Tensor, what: object = None) -> None:
    """Rows of another arrangement: the same bits where these kernels promise them on this processor, else near."""
    if case.kernels.is_exact(case.shape):
        assert torch.equal(got, expected), what
    else:
        tolerance = TOLERANCE[case.kernels.dtype]
        torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


def brute_force(case: Case, window: int | None = None) -> torch.Tensor:
    """Softmax of each row over what it sees, in float64."""
    results: list[torch.Tensor] = []
    group = case.shape.num_heads // case.shape.num_kv_heads
    row = 0
    for count, length, stored in zip(
        case.batch.num_new_tokens.tolist(), case.batch.seq_lens.tolist(), case.keys_values, strict=True
    ):
        for position in range(length - count, length):
            first = 0 if window is None else max(0, position - window + 1)
            key, value = stored[:, first : position + 1].double().repeat_interleave(group, dim=2)
            scores = (case.query[row].double() * key).sum(-1) * case.shape.scale
            if case.shape.softcap:
                scores = torch.tanh(scores / case.shape.softcap) * case.shape.softcap
            if case.sinks is not None:
                scores = torch.cat([scores, case.sinks.double()[None]])
                value = torch.cat([value, torch.zeros_like(value[:1])])
            results.append((scores.softmax(0)[..., None] * value).sum(0).flatten())
            row += 1
    return torch.stack(results)


def assert_right(case: Case, window: int | None = None) -> None:
    got, tolerance = case.compute(window), TOLERANCE[case.kernels.dtype]
    assert got.dtype == case.kernels.dtype
    torch.testing.assert_close(got.double(), brute_force(case, window), rtol=tolerance, atol=tolerance)


# Groups of 1, 3, 7, 8, 40 and 64; head_dim of every kind of tail.
SHAPES = [
    AttentionShape(4, 4, 16, 0.25),
    AttentionShape(6, 2, 32, 0.2),
    AttentionShape(7, 1, 64, 0.125),
    AttentionShape(8, 1, 128, 0.1),
    AttentionShape(40, 1, 16, 0.25),
    AttentionShape(64, 1, 8, 0.3),
    AttentionShape(3, 1, 80, 0.11),
    AttentionShape(2, 2, 96, 0.1),
    AttentionShape(6, 2, 20, 0.2),
]


def name_of(shape: AttentionShape) -> str:
    return f"{shape.num_heads}x{shape.num_kv_heads}x{shape.head_dim}"


for_all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=name_of)


@for_all
@for_all_shapes
def test_any_mix_of_pieces_and_decodes(shape: AttentionShape, kernels: Kernels):
    assert_right(make_case([1, 40, 1, 3, 0, 1], [300, 40, 1, 280, 9, 17], shape=shape, kernels=kernels))


@for_all
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", [8, 20, 80])
def test_blocks_of_every_size_with_lengths_at_their_edges(block_size: int, head_dim: int, kernels: Kernels):
    lens = [block_size - 1, block_size, block_size + 1, 257, 2 * block_size]
    shape = AttentionShape(3, 1, head_dim, head_dim**-0.5)
    assert_right(make_case([1, 2, 3, 1, 2], lens, shape=shape, block_size=block_size, kernels=kernels))


@pytest.mark.parametrize("kernels", in_dtype(KERNELS, torch.bfloat16, torch.float16), ids=str)
def test_half_floats_err_little_more_than_their_own_rounding(kernels: Kernels):
    """The reference rounds once, at the end; ours also rounds what weighs the values."""
    case = make_case([1, 20], [300, 30], kernels=kernels)
    got, expected = case.compute(), brute_force(case)
    assert got.dtype == kernels.dtype
    rounding = (expected.to(kernels.dtype).double() - expected).abs().mean()
    assert (got.double() - expected).abs().mean() <= (1.01 if kernels.is_reference else 1.5) * rounding


@in_float32
@pytest.mark.parametrize("window", [1, 2, 37, 255, 256, 257, 300, 10_000])
def test_a_sliding_window(window: int, kernels: Kernels):
    assert_right(make_case([1, 290, 60, 1], [300, 290, 560, 257], kernels=kernels), window)


@pytest.mark.parametrize("kernels", in_dtype(COMPILED, torch.bfloat16), ids=str)
@pytest.mark.parametrize("window", [1, 37, 256])
def test_a_sliding_window_over_short_blocks_of_pairs(window: int, kernels: Kernels):
    assert_right(make_case([1, 50, 60, 1], [300, 50, 560, 257], block_size=8, kernels=kernels), window)


@for_all
def test_layers_with_and_without_a_window_share_a_batch(kernels: Kernels):
    case = make_case([30, 1], [50, 70], kernels=kernels)
    for window in (None, 8, None, 20):
        assert_right(case, window)


def test_the_reference_plans_once_for_each_kind_of_layer():
    case = make_case([30, 1], [50, 70])
    before = len(case.batch.work_lists)
    for window in (None, 8, None, 20):
        case.compute(window)
    assert len(case.batch.work_lists) == before + 3


@for_all
@pytest.mark.parametrize("block_size", [size for size in BLOCK_SIZES if size != 16])
def test_every_block_size_gives_the_same_bits(block_size: int, kernels: Kernels):
    case = make_case([1, 40, 5], [300, 40, 261], block_size=16, kernels=kernels)
    got = make_case([1, 40, 5], [300, 40, 261], block_size=block_size, seed=5, kernels=kernels).compute()
    assert_kept(case, got, case.compute())


@for_all
@for_all_shapes
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_is_the_same_bits_in_a_piece_and_alone(shape: AttentionShape, window: int | None, kernels: Kernels):
    case = make_case([270], [270], shape=shape, kernels=kernels)
    whole = case.compute(window)
    for start, end in ((0, 1), (0, 7), (100, 171), (255, 257), (269, 270)):
        got = piece_of(case, start, end).compute(window)
        assert_kept(case, got, whole[start:end], (start, end))


def piece_of(whole: Case, start: int, end: int) -> Case:
    """The first sequence, of which only [start, end) is computed."""
    batch = whole.kernels.backend.plan_attention(
        [end - start], [end], [whole.batch.block_tables[0]], whole.batch.block_size
    )
    first = int(whole.batch.seq_lens[0] - whole.batch.num_new_tokens[0])
    query = whole.query[start - first : end - first]
    return Case(whole.kernels, whole.shape, batch, whole.pool, query, [whole.keys_values[0][:, :end]], whole.sinks)


# Capped scores, sinks, and both; a group wider than the scratch of a thread, heads that are no whole vectors.
CAPPED = AttentionShape(6, 2, 32, 0.5, softcap=1.5)
WITH_SINKS = [(CAPPED, False), (CAPPED, True), (USUAL, True), (AttentionShape(64, 1, 8, 0.3), True)]
WITH_SINKS += [(AttentionShape(6, 2, 20, 0.2, softcap=2.0), True)]
for_all_with_sinks = pytest.mark.parametrize(("shape", "has_sinks"), WITH_SINKS, ids=str)


def add_sinks(case: Case, has_sinks: bool) -> Case:
    if has_sinks:
        case.sinks = torch.randn(case.shape.num_heads, generator=torch.Generator().manual_seed(7)) * 2
    return case


@for_all
@for_all_with_sinks
@pytest.mark.parametrize("window", [None, 100])
def test_scores_are_capped_and_sinks_take_their_share(
    shape: AttentionShape, has_sinks: bool, window: int | None, kernels: Kernels
):
    new, lens = [1, 40, 1, 3, 0, 1], [300, 40, 1, 280, 9, 17]
    assert_right(add_sinks(make_case(new, lens, shape=shape, kernels=kernels), has_sinks), window)


@for_all
@for_all_with_sinks
@pytest.mark.parametrize("window", [None, 100])
def test_caps_and_sinks_keep_the_bits_of_rows(
    shape: AttentionShape, has_sinks: bool, window: int | None, kernels: Kernels
):
    case = add_sinks(make_case([270], [270], shape=shape, kernels=kernels), has_sinks)
    whole = case.compute(window)
    for start, end in ((0, 1), (100, 171), (255, 257), (269, 270)):
        assert_kept(case, piece_of(case, start, end).compute(window), whole[start:end], (start, end))


@for_all
def test_a_sink_takes_what_keys_of_no_weight_leave(kernels: Kernels):
    """Very large sinks and scores do not overflow, and a sink below all that there is takes nothing."""
    case = make_case([1, 9], [300, 9], kernels=kernels)
    expected = case.compute()
    case.sinks = torch.full((4,), float("-inf"))
    torch.testing.assert_close(case.compute(), expected)
    case.sinks = torch.full((4,), 3e4)
    assert not case.compute().any()


@for_all
def test_order_and_mates_do_not_matter(kernels: Kernels):
    new, lens = [1, 40, 1, 3, 1], [300, 40, 520, 280, 17]
    case = make_case(new, lens, kernels=kernels)
    together, queries = case.compute().split(new), case.query.split(new)
    for index, (count, length) in enumerate(zip(new, lens, strict=True)):
        batch = kernels.backend.plan_attention([count], [length], [case.batch.block_tables[index]], 16)
        alone = kernels.backend.paged_attention(queries[index], batch, case.pool, 1, case.shape)
        assert_kept(case, alone, together[index])


@pytest.mark.parametrize("kernels", COMPILED, ids=str)
def test_threads_do_not_matter(kernels: Kernels):
    case = make_case([1, 40, 1, 3, 0, 1], [300, 40, 1, 280, 9, 17], kernels=kernels)
    expected = case.compute()
    for num_threads in (2, 3, 7, 1):
        kernels.backend.set_num_threads(num_threads)
        assert torch.equal(case.compute(), expected)


@pytest.mark.parametrize(("wave_bytes", "slab_bytes"), [(1, 1), (1 << 18, 1 << 17), (1 << 30, 1 << 30)])
def test_waves_and_slabs_are_free(monkeypatch: pytest.MonkeyPatch, wave_bytes: int, slab_bytes: int):
    new, lens = [1, 40, 1, 300], [900, 40, 10, 520]
    case = make_case(new, lens)
    expected = case.compute()
    monkeypatch.setattr(planning, "WAVE_BYTES", wave_bytes)
    monkeypatch.setattr(attention, "SLAB_BYTES", slab_bytes)
    assert_kept(case, make_case(new, lens).compute(), expected)


@pytest.mark.parametrize("multiple", attention.ROW_MULTIPLES)
@for_all_shapes
def test_tiles_may_be_padded_to_any_multiple(shape: AttentionShape, multiple: int):
    case = make_case([1, 40], [300, 40], shape=shape)
    got = attention.paged_attention(case.query, case.batch, case.pool, 1, shape, None, multiple)
    torch.testing.assert_close(got, case.compute(), rtol=4e-6, atol=4e-6)


@for_all
def test_a_row_that_sees_nothing_of_a_split_of_its_tile(kernels: Kernels):
    """The tile's first rows end in split 0, its last ones begin split 1: a masked split adds exact zeros."""
    case = make_case([12], [262], kernels=kernels)
    alone = [piece_of(case, position, position + 1).compute() for position in range(250, 262)]
    assert_kept(case, case.compute(), torch.cat(alone))


@for_all
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_what_lies_past_the_end_of_a_sequence_is_not_read(block_size: int, kernels: Kernels):
    """Finite rubbish in the last block's tail, and NaN in every block past it, change no bit."""
    case = make_case([1, 20], [37, 20], kernels=kernels, block_size=block_size)
    expected, tables = case.compute(), case.batch.block_tables
    own = [tables[0, : -(-37 // block_size)].tolist(), tables[1, : -(-20 // block_size)].tolist()]
    rubbish = torch.full((2, len(own[0]) * block_size, 2, 16), 3e4, dtype=kernels.dtype)
    rubbish[:, :37] = case.keys_values[0]
    store(kernels.backend, case.pool, 1, own[:1], [rubbish])
    beyond = next(block for block in range(len(case.pool)) if block not in tables)
    batch = kernels.backend.plan_attention([1, 20], [37, 20], [[*table, beyond] for table in own], block_size)
    assert torch.equal(kernels.backend.paged_attention(case.query, batch, case.pool, 1, case.shape), expected)


@for_all
def test_very_large_scores_do_not_overflow(kernels: Kernels):
    case = make_case([1, 9], [300, 9], kernels=kernels)
    case.query *= 1e4
    got = case.compute()
    assert got.isfinite().all()
    tolerance = max(1e-4, TOLERANCE[kernels.dtype])
    torch.testing.assert_close(got.double(), brute_force(case), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernels", COMPILED, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "keys", [[0], [5, 6], [256], [0, 257], [*range(300)], [*range(256)], [*range(256, 300)]], ids=len
)
def test_scores_that_are_not_finite_show_where_the_reference_shows_them(kernels: Kernels, bad: float, keys: list[int]):
    """A score of minus infinity is a key of no weight; where all are, no result is made up."""
    shape = AttentionShape(2, 1, 16, 0.25)
    results: list[torch.Tensor] = []
    for each in (kernels, Kernels(REFERENCE, kernels.dtype)):
        case = make_case([1, 1, 3, 40], [300, 2, 258, 300], kernels=each, shape=shape)
        # One dimension decides each score: infinite by the sign of the query's.
        case.query[:, :, 3] = 1
        case.query[::2, :, 3] = -1
        for stored, table in zip(case.keys_values, case.batch.block_tables.tolist(), strict=True):
            picked = [key for key in keys if key < stored.shape[1]]
            stored[0, picked, :, 3] = bad
            store(each.backend, case.pool, 1, [table[: -(-stored.shape[1] // 16)]], [stored])
        results.append(case.compute())
    got, expected = results
    assert torch.equal(got.isfinite(), expected.isfinite())
    tolerance = TOLERANCE[kernels.dtype]
    finite = expected.isfinite()
    torch.testing.assert_close(got[finite], expected[finite], rtol=tolerance, atol=tolerance)


@for_all
def test_a_sequence_that_went_wrong_harms_itself_only(kernels: Kernels):
    case = make_case([1, 3, 1], [300, 40, 17], kernels=kernels)
    expected = case.compute()
    case.keys_values[1][0, 0, 0, 0] = float("nan")
    store(kernels.backend, case.pool, 1, [case.batch.block_tables[1, :3].tolist()], case.keys_values[1:2])
    got = case.compute()
    assert torch.equal(got[[0, 4]], expected[[0, 4]])
    assert got[1:4].isnan().any()


@for_all
def test_queries_may_be_rows_of_something_wider(kernels: Kernels):
    case = make_case([5, 1], [40, 20], kernels=kernels)
    wide = torch.full((6, 7, 16), float("nan"), dtype=kernels.dtype)
    wide[:, 2:6] = case.query
    got = kernels.backend.paged_attention(wide[:, 2:6], case.batch, case.pool, 1, case.shape)
    assert torch.equal(got, case.compute())


@for_all
def test_no_rows_give_no_rows(kernels: Kernels):
    pool = torch.zeros(kv_pool_shape(1, 1, 2, 16, 16), dtype=kernels.dtype)
    nothing = torch.empty(0, 4, 16, dtype=kernels.dtype)
    for batch in (
        kernels.backend.plan_attention([], [], [], 16),
        kernels.backend.plan_attention([0, 0], [5, 16], [[0], [0]], 16),
    ):
        assert kernels.backend.paged_attention(nothing, batch, pool, 0, USUAL).shape == (0, 64)
