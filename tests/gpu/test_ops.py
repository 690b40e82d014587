"""Every op on the device against the same op on the processor in float32, over ragged shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from blockyard_kernels.ops import Backend, kv_pool_shape
from blockyard_kernels.sampling import Choices
from blockyard_kernels.select import get_backend
from blockyard_kernels.shapes import AttentionShape, LinearSpec
from worker_service.models.random_weights import random_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    Move = Callable[[Tensor], Tensor]
    Op = Callable[[Move, Backend], Tensor]

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
TRUTH = get_backend(CPU, torch.float32, "reference")
# Of values about as large as 1: the last places of each dtype, with sums in another order.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
SHAPE = AttentionShape(6, 2, 32, 32**-0.5)
ROWS = (1, 2, 17, 130)


def values(name: str, *sizes: int, spread: float = 1.0) -> Tensor:
    """Numbers that every dtype holds, so that rounding the inputs is no part of an error."""
    return random_tensor(name, sizes, spread, torch.bfloat16, CPU).half().float()


def check(dtype: torch.dtype, device: torch.device, op: Op) -> None:
    """Runs an op twice: `op` gets what moves a tensor to where it computes, and the backend there."""
    expected = op(lambda tensor: tensor.clone(), TRUTH)
    got = op(lambda tensor: tensor.to(device, dtype, copy=True), get_backend(device, dtype, "reference"))
    torch.testing.assert_close(got.float().cpu(), expected.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("gated", [False, True])
def test_products_are_those_of_the_processor(rows: int, gated: bool, dtype: torch.dtype, device: torch.device):
    weight, bias, hidden = values("w", 96, 80, spread=0.1), values("b", 96), values("h", rows, 80)

    def op(move: Move, backend: Backend) -> Tensor:
        return backend.linear(move(hidden), backend.pack_linear([move(weight)], move(bias), LinearSpec(gated=gated)))

    check(dtype, device, op)


@pytest.mark.parametrize("rows", ROWS)
def test_norms_are_those_of_the_processor(rows: int, dtype: torch.dtype, device: torch.device):
    hidden, residual, weight = values("h", rows, 96), values("r", rows, 96), values("w", 96)
    for index in (0, 1):

        def op(move: Move, backend: Backend, index: int = index) -> Tensor:
            return backend.rms_norm(move(hidden), move(weight), 1e-5, move(residual))[index]

        check(dtype, device, op)


@pytest.mark.parametrize("rows", ROWS)
def test_activations_and_table_rows_are_those_of_the_processor(rows: int, dtype: torch.dtype, device: torch.device):
    gates, ids = values("g", rows, 160), torch.arange(rows) * 7 % 50
    check(dtype, device, lambda move, backend: backend.silu_and_mul(move(gates)))
    table = values("t", 50, 33)
    check(dtype, device, lambda move, backend: backend.embedding(ids.to(backend.device), move(table)))


@pytest.mark.parametrize(("window", "block_size"), [(None, 16), (20, 32)])
@pytest.mark.parametrize(
    ("num_new", "lengths"),
    [([1], [1]), ([1, 1, 1], [5, 300, 17]), ([40], [40]), ([3, 1, 33, 0], [300, 257, 33, 9]), ([1] * 9, [256] * 9)],
)
def test_attention_is_that_of_the_processor(
    num_new: list[int],
    lengths: list[int],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
):
    counts = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    angles = torch.linspace(0, 3, 1000)[:, None] * torch.linspace(1, 0.1, SHAPE.head_dim // 2)
    cosines, sines = angles.cos(), angles.sin()
    rotary_table = torch.stack([torch.cat([cosines] * 2, 1), torch.cat([-sines, sines], 1)], 1)

    def op(move: Move, backend: Backend) -> Tensor:
        pool_shape = kv_pool_shape(sum(counts) + 2, 2, SHAPE.num_kv_heads, block_size, SHAPE.head_dim)
        pool = move(torch.full(pool_shape, float("nan")))
        # All earlier tokens first, then the step's own.
        for new, total in ((_less(lengths, num_new), _less(lengths, num_new)), (num_new, lengths)):
            batch = backend.plan_attention(new, total, tables, block_size, window)
            rows = sum(new)
            parts = [values(f"{index} {sum(total)}", count, width) for index, count in enumerate(new)]
            qkv = move(torch.cat(parts))
            rotary = move(rotary_table[batch.positions.cpu()].contiguous())
            query = backend.rotary_and_cache(qkv, rotary, batch, pool, 1, SHAPE)
            assert query.shape == (rows, SHAPE.num_heads, SHAPE.head_dim)
        return backend.paged_attention(query, batch, pool, 1, SHAPE, window)

    check(dtype, device, op)


def _less(lengths: list[int], num_new: list[int]) -> list[int]:
    return [length - new for length, new in zip(lengths, num_new, strict=True)]


def test_blocks_move_bit_for_bit(dtype: torch.dtype, device: torch.device, backend: Backend):
    shape = kv_pool_shape(12, 2, 2, 16, 32)
    pool = values("pool", *shape).to(device, dtype)
    host = torch.full(shape, float("nan"), dtype=dtype)
    before = pool.cpu().clone()
    backend.swap_blocks(pool, host, [(3, 0), (4, 1), (9, 5)])
    assert torch.equal(host[[0, 1, 5]], before[[3, 4, 9]])
    backend.swap_blocks(host, pool, [(0, 7), (5, 2)])
    assert torch.equal(pool.cpu()[[7, 2]], before[[3, 9]])
    backend.copy_blocks(pool, [(3, 4), (4, 3)])
    assert torch.equal(pool.cpu()[[4, 3]], before[[3, 4]]), "every source is read first"


def test_a_block_past_the_reach_of_32_bits_is_like_any_other(device: torch.device):
    """On a GPU the pool is larger than 2**31 elements; elsewhere a small one shows that the test is right."""
    num_blocks = 2**31 // (2 * 8 * 16 * 128) + 9 if device.type == "cuda" else 9
    backend = get_backend(device, torch.bfloat16, "reference")
    shape = AttentionShape(8, 8, 128, 128**-0.5)
    pool = torch.empty(kv_pool_shape(num_blocks, 1, 8, 16, 128), dtype=torch.bfloat16, device=device)
    outputs: list[Tensor] = []
    for table in ([1, 2], [num_blocks - 1, num_blocks - 2]):
        batch = backend.plan_attention([20], [20], [table], 16)
        qkv = values("qkv", 20, 24 * 128).to(device, torch.bfloat16)
        rotary = torch.cat([torch.ones(20, 1, 128), torch.zeros(20, 1, 128)], 1).to(device, torch.bfloat16)
        query = backend.rotary_and_cache(qkv, rotary, batch, pool, 0, shape)
        outputs.append(backend.paged_attention(query, batch, pool, 0, shape))
    assert torch.equal(*outputs)


def make_choices(rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Choices:
    columns = (np.arange(rows, dtype=np.int64) * factor for factor in (12345, 3, 1))
    filters = np.full(rows, top_p, np.float32), np.full(rows, min_p, np.float32)
    return Choices(np.full(rows, temperature, np.float32), np.full(rows, top_k, np.int64), *filters, *columns)


@pytest.mark.parametrize("vocab_size", [33, 20_000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 20, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 50, 0.8, 0.01)],
)
def test_tokens_are_chosen_alike(
    vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float, backend: Backend
):
    """A draw may differ where two candidates lie within the last places of a logarithm: in few of many rows."""
    logits = values("logits", 24, vocab_size, spread=3.0)
    choices = make_choices(24, temperature, top_k, top_p, min_p)
    expected = TRUTH.sampling.choose(logits, choices)
    got = backend.sampling.choose(logits.to(backend.device), choices)
    assert (got == expected).sum() >= (24 if temperature == 0 else 22)


def test_the_same_is_told_of_tokens(backend: Backend):
    logits, rows = values("logits", 9, 5000, spread=3.0), np.array([0, 3, 8])
    for token_ids in (None, np.array([17, 4999, 0])):
        expected = TRUTH.sampling.token_logprobs(logits, rows, token_ids, 5)
        got = backend.sampling.token_logprobs(logits.to(backend.device), rows, token_ids, 5)
        assert got.token_ids.tolist() == expected.token_ids.tolist()
        assert got.ranks.tolist() == expected.ranks.tolist()
        np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=0, atol=2e-5)


def test_rows_that_are_not_finite_are_found(backend: Backend):
    logits = values("logits", 5, 300)
    logits[1, 7], logits[3, 299] = float("nan"), float("inf")
    assert backend.sampling.finite_rows(logits.to(backend.device)).tolist() == [True, False, True, False, True]


def test_random_weights_are_those_of_the_processor(dtype: torch.dtype, device: torch.device):
    made = random_tensor("name", (130, 77), 0.02, dtype, device)
    assert torch.equal(made.cpu(), random_tensor("name", (130, 77), 0.02, dtype, CPU))
