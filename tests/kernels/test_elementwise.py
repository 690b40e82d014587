"""The ops without products: right, in place where they say so, and the same bits wherever a row stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from kernels.ops import AttentionShape, get_backend, kv_pool_shape

if TYPE_CHECKING:
    from collections.abc import Callable

BACKEND = get_backend(torch.device("cpu"), torch.float32, "reference")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_where_transformers_does(dtype: torch.dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    hidden, residual, weight = random(7, 48, dtype=dtype), random(7, 48, dtype=dtype, seed=1), random(48, dtype=dtype)
    reference = LlamaRMSNorm(48, 1e-5).to(dtype)
    reference.weight.data = weight
    normed, total = BACKEND.rms_norm(hidden, weight, 1e-5)
    assert torch.equal(normed, reference(hidden))
    assert total is hidden
    normed, total = BACKEND.rms_norm(hidden, weight, 1e-5, residual)
    assert torch.equal(total, hidden + residual)
    assert torch.equal(normed, reference(hidden + residual))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_is_the_activation(dtype: torch.dtype):
    gate_up = torch.cat([random(5, 33, dtype=dtype) * 4, random(5, 33, dtype=dtype, seed=1)], dim=1)
    gate, up = gate_up.double().chunk(2, dim=1)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    expected = functional.silu(gate) * up
    torch.testing.assert_close(BACKEND.silu_and_mul(gate_up).double(), expected, rtol=tolerance, atol=tolerance)


def test_silu_of_large_values_is_finite():
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, 1.0]])
    assert BACKEND.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], 1)).tolist()[0][:5] == [0, 0, 0, 100, 1e4]


SAFE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: BACKEND.silu_and_mul(torch.cat([x, x], dim=1)),
    "rms_norm": lambda x: BACKEND.rms_norm(x, x.new_ones(x.shape[1]), 1e-6)[0],
    "exp": lambda x: torch.exp(-x.float()),
    "rsqrt": lambda x: torch.rsqrt(x.float().abs() + 1),
    "product and sum": lambda x: x * x[:1] + torch.roll(x, 3, -1) * x[:1],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SAFE)
def test_a_row_is_the_same_bits_wherever_it_stands(name: str, dtype: torch.dtype):
    """A canary for new versions of torch: kernels have tails, where another formula may run."""
    rows = random(67, 131, dtype=dtype) * 3
    # The last op multiplies by the first row: it is the same one in every part.
    expected = SAFE[name](rows)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        for count in (1, 2, 3, 5, 17, 66):
            for start in range(0, 67 - count, 13):
                part = torch.cat([rows[:1], rows[start : start + count]])
                assert torch.equal(SAFE[name](part)[1:], expected[start : start + count])


def test_torchs_own_silu_is_why_ours_is_spelled_out():
    """If this fails, torch has changed for the better."""
    rows = random(500, 131) * 3
    whole = functional.silu(rows)
    alone = torch.cat([functional.silu(row[None].clone()) for row in rows])
    assert not torch.equal(whole, alone)


def rotary_rows(positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    angles = torch.outer(positions.double(), 100.0 ** -(torch.arange(8, dtype=torch.float64) / 8))
    return torch.stack([torch.cat([angles.cos()] * 2, 1), torch.cat([-angles.sin(), angles.sin()], 1)], 1).to(dtype)


def rotate(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotates pairs (i, i + 8) as complex numbers."""
    angles = torch.outer(positions.double(), 100.0 ** -(torch.arange(8, dtype=torch.float64) / 8))
    pairs = torch.complex(heads[..., :8].double(), heads[..., 8:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotary_and_cache(dtype: torch.dtype, normed: bool):
    """Two sequences, one in the middle of a block: queries come back rotated, keys and values lie in their slots."""
    pool = torch.full(kv_pool_shape(6, 2, 2, 8, 16), float("nan"), dtype=dtype)
    batch = BACKEND.plan_attention([3, 11], [6, 11], [[4], [1, 5]], 8)
    qkv = random(14, (4 + 2 + 2) * 16, dtype=dtype)
    heads = qkv.view(14, 8, 16).double()
    weights = random(16, dtype=dtype, seed=1), random(16, dtype=dtype, seed=2)
    if normed:
        wide = functional.normalize(heads[:, :6], dim=-1, eps=0) * 4
        scales = torch.cat([weights[0].double().expand(4, 16), weights[1].double().expand(2, 16)])
        heads = torch.cat([wide * scales, heads[:, 6:]], dim=1)
    expected = torch.cat([rotate(heads[:, :6], batch.positions), heads[:, 6:]], dim=1)
    rotary = rotary_rows(batch.positions, dtype)
    query = BACKEND.rotary_and_cache(qkv, rotary, batch, pool, 1, SHAPE, (*weights, 0.0) if normed else None)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}[dtype]
    torch.testing.assert_close(query.double(), expected[:, :4], rtol=tolerance, atol=tolerance)
    written = pool[batch.slot_mapping // 8, 1, :, :, batch.slot_mapping % 8].flatten(1, 2)
    torch.testing.assert_close(written.double(), expected[:, 4:], rtol=tolerance, atol=tolerance)
    assert pool[:, 0].isnan().all(), "another layer's bytes"
    assert pool[[0, 2, 3], 1].isnan().all(), "other blocks"
    assert pool[4, 1, :, :, :3].isnan().all(), "slots before the first new token"
    assert pool[4, 1, :, :, 6:].isnan().all(), "a block that was not started in this step keeps its bytes"
    assert not pool[5, 1, :, :, 3:].any(), "a block started in this step is cleared past its last token"


def test_embedding_takes_rows():
    table = random(10, 6, dtype=torch.bfloat16)
    assert torch.equal(BACKEND.embedding(torch.tensor([3, 3, 9]), table), table[[3, 3, 9]])
