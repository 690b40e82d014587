"""Paged attention against a brute force in float64, and the bits of its rows under every arrangement of a step."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from kernels.ops import AttentionBatch, AttentionShape, get_backend, kv_pool_shape
from kernels.reference import attention, planning

BACKEND = get_backend(torch.device("cpu"), torch.float32, "reference")
USUAL = AttentionShape(4, 2, 16, 0.25)


@dataclass
class Case:
    """Sequences whose keys and values lie in a pool that is NaN elsewhere, and the queries of a step."""

    shape: AttentionShape
    batch: AttentionBatch
    pool: torch.Tensor
    query: torch.Tensor
    keys_values: list[torch.Tensor]
    """For each sequence [2, length, K, D]."""

    def compute(self, window: int | None = None) -> torch.Tensor:
        return BACKEND.paged_attention(self.query, self.batch, self.pool, 1, self.shape, window)


def make_case(
    new: list[int],
    lens: list[int],
    *,
    shape: AttentionShape = USUAL,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    content_seed: int = 0,
) -> Case:
    """Same content seed, same keys, values and queries of each (sequence, position), wherever the blocks lie."""
    num_blocks = [-(-length // block_size) for length in lens]
    places = list(range(sum(num_blocks) + 3))
    random.Random(seed).shuffle(places)
    tables = [[places.pop() for _ in range(count)] for count in num_blocks]
    pool = torch.full(
        kv_pool_shape(sum(num_blocks) + 3, 2, shape.num_kv_heads, block_size, shape.head_dim), float("nan"), dtype=dtype
    )
    keys_values: list[torch.Tensor] = []
    queries: list[torch.Tensor] = []
    for index, (count, length, table) in enumerate(zip(new, lens, tables, strict=True)):
        generator = torch.Generator().manual_seed(1000 * content_seed + index)
        stored = torch.randn(2, length, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)
        asked = torch.randn(length, shape.num_heads, shape.head_dim, generator=generator).to(dtype)
        pool[table, 1] = 0
        for position in range(length):
            block = table[position // block_size]
            pool[block, 1, :, :, position % block_size] = stored[:, position]
        keys_values.append(stored)
        queries.append(asked[length - count :])
    batch = BACKEND.plan_attention(new, lens, tables, block_size)
    return Case(shape, batch, pool, torch.cat(queries), keys_values)


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
            results.append((scores.softmax(0)[..., None] * value).sum(0).flatten())
            row += 1
    return torch.stack(results)


SHAPES = [
    AttentionShape(4, 4, 16, 0.25),
    AttentionShape(6, 2, 32, 0.2),
    AttentionShape(7, 1, 64, 0.125),
    AttentionShape(8, 1, 128, 0.1),
    AttentionShape(40, 1, 16, 0.25),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.num_heads}x{shape.num_kv_heads}")
def test_any_mix_of_pieces_and_decodes(shape: AttentionShape):
    case = make_case([1, 40, 1, 3, 0, 1], [300, 40, 1, 280, 9, 17], shape=shape)
    torch.testing.assert_close(case.compute().double(), brute_force(case), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_floats_are_rounded_once(dtype: torch.dtype):
    case = make_case([1, 20], [300, 30], dtype=dtype)
    got = case.compute()
    assert got.dtype == dtype
    differing = (got != brute_force(case).to(dtype)).double().mean()
    assert differing < 0.01, "float32's own error tips few roundings"


@pytest.mark.parametrize("window", [1, 2, 37, 255, 256, 257, 300, 10_000])
def test_a_sliding_window(window: int):
    case = make_case([1, 290, 60, 1], [300, 290, 560, 257])
    torch.testing.assert_close(case.compute(window).double(), brute_force(case, window), rtol=0, atol=2e-6)


def test_layers_with_and_without_a_window_share_a_batch():
    case = make_case([30, 1], [50, 70])
    for window in (None, 8, None, 20):
        torch.testing.assert_close(case.compute(window).double(), brute_force(case, window), rtol=0, atol=2e-6)
    assert len(case.batch.work_lists) == 3, "made once for each kind of layer"


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_every_block_size_gives_the_same_bits(block_size: int):
    expected = make_case([1, 40, 5], [300, 40, 261], block_size=16).compute()
    assert torch.equal(make_case([1, 40, 5], [300, 40, 261], block_size=block_size, seed=5).compute(), expected)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.num_heads}x{shape.num_kv_heads}")
@pytest.mark.parametrize("window", [None, 100])
def test_a_row_is_the_same_bits_in_a_piece_and_alone(shape: AttentionShape, window: int | None):
    whole = make_case([270], [270], shape=shape).compute(window)
    for start, end in ((0, 1), (0, 7), (100, 171), (255, 257), (269, 270)):
        got = make_case_of_prefix(start, end, shape).compute(window)
        assert torch.equal(got, whole[start:end]), (start, end)


def make_case_of_prefix(start: int, end: int, shape: AttentionShape) -> Case:
    """The 270 tokens' sequence, of which only [start, end) is computed and nothing lies past the end."""
    whole = make_case([270], [270], shape=shape)
    table = whole.batch.block_tables[0].tolist()
    batch = BACKEND.plan_attention([end - start], [end], [table], 16)
    return Case(shape, batch, whole.pool, whole.query[start:end], [whole.keys_values[0][:, :end]])


