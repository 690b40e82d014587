"""Attention of rows that see those behind them too: to all, and to a window on both sides."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockyard_kernels.ops import kv_pool_shape
from blockyard_kernels.shapes import AttentionShape
from tests.kit.kernels.backends import COMPILED, REFERENCES, Kernels, in_dtype, store

SHAPE = AttentionShape(4, 2, 24, 0.3, is_causal=False)
LENGTHS = (300, 1, 40)
STARTS = (0, 25, 30)
BLOCK_SIZE = 16
KERNELS = in_dtype([*REFERENCES[:1], *COMPILED], torch.float32, torch.bfloat16)


class Case:
    """Sequences of random numbers, and their keys and values in a pool of one layer."""

    def __init__(self, kernels: Kernels, shape: AttentionShape = SHAPE) -> None:
        generator = torch.Generator().manual_seed(1)
        self.backend, self.shape = kernels.backend, shape
        sizes = [(length, shape.num_heads, shape.head_dim) for length in LENGTHS]
        self.queries = [torch.randn(size, generator=generator).to(kernels.dtype) for size in sizes]
        heads = (shape.num_kv_heads, shape.head_dim)
        self.pairs = [torch.randn(2, length, *heads, generator=generator).to(kernels.dtype) for length in LENGTHS]
        starts = (0, 25, 30)
        self.tables = [
            [start + i for i in range(-(-n // BLOCK_SIZE))] for start, n in zip(starts, LENGTHS, strict=True)
        ]
        pool_shape = kv_pool_shape(34, 1, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        self.pool = torch.full(pool_shape, float("nan"), dtype=kernels.dtype)
        store(self.backend, self.pool, 0, self.tables, self.pairs)

    def attend(self, *chosen: int, window: int | None = None) -> torch.Tensor:
        """Computes whole sequences together."""
        lengths = [LENGTHS[index] for index in chosen]
        tables = [self.tables[index] for index in chosen]
        batch = self.backend.plan_attention(lengths, lengths, tables, BLOCK_SIZE, window)
        query = torch.cat([self.queries[index] for index in chosen])
        return self.backend.paged_attention(query, batch, self.pool, 0, self.shape, window)

    def expected(self, index: int, window: int | None) -> torch.Tensor:
        """The same of one sequence, in float64."""
        query, (key, value) = self.queries[index].double(), self.pairs[index].double()
        group = self.shape.num_heads // self.shape.num_kv_heads
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.shape.scale
        places = torch.arange(LENGTHS[index])
        if window is not None:
            scores.masked_fill_((places - places[:, None]).abs() >= window, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


@pytest.mark.parametrize("window", [None, 7, 70])
@pytest.mark.parametrize("kernels", KERNELS, ids=str)
def test_rows_see_what_is_behind_them(kernels: Kernels, window: int | None) -> None:
    case = Case(kernels)
    together = case.attend(0, 1, 2, window=window).split(LENGTHS)
    tolerance = 2e-5 if kernels.dtype is torch.float32 else 2e-2
    for index, rows in enumerate(together):
        assert (rows.double() - case.expected(index, window)).abs().max() <= tolerance
        if kernels.is_exact(replace(SHAPE, is_causal=True)):
            assert torch.equal(case.attend(index, window=window), rows)


@pytest.mark.parametrize("kernels", KERNELS, ids=str)
def test_rows_that_see_only_what_is_before_them_differ(kernels: Kernels) -> None:
    case = Case(kernels, replace(SHAPE, is_causal=True))
    rows = case.attend(0)
    assert (rows.double() - case.expected(0, None)).abs().max() > 0.05
    # The last row sees all either way.
    assert (rows[-1].double() - case.expected(0, None)[-1]).abs().max() <= 2e-2
