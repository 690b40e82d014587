"""Recurrences against float64, and the same bits however a sequence's tokens are divided."""

from __future__ import annotations

import itertools
import random
from functools import cache

import numpy as np
import pytest
import torch
from torch.nn import functional

from blockyard.model_config.state import place_units
from blockyard_kernels.ops import kv_pool_shape
from blockyard_kernels.recurrent.ops import RecurrentKind, RecurrentShape, RecurrentWeights
from tests.kit.kernels.backends import BEST, REFERENCE, Kernels

DELTA = RecurrentShape(RecurrentKind.GATED_DELTA, 2 * 2 * 48 + 4 * 64, 4, 2, 4, 48, 64, 1e-6)
MAMBA = RecurrentShape(RecurrentKind.MAMBA2, 2 * 2 * 48 + 4 * 64, 4, 2, 4, 48, 64, 1e-6)
CONV = RecurrentShape(RecurrentKind.SHORT_CONV, 72, 3)
SHAPES = {"gated_delta": DELTA, "mamba2": MAMBA, "short_conv": CONV}
KERNELS = [Kernels(name, dtype) for name in (REFERENCE, BEST) for dtype in (torch.float32, torch.bfloat16)]
BLOCK_SIZE, NUM_BLOCKS = 16, 600
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
for_kernels = pytest.mark.parametrize("kernels", KERNELS, ids=str)
for_shapes = pytest.mark.parametrize("kind", SHAPES)


@cache
def make_weights(kind: str, dtype: torch.dtype) -> RecurrentWeights:
    shape, generator = SHAPES[kind], torch.Generator().manual_seed(1)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator)

    conv, bias = draw(shape.conv_features, shape.conv_width).to(dtype), draw(shape.conv_features).to(dtype)
    if kind == "short_conv":
        return RecurrentWeights(conv, bias)
    heads = shape.num_value_heads
    if kind == "mamba2":
        norm = (1 + 0.1 * draw(heads * shape.value_dim)).to(dtype)
        return RecurrentWeights(conv, bias, draw(heads), draw(heads), norm, draw(heads))
    return RecurrentWeights(conv, None, draw(heads), draw(heads), (1 + 0.1 * draw(shape.value_dim)).to(dtype))