def test_order_and_mates_do_not_matter():
    new, lens = [1, 40, 1, 3, 1], [300, 40, 520, 280, 17]
    together = make_case(new, lens).compute().split(new)
    for index in range(len(new)):
        alone = alone_in_its_step(new, lens, index)
        assert torch.equal(alone, together[index])


def alone_in_its_step(new: list[int], lens: list[int], index: int) -> torch.Tensor:
    case = make_case(new, lens)
    batch = BACKEND.plan_attention([new[index]], [lens[index]], [case.batch.block_tables[index]], 16)
    first = sum(new[:index])
    query = case.query[first : first + new[index]]
    return BACKEND.paged_attention(query, batch, case.pool, 1, case.shape)


@pytest.mark.parametrize(("wave_bytes", "slab_bytes"), [(1, 1), (1 << 18, 1 << 17), (1 << 30, 1 << 30)])
def test_waves_and_slabs_are_free(monkeypatch: pytest.MonkeyPatch, wave_bytes: int, slab_bytes: int):
    new, lens = [1, 40, 1, 300], [900, 40, 10, 520]
    expected = make_case(new, lens).compute()
    monkeypatch.setattr(planning, "WAVE_BYTES", wave_bytes)
    monkeypatch.setattr(attention, "SLAB_BYTES", slab_bytes)
    assert torch.equal(make_case(new, lens).compute(), expected)


@pytest.mark.parametrize("multiple", [4, 8, 16])
def test_padding_of_tiles_is_free_here(multiple: int):
    case = make_case([1, 40], [300, 40])
    got = attention.paged_attention(case.query, case.batch, case.pool, 1, case.shape, None, multiple)
    assert torch.equal(got, case.compute())


def test_a_row_that_sees_nothing_of_a_split_of_its_tile():
    """The tile's first rows end in split 0, its last ones begin split 1: a masked split adds exact zeros."""
    case = make_case([12], [262])
    alone = [make_case_of_rows(case, position) for position in range(250, 262)]
    assert torch.equal(case.compute(), torch.cat(alone))


def make_case_of_rows(case: Case, position: int) -> torch.Tensor:
    batch = BACKEND.plan_attention([1], [position + 1], [case.batch.block_tables[0]], 16)
    query = case.query[position - 250 : position - 249]
    return BACKEND.paged_attention(query, batch, case.pool, 1, case.shape)


def test_what_lies_past_the_end_of_a_sequence_is_not_read():
    """Finite rubbish in the last block's tail, and NaN in every block past it, change no bit."""
    case = make_case([1, 20], [37, 20])
    expected = case.compute()
    tables = case.batch.block_tables
    case.pool[tables[0, 2], 1, :, :, 5:] = 1e30
    wider = [[*tables[0].tolist(), *tables[0].tolist()], [*tables[1, :2].tolist(), 0, 1, 2]]
    batch = BACKEND.plan_attention([1, 20], [37, 20], wider, 16)
    assert torch.equal(BACKEND.paged_attention(case.query, batch, case.pool, 1, case.shape), expected)


def test_very_large_scores_do_not_overflow():
    case = make_case([1, 9], [300, 9])
    case.query *= 1e4
    got = case.compute()
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), brute_force(case), rtol=1e-4, atol=1e-4)


def test_a_sequence_that_went_wrong_harms_itself_only():
    case = make_case([1, 3, 1], [300, 40, 17])
    expected = case.compute()
    case.pool[case.batch.block_tables[1, 0], 1, 0, 0, 0, 0] = float("nan")
    got = case.compute()
    assert torch.equal(got[[0, 4]], expected[[0, 4]])
    assert got[1:4].isnan().any()


def test_offsets_past_two_to_the_31_are_right():
    """A pool of 2.2e9 elements, of which only its last blocks are ever touched."""
    shape = AttentionShape(2, 1, 64, 0.125)
    block_elements = 2 * 2 * 1 * 256 * 64
    num_blocks = (2**31 + 2**26) // block_elements
    pool = torch.empty(kv_pool_shape(num_blocks, 2, 1, 256, 64), dtype=torch.bfloat16)
    assert pool.numel() > 2**31
    small = torch.full(kv_pool_shape(2, 2, 1, 256, 64), float("nan"), dtype=torch.bfloat16)
    qkv = torch.randn(260, 4 * 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    rotary = torch.stack([torch.ones(260, 64), torch.zeros(260, 64)], dim=1).bfloat16()
    results: list[torch.Tensor] = []
    for where, table in ((pool, [num_blocks - 1, num_blocks - 2]), (small, [1, 0])):
        batch = BACKEND.plan_attention([260], [260], [table], 256)
        query = BACKEND.rotary_and_cache(qkv.clone(), rotary, batch, where, 1, shape)
        results.append(BACKEND.paged_attention(query, batch, where, 1, shape))
    assert torch.equal(results[0], results[1])
    BACKEND.copy_blocks(pool, [(num_blocks - 1, num_blocks - 3)])
    assert torch.equal(pool[num_blocks - 3, 1], small[1, 1])


def test_no_rows_give_no_rows():
    batch = BACKEND.plan_attention([], [], [], 16)
    pool = torch.zeros(kv_pool_shape(1, 1, 2, 16, 16))
    assert BACKEND.paged_attention(torch.empty(0, 4, 16), batch, pool, 0, USUAL).shape == (
        0,
        64,
    )
