"""Self-test of compiled ops: compares their results with those of another backend on the same device.

A fault of the compiler shows as wrong numbers, not as an error. The test finds large errors, not rounding errors.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockyard_kernels.invariance import random_numbers
from blockyard_kernels.lora import LoraRows
from blockyard_kernels.ops import Backend, kv_pool_shape
from blockyard_kernels.sampling import Choices
from blockyard_kernels.shapes import Activation, AttentionShape, LinearSpec, LogitTransform

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from blockyard_kernels.packed import PackedLinear

    Op = Callable[[Backend], Tensor]
    Product = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]

BLOCK_SIZE = 16
# Tokens before the step and in the step: a decode in a long text, and prefill pieces with few and with many tiles.
OLD_TOKENS, NEW_TOKENS = (300, 5, 0), (1, 30, 70)
SHAPE = AttentionShape(8, 2, 128, 128**-0.5)
BOUNDED = replace(SHAPE, softcap=2.0)
LOGITS = LogitTransform(0.7, 3.0)
LORA_WIDTH = 24
# Errors as a share of the largest number of the result.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def first_difference(backend: Backend, truth: Backend, dtype: torch.dtype, product: Product | None = None) -> str:
    """Returns the name of the first op whose results differ from those of `truth`, or "" if no op differs.

    Args:
        backend: the backend to test.
        truth: the backend with the expected results, on the same device.
        dtype: the dtype of rows and weights.
        product: the expected product of a backend that quantizes weights: from rows [R, K], a weight [N, K], a bias
            [N] and leaves to [R, N] float32.

    Raises:
        Exception: whatever a compiler or the device raises.
    """
    for name, op in _ops(truth, dtype, product).items():
        got, expected = op(backend).double(), op(truth).double()
        tolerance = TOLERANCES[dtype] * float(expected.abs().max())
        # `not <=` also catches NaN.
        if not float((got - expected).abs().max()) <= tolerance:
            return name
    return ""


def _ops(truth: Backend, dtype: torch.dtype, product: Product | None) -> dict[str, Op]:
    device, num_tokens, features, num_outputs = truth.device, sum(NEW_TOKENS), 256, 160

    def numbers(rows: int, columns: int, seed: int) -> Tensor:
        return random_numbers(rows, columns, seed=seed).to(device, dtype)

    hidden, residual = (numbers(num_tokens, features, seed) for seed in (1, 2))
    weight, bias = numbers(num_outputs, features, 3), numbers(1, num_outputs, 4)[0]
    norm, wide = numbers(1, features, 10)[0], random_numbers(1, features, seed=11)[0].to(device)
    ids = torch.arange(num_tokens, device=device) * 7 % len(weight)
    # With two leaves our kernel multiplies instead of a library; quantized weights never use a library.
    leaves = 2 if product is None else 1

    def linear(backend: Backend, rows: Tensor, *, wide: bool = False, **kind: Any) -> Tensor:
        if backend is truth and product is not None:
            same = truth.pack_linear(torch.eye(num_outputs, device=device), spec=LinearSpec(**kind))
            return truth.linear(product(rows, weight, bias, 1), same, wide=wide)
        packed = backend.pack_linear(weight.clone(), bias.clone(), LinearSpec(leaves=leaves, **kind))
        return backend.linear(rows, packed, wide=wide)

    factors = numbers(LORA_WIDTH, features, 8), numbers(len(weight), LORA_WIDTH, 9)

    def adapted(backend: Backend) -> Tensor:
        """Half of the rows have an adapter."""
        if backend is not truth:
            packed = backend.pack_linear(weight.clone(), bias.clone(), LinearSpec(leaves=leaves))
            return _linear_adapted(backend, hidden, packed, factors)
        inner, outer = (factor.float() for factor in factors)
        result = linear(truth, hidden).float()
        result[1::2] += (hidden[1::2].float() @ inner.T).to(dtype).float() @ outer.T
        return result.to(dtype)

    few, added = hidden[:8], residual[:8]
    return {
        "linear": lambda backend: linear(backend, hidden),
        "linear of one row": lambda backend: linear(backend, hidden[:1]),
        "linear with adapters": adapted,
        "gated linear": lambda backend: linear(backend, hidden, gated=True),
        "activated linear": lambda backend: linear(backend, few, activation=Activation.GELU_ERF),
        "logits": lambda backend: linear(backend, few, wide=True, logits=LOGITS),
        "embedding": lambda backend: torch.cat([backend.embedding(ids, weight, scale=scale) for scale in (1.0, 2.5)]),
        "rms_norm": lambda backend: torch.cat(backend.rms_norm(hidden.clone(), norm, 1e-5, residual)),
        "rms_norm by a wide weight": lambda backend: backend.rms_norm(few, wide, 1e-5)[0],
        "layer_norm": lambda backend: torch.cat(backend.layer_norm(few, wide, wide, 1e-5, added, 0.5)),
        "add_normed": lambda backend: backend.add_normed(few, wide, 1e-5, added),
        "add": lambda backend: backend.add(few, added, 0.5),
        "silu_and_mul": lambda backend: backend.silu_and_mul(hidden),
        "paged_attention": lambda backend: _attend(backend, numbers),
        "choose": lambda backend: _choose(backend, hidden[:8].float()),
    }


def _linear_adapted(backend: Backend, rows: Tensor, packed: PackedLinear, factors: tuple[Tensor, Tensor]) -> Tensor:
    ops = backend.lora
    assert ops is not None
    ops.make_room(packed, 2, LORA_WIDTH)
    ops.write(packed, 1, ops.pack(packed, *factors))
    return backend.linear(rows, packed, lora=LoraRows((np.arange(len(rows)) % 2 * 2 - 1).astype(np.int32)))


def _attend(backend: Backend, numbers: Callable[[int, int, int], Tensor]) -> Tensor:
    lengths = list(starmap(int.__add__, zip(OLD_TOKENS, NEW_TOKENS, strict=True)))
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    # The blocks of a sequence are never neighbours, and no sequence uses block 0.
    tables = [[1 + place * len(counts) + index for place in range(count)] for index, count in enumerate(counts)]
    pool_shape = kv_pool_shape(1 + max(counts) * len(counts), 1, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)
    width = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
    query, pool = torch.empty(0), numbers(1, 1, 0).new_zeros(pool_shape)
    batch = None
    for seed, (new, until) in enumerate([(OLD_TOKENS, OLD_TOKENS), (NEW_TOKENS, lengths)]):
        batch = backend.plan_attention(new, until, tables, BLOCK_SIZE)
        angles = batch.positions[:, None] * torch.logspace(0, -4, SHAPE.head_dim // 2, device=pool.device)
        cosines, sines = angles.cos(), angles.sin()
        rotary = torch.stack([torch.cat([cosines] * 2, 1), torch.cat([-sines, sines], 1)], 1)
        qkv = numbers(sum(new), width, 5 + seed)
        query = backend.rotary_and_cache(qkv, rotary.to(pool.dtype), batch, pool, 0, SHAPE)
    assert batch is not None
    plain = backend.paged_attention(query, batch, pool, 0, SHAPE)
    sinks = torch.linspace(-1, 1, SHAPE.num_heads, device=pool.device)
    return torch.cat([plain, backend.paged_attention(query, batch, pool, 0, BOUNDED, sinks=sinks)])


def _choose(backend: Backend, logits: Tensor) -> Tensor:
    """Chooses greedily in half of the rows, and draws with top_k 1 in the others: both give the likeliest token."""
    count = len(logits)
    ones, zeros = np.ones(count, np.int64), np.zeros(count, np.int64)
    temperatures = (np.arange(count) % 2).astype(np.float32)
    no_share = np.zeros(count, np.float32)
    choices = Choices(temperatures, ones, no_share + 1, no_share, zeros + 17, zeros, zeros)
    return torch.from_numpy(backend.sampling.choose(logits, choices))