def make_rows(kind: str, dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, SHAPES[kind].in_features, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Bench:
    """Sequences with their states in a pool that starts as NaN."""

    def __init__(self, kernels: Kernels, kind: str) -> None:
        self.kernels, self.shape, self.weights = kernels, SHAPES[kind], make_weights(kind, kernels.dtype)
        shape = kv_pool_shape(NUM_BLOCKS, 1, 2, BLOCK_SIZE, 128)
        self.pool = torch.full(shape, float("nan"), dtype=kernels.dtype)
        tail = (self.shape.conv_width - 1) * self.shape.conv_features * kernels.dtype.itemsize
        matrices = [4 * self.shape.key_dim * self.shape.value_dim] * self.shape.num_value_heads
        block_bytes = self.pool[0].nbytes
        self.places, end = place_units([tail, *matrices], 0, block_bytes)
        self.num_fixed = -(-end // block_bytes)
        self._free = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        self._rows: dict[object, tuple[list[int], int]] = {}

    def step(self, work: list[tuple[object, torch.Tensor]]) -> list[torch.Tensor]:
        """Mixes new rows of sequences."""
        for key, rows in work:
            fixed, length = self._rows.get(key) or ([self._free.pop() for _ in range(self.num_fixed)], 0)
            self._rows[key] = fixed, length + len(rows)
        counts = [len(rows) for _, rows in work]
        lengths = [self._rows[key][1] for key, _ in work]
        tables = np.zeros((len(work), -(-max(lengths) // BLOCK_SIZE)), np.int64)
        fixed = np.array([self._rows[key][0] for key, _ in work], np.int64)
        backend = self.kernels.backend
        batch = backend.plan_attention(counts, lengths, tables, BLOCK_SIZE, fixed_tables=fixed)
        assert backend.recurrent is not None
        rows = torch.cat([rows for _, rows in work])
        results = backend.recurrent.mix(rows, self.weights, batch, self.pool, self.places, self.shape)
        return list(results.split(counts))

    def run(self, key: object, rows: torch.Tensor, pieces: list[int]) -> torch.Tensor:
        return torch.cat([self.step([(key, part)])[0] for part in rows.split(pieces)])


def expected(kind: str, rows: torch.Tensor) -> torch.Tensor:
    """Computes in float64, rounded where the ops round."""
    shape, dtype = SHAPES[kind], rows.dtype
    conv, bias, decay_log, step_bias, norm, skip = (
        None if each is None else each.double() for each in make_weights(kind, dtype)
    )
    assert conv is not None

    def rounded(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to(dtype).double()

    if kind == "short_conv":
        before, after, inputs = rows.double().chunk(3, dim=1)
        assert bias is not None
        return after * rounded(_convolve(rounded(before * inputs), conv) + bias)
    assert decay_log is not None and step_bias is not None and norm is not None
    heads, keys = shape.num_value_heads, shape.num_key_heads * shape.key_dim
    state, results = torch.zeros(heads, shape.key_dim, shape.value_dim, dtype=torch.float64), list[torch.Tensor]()
    if skip is not None:
        assert bias is not None
        inputs, gates, time = rows.double().split([shape.conv_features, heads * shape.value_dim, heads], dim=1)
        mixed = rounded(functional.silu(_convolve(inputs, conv) + bias))
        value, key, query = mixed.split([heads * shape.value_dim, keys, keys], dim=1)
        key, query = (part.unflatten(1, (-1, shape.key_dim)).repeat_interleave(2, dim=1) for part in (key, query))
        span = functional.softplus(time + step_bias)
        for t, values in enumerate(value.unflatten(1, (heads, -1))):
            state *= (-decay_log.exp() * span[t]).exp()[:, None, None]
            state += key[t, :, :, None] * (values * span[t, :, None])[:, None]
            results.append(torch.einsum("hkd,hk->hd", state, query[t]) + values * skip[:, None])
        gated = (torch.stack(results).flatten(1) * functional.silu(gates)).unflatten(1, (shape.num_key_heads, -1))
        return (gated * (gated.square().mean(2, keepdim=True) + shape.epsilon).rsqrt()).flatten(1) * norm
    inputs, gates, update, time = rows.double().split(
        [shape.conv_features, heads * shape.value_dim, heads, heads], dim=1
    )
    mixed = rounded(functional.silu(_convolve(inputs, conv)))
    query, key, value = mixed.split([keys, keys, heads * shape.value_dim], dim=1)
    query, key = (
        functional.normalize(part.unflatten(1, (-1, shape.key_dim)), dim=2).repeat_interleave(2, dim=1)
        for part in (query, key)
    )
    decay = (-decay_log.exp() * functional.softplus(time + step_bias)).exp()
    for t, values in enumerate(value.unflatten(1, (heads, -1))):
        state *= decay[t, :, None, None]
        change = update[t].sigmoid()[:, None] * (values - torch.einsum("hkd,hk->hd", state, key[t]))
        state += key[t, :, :, None] * change[:, None]
        results.append(torch.einsum("hkd,hk->hd", state, query[t]) * shape.key_dim**-0.5)
    wide = rounded(torch.stack(results))
    normed = rounded(rounded(wide * (wide.square().mean(2, keepdim=True) + shape.epsilon).rsqrt()) * norm)
    return (normed * functional.silu(gates.unflatten(1, (heads, -1)))).flatten(1)


def _convolve(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    padded = functional.pad(inputs.t()[None], (weights.shape[1] - 1, 0))
    return functional.conv1d(padded, weights[:, None], groups=len(weights))[0].t()


@for_kernels
@for_shapes
def test_results_are_those_of_float64(kind: str, kernels: Kernels) -> None:
    rows = make_rows(kind, kernels.dtype, 150, seed=2)
    got, truth = Bench(kernels, kind).run("one", rows, [150]).double(), expected(kind, rows)
    if kernels.dtype is torch.float32:
        assert (got - truth).abs().max() <= 4 * ULP[torch.float32] * 150**0.5 * truth.abs().max()
    else:
        # Rounding to bfloat16 may fall the other way at any of four places.
        assert (got - truth).abs().mean() <= 2 * ULP[torch.bfloat16] * truth.abs().mean()


@for_kernels
@for_shapes
def test_bits_do_not_depend_on_pieces_on_others_or_on_threads(kind: str, kernels: Kernels) -> None:
    count = 40 if kernels.is_reference else 300
    rows, chooser = make_rows(kind, kernels.dtype, count, seed=4), random.Random(5)
    whole = Bench(kernels, kind).run("one", rows, [count])
    num_threads = torch.get_num_threads()
    try:
        for cutting in range(3 if kernels.is_reference else 40):
            kernels.backend.set_num_threads(1 + cutting % 3)
            cuts = sorted({0, count, *chooser.sample(range(1, count), chooser.randrange(1, min(count, 70)))})
            bench, got = Bench(kernels, kind), list[torch.Tensor]()
            mates = [make_rows(kind, kernels.dtype, count, seed=10 + mate) for mate in range(chooser.choice([0, 1, 6]))]
            for begin, end in itertools.pairwise(cuts):
                work = [(mate, rows[begin : begin + 1 + mate % 3]) for mate, rows in enumerate(mates)]
                got.append(bench.step([*work, ("one", rows[begin:end])])[-1])
            assert torch.equal(torch.cat(got), whole)
    finally:
        kernels.backend.set_num_threads(num_threads)


@for_kernels
@for_shapes
def test_a_number_that_is_none_stays_in_its_sequence(kind: str, kernels: Kernels) -> None:
    rows, other = (make_rows(kind, kernels.dtype, 30, seed=seed) for seed in (6, 7))
    truth = Bench(kernels, kind).run("one", rows, [30])
    other[11] = float("nan")
    bench = Bench(kernels, kind)
    steps = [
        bench.step([("other", part), ("one", own)]) for part, own in zip(other.split(10), rows.split(10), strict=True)
    ]
    assert torch.equal(torch.cat([own for _, own in steps]), truth)
    assert not steps[0][0].isnan().any()
    assert steps[1][0][1:].isnan().any()


@for_kernels
def test_gates_multiply_what_they_stand_beside(kernels: Kernels) -> None:
    assert kernels.backend.recurrent is not None
    both = torch.randn(9, 3 * 40, generator=torch.Generator().manual_seed(1)).to(kernels.dtype)
    rows, gates = torch.randn(9, 40, generator=torch.Generator().manual_seed(2)).to(kernels.dtype), both[:, 40:80]
    truth = rows.double() * gates.double().sigmoid()
    got = kernels.backend.recurrent.gate(rows, gates).double()
    assert torch.allclose(got, truth, rtol=2 * ULP[kernels.dtype], atol=1e-7)
    # One gate may be that of a whole row.
    one, alone = both[:, :1].contiguous(), rows.double() * both[:, :1].double().sigmoid()
    got = kernels.backend.recurrent.gate(rows, one).double()
    assert torch.allclose(got, alone, rtol=2 * ULP[kernels.dtype], atol=1e-7)
