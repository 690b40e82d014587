"""The ops without products: right, in place where they say so, and the same bits wherever a row stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

from blockyard_kernels.lora import VirtualRows
from blockyard_kernels.ops import kv_pool_shape
from blockyard_kernels.shapes import Activation, AttentionShape, LinearSpec, QueryKeyNorms
from tests.kit.kernels.backends import COMPILED, KERNELS, REFERENCE, REFERENCES, Kernels, read_layer
from tests.kit.kernels.random_tensors import random

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
# Less than a vector, whole ones of both lengths, and tails.
WIDTHS = [1, 2, 8, 15, 16, 48, 131]
for_all = pytest.mark.parametrize("kernels", KERNELS, ids=str)
for_references = pytest.mark.parametrize("kernels", REFERENCES, ids=str)
for_compiled = pytest.mark.parametrize("kernels", COMPILED, ids=str)


def assert_as_good(kernels: Kernels, got: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> None:
    """Errs no more than the reference does in the same dtype, give or take what float32 sums in another order."""
    assert got.dtype == kernels.dtype
    floor = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    error, their_error = (got.double() - exact).abs(), (theirs.double() - exact).abs()
    assert error.mean() <= 1.01 * their_error.mean() + floor
    assert error.max() <= 1.5 * their_error.max() + floor


@for_references
def test_rms_norm_rounds_where_transformers_does(kernels: Kernels):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    dtype = kernels.dtype
    hidden, residual, weight = random(7, 48, dtype=dtype), random(7, 48, dtype=dtype, seed=1), random(48, dtype=dtype)
    reference = LlamaRMSNorm(48, 1e-5).to(dtype)
    reference.weight.data = weight
    normed, total = kernels.backend.rms_norm(hidden, weight, 1e-5)
    assert torch.equal(normed, reference(hidden))
    assert total is hidden
    normed, total = kernels.backend.rms_norm(hidden, weight, 1e-5, residual)
    assert torch.equal(total, hidden + residual)
    assert torch.equal(normed, reference(hidden + residual))


@for_compiled
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_is_as_good_as_the_reference(width: int, kernels: Kernels):
    reference = Kernels(REFERENCE, kernels.dtype).backend
    hidden, residual = random(9, width, dtype=kernels.dtype), random(9, width, dtype=kernels.dtype, seed=1)
    weight = random(width, dtype=kernels.dtype, seed=2)
    for added in (None, residual):
        normed, total = kernels.backend.rms_norm(hidden, weight, 1e-5, added)
        theirs, their_total = reference.rms_norm(hidden, weight, 1e-5, added)
        assert torch.equal(total, their_total), "one sum, one rounding"
        wide = total.double()
        exact = wide * (wide.pow(2).mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()
        assert_as_good(kernels, normed, theirs, exact)


@for_all
@pytest.mark.parametrize("width", [1, 15, 48, 131])
def test_norms_without_weights_and_with_wide_ones(width: int, kernels: Kernels):
    """A weight in float32 multiplies before the one rounding."""
    hidden, residual = random(5, width, dtype=kernels.dtype), random(5, width, dtype=kernels.dtype, seed=1)
    tolerance = max(torch.finfo(kernels.dtype).eps, 2e-6)
    for weight in (None, random(width, seed=2)):
        normed, total = kernels.backend.rms_norm(hidden, weight, 1e-5, residual, 0.22)
        assert torch.equal(total, (hidden.float() * 0.22 + residual.float()).to(kernels.dtype))
        wide = total.double()
        exact = wide * (wide.pow(2).mean(1, keepdim=True) + 1e-5).rsqrt() * (1 if weight is None else weight.double())
        torch.testing.assert_close(normed.double(), exact, rtol=tolerance, atol=1e-7)


@for_all
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(width: int, kernels: Kernels):
    hidden, residual = random(5, width, dtype=kernels.dtype), random(5, width, dtype=kernels.dtype, seed=1)
    weight, bias = random(width, seed=2), random(width, seed=3)
    tolerance = max(torch.finfo(kernels.dtype).eps, 2e-5)
    for given in ((weight, bias), (weight, None), (None, None)):
        for added, scale in ((None, 1.0), (residual, 1.0), (residual, 0.22)):
            normed, total = kernels.backend.layer_norm(hidden, *given, 1e-3, added, scale)
            assert normed.dtype == kernels.dtype
            if added is not None:
                assert torch.equal(total, (hidden.float() * scale + added.float()).to(kernels.dtype))
            doubles = [None if each is None else each.double() for each in given]
            exact = functional.layer_norm((hidden if added is None else total).double(), (width,), *doubles, 1e-3)
            torch.testing.assert_close(normed.double(), exact, rtol=tolerance, atol=tolerance)


@for_all
def test_the_variance_of_rows_far_from_zero_is_that_of_what_is_centred(kernels: Kernels):
    """The mean of squares less the square of the mean would have lost most of it."""
    hidden = random(5, 48, dtype=kernels.dtype) * 4 + 1000
    got, _ = kernels.backend.layer_norm(hidden, None, None, 1e-5)
    exact = functional.layer_norm(hidden.double(), (48,), eps=1e-5)
    tolerance = max(torch.finfo(kernels.dtype).eps, 1e-4)
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)


@for_all
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_sums_of_rows_and_of_normed_rows(scale: float, kernels: Kernels):
    backend, dtype = kernels.backend, kernels.dtype
    hidden, residual = random(5, 33, dtype=dtype), random(5, 33, dtype=dtype, seed=1)
    before = hidden.clone(), residual.clone()
    assert torch.equal(backend.add(hidden, residual, scale), (hidden.float() * scale + residual.float()).to(dtype))
    for weight in (None, random(33, dtype=dtype, seed=2), random(33, seed=2)):
        normed, _ = backend.rms_norm(hidden, weight, 1e-5)
        expected = (normed.float() * scale + residual.float()).to(dtype)
        assert torch.equal(backend.add_normed(hidden, weight, 1e-5, residual, scale), expected)
    assert torch.equal(hidden, before[0])
    assert torch.equal(residual, before[1])


@for_all
def test_rms_norm_leaves_its_inputs(kernels: Kernels):
    hidden, residual = random(5, 33, dtype=kernels.dtype), random(5, 33, dtype=kernels.dtype, seed=1)
    before = hidden.clone(), residual.clone()
    normed, total = kernels.backend.rms_norm(hidden, random(33, dtype=kernels.dtype), 1e-5, residual)
    assert torch.equal(hidden, before[0])
    assert torch.equal(residual, before[1])
    assert len({each.data_ptr() for each in (hidden, residual, normed, total)}) == 4


@for_all
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_is_the_activation(width: int, kernels: Kernels):
    gate_up = torch.cat([random(5, width, dtype=kernels.dtype) * 4, random(5, width, dtype=kernels.dtype, seed=1)], 1)
    gate, up = gate_up.double().chunk(2, dim=1)
    theirs = Kernels(REFERENCE, kernels.dtype).backend.silu_and_mul(gate_up)
    assert_as_good(kernels, kernels.backend.silu_and_mul(gate_up), theirs, functional.silu(gate) * up)
    tolerance = 2 * torch.finfo(kernels.dtype).eps
    torch.testing.assert_close(theirs.double(), functional.silu(gate) * up, rtol=tolerance, atol=tolerance)


@for_all
def test_silu_of_large_values_is_finite(kernels: Kernels):
    large = 1e4 if kernels.dtype != torch.bfloat16 else 9984.0
    gate = torch.tensor([[-large, -100.0, 0.0, 100.0, large, 1.0]], dtype=kernels.dtype)
    got = kernels.backend.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], 1))
    assert got.tolist()[0][2:5] == [0, 100, large]
    assert (got[0, :2].double().abs() < 1e-30).all(), "the exponential may end below infinity"


@for_all
def test_what_is_no_number_stays_none(kernels: Kernels):
    gate = torch.tensor([[float("nan"), 1.0, float("inf")]], dtype=kernels.dtype)
    got = kernels.backend.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], 1))
    assert got.isnan().tolist() == [[True, False, False]]
    assert got.isinf().tolist() == [[False, False, True]]
    rows = random(3, 20, dtype=kernels.dtype)
    rows[1, 19] = float("nan")
    normed, _ = kernels.backend.rms_norm(rows, torch.ones(20, dtype=kernels.dtype), 1e-5)
    assert normed.isnan().all(dim=1).tolist() == [False, True, False]
    assert normed[[0, 2]].isfinite().all()


SAFE: dict[str, Callable[[Kernels, torch.Tensor], torch.Tensor]] = {
    "silu": lambda kernels, x: kernels.backend.silu_and_mul(torch.cat([x, x], dim=1)),
    "rms_norm": lambda kernels, x: kernels.backend.rms_norm(x, x.new_ones(x.shape[1]), 1e-6)[0],
    "wide rms_norm": lambda kernels, x: kernels.backend.rms_norm(x, torch.ones(x.shape[1]), 1e-6, x.flip(1), 0.3)[0],
    "layer_norm": lambda kernels, x: kernels.backend.layer_norm(x, None, torch.ones(x.shape[1]), 1e-6)[0],
    "add_normed": lambda kernels, x: kernels.backend.add_normed(x, None, 1e-6, x.flip(1), 0.3),
    "added rms_norm": lambda kernels, x: kernels.backend.rms_norm(x, x.new_ones(x.shape[1]), 1e-6, x.flip(1))[0],
}
# Functions of torch that the reference is made of.
TORCHS: dict[str, Callable[[Kernels, torch.Tensor], torch.Tensor]] = {
    "exp": lambda _, x: torch.exp(-x.float()),
    "rsqrt": lambda _, x: torch.rsqrt(x.float().abs() + 1),
    "product and sum": lambda _, x: x * x[:1] + torch.roll(x, 3, -1) * x[:1],
}
PLACES = [(kernels, name) for kernels in KERNELS for name in SAFE]
PLACES += [(kernels, name) for kernels in REFERENCES for name in TORCHS]


@pytest.mark.parametrize(("kernels", "name"), PLACES, ids=str)
def test_a_row_is_the_same_bits_wherever_it_stands(kernels: Kernels, name: str):
    """A canary for new versions of torch: kernels have tails, where another formula may run."""
    op = (SAFE | TORCHS)[name]
    rows = random(67, 131, dtype=kernels.dtype) * 3
    # The last op multiplies by the first row: it is the same one in every part.
    expected = op(kernels, rows)
    for num_threads in (3, 1):
        kernels.backend.set_num_threads(num_threads)
        for count in (1, 2, 3, 5, 17, 66):
            for start in range(0, 67 - count, 13):
                part = torch.cat([rows[:1], rows[start : start + count]])
                assert torch.equal(op(kernels, part)[1:], expected[start : start + count])


@for_compiled
def test_an_activation_in_an_epilogue_is_the_activation_apart(kernels: Kernels):
    """The gated product is silu of unrounded gates: nearer to the truth than product, rounding, activation."""
    weight, rows = random(66, 40, dtype=kernels.dtype) * 0.2, random(7, 40, dtype=kernels.dtype, seed=1)
    fused = kernels.backend.linear(rows, kernels.backend.pack_linear(weight, spec=LinearSpec(gated=True)))
    apart = kernels.backend.silu_and_mul(kernels.backend.linear(rows, kernels.backend.pack_linear(weight)))
    gate, up = (rows.double() @ weight.double().T).chunk(2, dim=1)
    assert_as_good(kernels, fused, apart, functional.silu(gate) * up)


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: functional.gelu,
    Activation.RELU: functional.relu,
    Activation.RELU2: lambda x: functional.relu(x).square(),
    Activation.TANH: torch.tanh,
}


@for_all
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", list(Activation))
def test_every_activation_of_numbers_of_every_size(activation: Activation, gated: bool, kernels: Kernels):
    """The product is by 1, so that it is known which numbers are activated."""
    # Of which float16 holds the cube, too.
    large = 30.0 if kernels.dtype == torch.float16 else 1e4
    rows = torch.cat([torch.linspace(-12, 12, 999), torch.tensor([-large, large, -1e-3, 1e-6, 0.0])])
    rows = rows.to(kernels.dtype)[:, None].expand(-1, 2).contiguous()
    weight = torch.tensor([[1.0, 0.0]], dtype=kernels.dtype).expand(4, 2)
    got = kernels.backend.linear(
        rows, kernels.backend.pack_linear(weight, spec=LinearSpec(gated=gated, activation=activation))
    )
    exact = ACTIVATIONS[activation](rows[:, :1].double()) * (rows[:, :1].double() if gated else 1)
    assert got.dtype == kernels.dtype
    relative = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}[kernels.dtype]
    torch.testing.assert_close(got.double(), exact.expand_as(got), rtol=relative, atol=relative)
    if not kernels.is_reference:
        # Of large negative numbers torch's sum of 1 and a tangent keeps nothing, and ours all.
        near = (exact.abs() > 1e-8).flatten()
        rest = max(4 * relative, 3e-4 if activation is Activation.GELU_ERF else 0.0)
        torch.testing.assert_close(got[near].double(), exact.expand_as(got)[near], rtol=rest, atol=0)


@for_compiled
@pytest.mark.parametrize("activation", list(Activation))
def test_what_is_no_number_is_not_activated(activation: Activation, kernels: Kernels):
    rows = torch.tensor([[float("nan"), 0.0], [1.0, 0.0]], dtype=kernels.dtype)
    packed = kernels.backend.pack_linear(torch.eye(2, dtype=kernels.dtype)[:1], spec=LinearSpec(activation=activation))
    assert kernels.backend.linear(rows, packed).isnan().flatten().tolist() == [True, False]


def test_torchs_own_silu_is_why_ours_is_spelled_out():
    """If this fails, torch has changed for the better."""
    rows = random(500, 131) * 3
    whole = functional.silu(rows)
    alone = torch.cat([functional.silu(row[None].clone()) for row in rows])
    assert not torch.equal(whole, alone)


def rotary_rows(positions: torch.Tensor, dtype: torch.dtype, half: int = 8) -> torch.Tensor:
    angles = torch.outer(positions.double(), 100.0 ** -(torch.arange(half, dtype=torch.float64) / half))
    return torch.stack([torch.cat([angles.cos()] * 2, 1), torch.cat([-angles.sin(), angles.sin()], 1)], 1).to(dtype)


def rotate(heads: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotates pairs (i, i + D / 2) in float64, by angles as they were rounded."""
    cosines, sines = rotary.double()[:, None].unbind(2)
    return heads.double() * cosines + heads.double().roll(heads.shape[-1] // 2, -1) * sines


@for_all
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("head_dim", [8, 16, 20, 64, 80, 96, 128])
def test_rotary_and_cache(head_dim: int, normed: bool, kernels: Kernels):
    """Two sequences, one in the middle of a block: queries come back rotated, keys and values lie in their slots."""
    backend, dtype = kernels.backend, kernels.dtype
    shape = AttentionShape(4, 2, head_dim, 0.25)
    pool = torch.full(kv_pool_shape(6, 2, 2, 8, head_dim), float("nan"), dtype=dtype)
    batch = backend.plan_attention([3, 0, 11], [6, 8, 11], [[4], [0], [1, 5]], 8)
    qkv = random(14, 8 * head_dim, dtype=dtype)
    heads = qkv.view(14, 8, head_dim).double()
    weights = random(head_dim, dtype=dtype, seed=1), random(head_dim, dtype=dtype, seed=2)
    if normed:
        wide = functional.normalize(heads[:, :6], dim=-1, eps=0) * head_dim**0.5
        scales = torch.cat([weights[0].double().expand(4, head_dim), weights[1].double().expand(2, head_dim)])
        heads = torch.cat([wide * scales, heads[:, 6:]], dim=1)
    rotary = rotary_rows(batch.positions, dtype, head_dim // 2)
    expected = torch.cat([rotate(heads[:, :6], rotary), heads[:, 6:]], dim=1)
    query = backend.rotary_and_cache(
        qkv, rotary, batch, pool, 1, shape, QueryKeyNorms(*weights, 0.0) if normed else None
    )
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}[dtype]
    torch.testing.assert_close(query.double(), expected[:, :4], rtol=tolerance, atol=tolerance)
    layer = read_layer(kernels, pool, 1)
    written = layer[batch.slot_mapping // 8, :, :, batch.slot_mapping % 8].flatten(1, 2)
    torch.testing.assert_close(written.double(), expected[:, 4:], rtol=tolerance, atol=tolerance)
    assert pool[:, 0].isnan().all(), "another layer's bytes"
    assert pool[[0, 2, 3], 1].isnan().all(), "other blocks"
    assert layer[4, :, :, :3].isnan().all(), "slots before the first new token"
    assert layer[4, :, :, 6:].isnan().all(), "a block that was not started in this step keeps its bytes"
    assert not layer[5, :, :, 3:].any(), "a block started in this step is cleared past its last token"


@for_all
@pytest.mark.parametrize("norm", ["none", "of heads", "of rows", "wide", "after"])
@pytest.mark.parametrize(("head_dim", "size"), [(16, 0), (20, 8), (80, 32), (96, 96), (128, 64)])
def test_a_part_of_a_head_is_rotated(head_dim: int, size: int, norm: str, kernels: Kernels):
    """The rest passes, normed as the others are; a size of 0 is no table. "after": queries have their own angles."""
    backend, dtype, shape = kernels.backend, kernels.dtype, AttentionShape(3, 2, head_dim, 0.25)
    qkv = random(9, 7 * head_dim, dtype=dtype)
    heads, weights, numbers = qkv.view(9, 7, head_dim).double(), None, list[torch.Tensor]()
    parts = [heads[:, :3], heads[:, 3:5]]
    if norm != "none":
        widths = (3 * head_dim, 2 * head_dim) if norm == "of rows" else (head_dim, head_dim)
        numbers = [random(width, dtype=torch.float32 if norm == "wide" else dtype, seed=width) for width in widths]
        weights = QueryKeyNorms(numbers[0], numbers[1], 1e-5, norm == "of rows", norm == "after")

    def normalise() -> None:
        for index, (part, weight) in enumerate(zip(parts, numbers, strict=True)):
            rows = part.flatten(1) if norm == "of rows" else part
            normed = rows * (rows.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
            parts[index] = normed.view_as(part)

    if norm not in ("none", "after"):
        normalise()
    rotary = rotary_rows(torch.arange(9), dtype, size // 2) if size else None
    if rotary is not None:
        angles = [rotary_rows(torch.arange(4, 13), dtype, size // 2) if norm == "after" else rotary, rotary]
        for index, (part, of_part) in enumerate(zip(parts, angles, strict=True)):
            parts[index] = torch.cat([rotate(part[..., :size], of_part), part[..., size:]], 2)
        rotary = torch.cat([rotary, angles[0]], 1) if norm == "after" else rotary
    if norm == "after":
        normalise()
    pool = torch.full(kv_pool_shape(2, 1, 2, 16, head_dim), float("nan"), dtype=dtype)
    batch = backend.plan_attention([9], [9], [[1]], 16)
    query = backend.rotary_and_cache(qkv, rotary, batch, pool, 0, shape, weights)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}[dtype]
    torch.testing.assert_close(query.double(), parts[0], rtol=tolerance, atol=tolerance)
    written = read_layer(kernels, pool, 0)[1, :, :, :9].permute(2, 0, 1, 3).double()
    torch.testing.assert_close(written[:, 0], parts[1], rtol=tolerance, atol=tolerance)
    assert torch.equal(written[:, 1], heads[:, 5:])


@for_compiled
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_rotation_is_as_good_as_the_reference(normed: bool, kernels: Kernels):
    positions = torch.arange(40)
    qkv, rotary = random(40, 8 * 96, dtype=kernels.dtype), rotary_rows(positions, kernels.dtype, 48)
    weights = random(96, dtype=kernels.dtype, seed=1), random(96, dtype=kernels.dtype, seed=2)
    heads = qkv.view(40, 8, 96)[:, :4].double()
    if normed:
        heads = functional.normalize(heads, dim=-1, eps=0) * 96**0.5 * weights[0].double()
    queries: list[torch.Tensor] = []
    for each in (kernels, Kernels(REFERENCE, kernels.dtype)):
        pool = torch.empty(kv_pool_shape(3, 1, 2, 16, 96), dtype=kernels.dtype)
        batch = each.backend.plan_attention([40], [40], [[2, 0, 1]], 16)
        shape = AttentionShape(4, 2, 96, 0.1)
        norms = QueryKeyNorms(*weights, 0.0) if normed else None
        queries.append(each.backend.rotary_and_cache(qkv.clone(), rotary, batch, pool, 0, shape, norms).clone())
    assert_as_good(kernels, queries[0], queries[1], rotate(heads, rotary))


@for_all
@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
def test_a_pool_is_the_same_bytes_however_its_tokens_came(block_size: int, kernels: Kernels):
    """In one piece, one by one, in pieces that end inside and at the end of blocks."""
    backend, length = kernels.backend, 77
    qkv, rotary = random(length, 8 * 16, dtype=kernels.dtype), rotary_rows(torch.arange(length), kernels.dtype)
    table = list(reversed(range(-(-length // block_size))))
    pools: list[torch.Tensor] = []
    for pieces in ([length], [1] * length, [5, 8, 3, 16, 32, 13], [16, 16, 32, 13]):
        pool, start = torch.zeros(kv_pool_shape(len(table), 2, 2, block_size, 16), dtype=kernels.dtype), 0
        for count in pieces:
            batch = backend.plan_attention([count], [start + count], [table], block_size)
            rows = slice(start, start + count)
            backend.rotary_and_cache(qkv[rows].clone(), rotary[rows], batch, pool, 1, SHAPE)
            start += count
        pools.append(pool)
    assert all(torch.equal(pool, pools[0]) for pool in pools)


@for_all
def test_embedding_takes_rows(kernels: Kernels):
    table = random(10, 7, dtype=kernels.dtype)
    assert torch.equal(kernels.backend.embedding(torch.tensor([3, 3, 9, 0]), table), table[[3, 3, 9, 0]])
    assert kernels.backend.embedding(torch.tensor([], dtype=torch.int64), table).shape == (0, 7)


@for_all
def test_embedding_takes_virtual_rows_for_the_ids_behind_the_table(kernels: Kernels):
    table, rows = random(10, 7, dtype=kernels.dtype), random(4, 7, dtype=kernels.dtype, seed=1)
    ids = torch.tensor([3, 1003, 9, 1000, 0])
    found = kernels.backend.embedding(ids, table, virtual=VirtualRows(1000, rows))
    assert torch.equal(found, torch.stack([table[3], rows[3], table[9], rows[0], table[0]]))


@for_all
def test_embedding_scales_rows_and_rounds_them_once(kernels: Kernels):
    table, indices = random(10, 8, dtype=kernels.dtype), torch.tensor([3, 3, 9, 0])
    tables = [table] if kernels.is_reference else [table, kernels.backend.pack_linear(table)]
    for each in tables:
        got = kernels.backend.embedding(indices, each, scale=5.57)
        assert torch.equal(got, (table[indices].float() * 5.57).to(kernels.dtype))
