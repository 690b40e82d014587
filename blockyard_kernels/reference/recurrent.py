"""The ops of layers with a state in torch: one token at a time, each by the same operations on the same shapes.

So a token's bits depend on nothing but its sequence's tokens. Sums are trees of halves, because torch may sum in an
order that depends on the shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from blockyard_kernels.recurrent.ops import UNIT_COLUMNS, RecurrentKind
from blockyard_kernels.reference.elementwise import logistic

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from blockyard_kernels.recurrent.ops import RecurrentShape, RecurrentWeights, StateBatch

# Added to a vector's squared length before it is divided by its length.
LENGTH_EPSILON = 1e-6


class ReferenceRecurrentOps:
    """See `blockyard_kernels.recurrent.ops.RecurrentOps`."""

    def gate(self, rows: Tensor, gates: Tensor) -> Tensor:
        return (rows.float() * logistic(gates.float())).to(rows.dtype)

    def mix(
        self,
        rows: Tensor,
        weights: RecurrentWeights,
        batch: StateBatch,
        kv_pool: Tensor,
        places: tuple[int, ...],
        shape: RecurrentShape,
    ) -> Tensor:
        step = _STEPS[shape.kind]
        results = rows.new_empty(len(rows), shape.out_features)
        first = 0
        for sequence, count in enumerate(batch.num_new_tokens.tolist()):
            if not count:
                continue
            end = first + count
            units = Units(kv_pool, batch.fixed_tables[sequence].tolist(), places, shape, rows.dtype)
            is_new = int(batch.seq_lens[sequence]) == count
            tail, matrices = units.empty() if is_new else units.read()
            results[first:end] = _run(step, rows[first:end], weights, shape, tail, matrices)
            units.write(tail, matrices)
            first = end
        return results


class Units:
    """The units of one layer and one sequence in the pool's memory."""

    def __init__(
        self, pool: Tensor, blocks: list[int], places: tuple[int, ...], shape: RecurrentShape, dtype: torch.dtype
    ) -> None:
        memory = pool.view(len(pool), -1).view(torch.uint8)
        size = memory.shape[1]
        conv, matrix = (shape.conv_width - 1, shape.conv_features), (shape.key_dim, shape.value_dim)

        def find(place: int, num_bytes: int) -> Tensor:
            begin = place % size
            return memory[blocks[place // size], begin : begin + num_bytes]

        self._tail = find(places[0], conv[0] * conv[1] * dtype.itemsize).view(dtype).view(conv)
        stored = shape.value_dim // UNIT_COLUMNS, shape.key_dim, UNIT_COLUMNS
        self._heads = [find(place, 4 * matrix[0] * matrix[1]).view(torch.float32).view(stored) for place in places[1:]]
        self._matrix = matrix

    def empty(self) -> tuple[Tensor, Tensor]:
        """Returns the state before a sequence's first token."""
        return torch.zeros_like(self._tail), self._tail.new_zeros(len(self._heads), *self._matrix, dtype=torch.float32)

    def read(self) -> tuple[Tensor, Tensor]:
        """Returns copies of the tail [w - 1, F] and of the matrices [V, N, D]."""
        matrices = [head.transpose(0, 1).reshape(self._matrix) for head in self._heads]
        return self._tail.clone(), torch.stack(matrices) if matrices else torch.empty(0)

    def write(self, tail: Tensor, matrices: Tensor) -> None:
        self._tail.copy_(tail)
        for head, matrix in zip(self._heads, matrices, strict=True):
            head.copy_(matrix.view(self._matrix[0], -1, UNIT_COLUMNS).transpose(0, 1))


def _run(
    step: Callable[[Tensor, RecurrentWeights, RecurrentShape, Tensor, Tensor], Tensor],
    rows: Tensor,
    weights: RecurrentWeights,
    shape: RecurrentShape,
    tail: Tensor,
    matrices: Tensor,
) -> Tensor:
    """Computes a sequence's rows in order; changes the state."""
    return torch.stack([step(row, weights, shape, tail, matrices) for row in rows])


def _convolve(inputs: Tensor, weights: RecurrentWeights, tail: Tensor) -> Tensor:
    """Computes one row [F] float32 of the convolution, and moves the tail on."""
    window = torch.cat([tail, inputs[None]])
    tail.copy_(window[1:])
    products = window.float() * weights.conv.float().t()
    sums = products[0]
    for product in products[1:]:
        sums = sums + product
    return sums if weights.conv_bias is None else sums + weights.conv_bias.float()


def _short_conv(
    row: Tensor, weights: RecurrentWeights, shape: RecurrentShape, tail: Tensor, _matrices: Tensor
) -> Tensor:
    before, after, inputs = row.float().view(3, shape.conv_features)
    mixed = _convolve((before * inputs).to(row.dtype), weights, tail).to(row.dtype)
    return (after * mixed.float()).to(row.dtype)


def _gated_delta(
    row: Tensor, weights: RecurrentWeights, shape: RecurrentShape, tail: Tensor, matrices: Tensor
) -> Tensor:
    assert weights.decay_log is not None and weights.step_bias is not None and weights.norm is not None
    heads, keys, dtype = shape.num_value_heads, shape.num_key_heads * shape.key_dim, row.dtype
    sizes = [shape.conv_features, heads * shape.value_dim, heads, heads]
    inputs, gates, update, time = row.split(sizes)
    mixed = _silu(_convolve(inputs, weights, tail)).to(dtype).float()
    query, key, value = mixed.split([keys, keys, heads * shape.value_dim])
    repeats = heads // shape.num_key_heads
    query, key = (
        _shorten(part.view(-1, shape.key_dim)).repeat_interleave(repeats, dim=0)[:, :, None] for part in (query, key)
    )
    rate = weights.decay_log.exp() * _softplus(time.float() + weights.step_bias)
    matrices.mul_((-rate).exp()[:, None, None])
    remembered = _sum(matrices * key)
    change = logistic(update.float())[:, None] * (value.view(heads, -1) - remembered)
    matrices.add_(key * change[:, None])
    result = _sum(matrices * (query * shape.key_dim**-0.5)).to(dtype)
    return _gated_norm(result, gates.view(heads, -1), weights.norm, shape.epsilon).flatten()


def _mamba2(row: Tensor, weights: RecurrentWeights, shape: RecurrentShape, tail: Tensor, matrices: Tensor) -> Tensor:
    assert weights.decay_log is not None and weights.step_bias is not None
    assert weights.norm is not None and weights.skip is not None
    heads, keys = shape.num_value_heads, shape.num_key_heads * shape.key_dim
    inputs, gates, time = row.split([shape.conv_features, heads * shape.value_dim, heads])
    mixed = _silu(_convolve(inputs, weights, tail)).to(row.dtype).float()
    value, key, query = mixed.split([heads * shape.value_dim, keys, keys])
    value, repeats = value.view(heads, -1), heads // shape.num_key_heads
    key, query = (part.view(-1, shape.key_dim).repeat_interleave(repeats, dim=0)[:, :, None] for part in (key, query))
    span = _softplus(time.float() + weights.step_bias)
    matrices.mul_((-(weights.decay_log.exp() * span)).exp()[:, None, None])
    matrices.add_(key * (value * span[:, None])[:, None])
    result = _sum(matrices * query) + value * weights.skip[:, None]
    gated = (result * _silu(gates.float().view(heads, -1))).view(shape.num_key_heads, -1)
    squares = _sum((gated * gated)[:, :, None]) / gated.shape[1]
    return ((gated * (squares + shape.epsilon).rsqrt()).flatten() * weights.norm.float()).to(row.dtype)


_STEPS = {
    RecurrentKind.GATED_DELTA: _gated_delta,
    RecurrentKind.MAMBA2: _mamba2,
    RecurrentKind.SHORT_CONV: _short_conv,
}


def _gated_norm(rows: Tensor, gates: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalises rows [V, D], rounds, multiplies by the weight, rounds, and multiplies by SiLU of the gates."""
    wide = rows.float()
    squares = _sum((wide * wide)[:, :, None]) / rows.shape[1]
    normed = (wide * (squares + epsilon).rsqrt()).to(rows.dtype) * weight
    return (normed.float() * _silu(gates.float())).to(rows.dtype)


def _silu(numbers: Tensor) -> Tensor:
    return numbers / (1 + torch.exp(-numbers))


def _softplus(numbers: Tensor) -> Tensor:
    # log(1 + exp(x)) is x where exp(x) is so large that adding 1 changes nothing.
    return numbers.where(numbers > 20, torch.log1p(torch.exp(numbers)))


def _shorten(rows: Tensor) -> Tensor:
    """Divides each row [rows, N] by its length."""
    return rows * (_sum((rows * rows)[:, :, None]) + LENGTH_EPSILON).rsqrt()


def _sum(numbers: Tensor) -> Tensor:
    """Sums over the second dimension: [V, n, D] -> [V, D], the first half with the second, and so on."""
    while (count := numbers.shape[1]) > 1:
        half = (count + 1) // 2
        low, high = numbers[:, :half], numbers[:, half:]
        numbers = low + (high if count % 2 == 0 else functional.pad(high, (0, 0, 0, 1)))
    return numbers[:, 0]
