"""Keys and values in int8: what a pool holds, attention over it beside float64, and the bits of any schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from blockyard_kernels.ops import kv_pool_shape
from blockyard_kernels.reference.int8 import quantize_heads, read_heads
from blockyard_kernels.shapes import AttentionShape, scale_width
from tests.kernels.test_exactness import LENGTH, LONG, SCHEDULES, alone, count_differing_rows
from tests.kit.kernels.backends import COMPILED, KERNELS, REFERENCES, Kernels, in_dtype, read_layer, store
from tests.kit.kernels.step_runner import StepRunner, poisoned
from tests.kit.kernels.tiny_models import tiny_model

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
for_all = pytest.mark.parametrize("kernels", in_dtype(KERNELS, *DTYPES), ids=str)
for_compiled = pytest.mark.parametrize("kernels", COMPILED, ids=str)
SHAPES = [
    AttentionShape(9, 3, 64, 0.125),
    AttentionShape(14, 2, 64, 0.125),
    AttentionShape(6, 2, 20, 0.5, softcap=1.5),
    AttentionShape(64, 1, 8, 0.3),
    AttentionShape(8, 1, 128, 0.1),
]
for_all_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
LENS = [1030, 40, 1, 280, 257]
# Rows of a step: (sequence, first, end).
STEP = [(0, 1029, 1030), (1, 0, 40), (2, 0, 1), (3, 268, 280), (4, 256, 257)]
# Of values whose standard deviation is 1. Our kernels hold queries and weights in 15 and 16 bits.
TOLERANCE = {torch.float32: 3e-4, torch.bfloat16: 2e-2}


@dataclass
class Case:
    """Sequences whose keys and values lie in a pool of int8 that is poisoned elsewhere."""

    kernels: Kernels
    shape: AttentionShape
    pool: Tensor
    tables: list[list[int]]
    queries: list[Tensor]
    """[length, H, D] of each sequence."""
    keys_values: list[Tensor]
    """[2, length, K, D] of each sequence, before they are quantized."""
    sinks: Tensor | None = None

    def attend(self, step: list[tuple[int, int, int]], window: int | None = None) -> Tensor:
        """Computes rows of sequences together."""
        new, lens = [end - first for _, first, end in step], [end for _, _, end in step]
        tables = [self.tables[sequence] for sequence, _, _ in step]
        query = torch.cat([self.queries[sequence][first:end] for sequence, first, end in step])
        batch = self.kernels.backend.plan_attention(new, lens, tables, self.pool.shape[4])
        return self.kernels.backend.paged_attention(query, batch, self.pool, 1, self.shape, window, self.sinks)


def make_case(kernels: Kernels, shape: AttentionShape, block_size: int = 32) -> Case:
    """The same numbers whatever the block size."""
    generator = torch.Generator().manual_seed(3)
    sizes = (shape.num_kv_heads, shape.head_dim)
    keys_values = [torch.randn(2, length, *sizes, generator=generator).to(kernels.dtype) for length in LENS]
    sizes = (shape.num_heads, shape.head_dim)
    queries = [torch.randn(length, *sizes, generator=generator).to(kernels.dtype) for length in LENS]
    num_blocks = [-(-length // block_size) for length in LENS]
    places = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    tables = [[places.pop() for _ in range(count)] for count in num_blocks]
    heads = shape.num_kv_heads, block_size, shape.head_dim + scale_width(torch.int8)
    pool = poisoned(kv_pool_shape(sum(num_blocks) + 3, 2, *heads), torch.int8)
    store(kernels.backend, pool, 1, tables, keys_values)
    return Case(kernels, shape, pool, tables, queries, keys_values)


def dequantized(keys_values: Tensor) -> Tensor:
    return read_heads(quantize_heads(keys_values.flatten(0, 1))).view(keys_values.shape)


def brute_force(case: Case, window: int | None) -> Tensor:
    """Softmax of each row over what it sees of the dequantized numbers, in float64."""
    group, results = case.shape.num_heads // case.shape.num_kv_heads, list[torch.Tensor]()
    for sequence, begin, end in STEP:
        held = dequantized(case.keys_values[sequence]).double()
        for position in range(begin, end):
            first = 0 if window is None else max(0, position - window + 1)
            key, value = held[:, first : position + 1].repeat_interleave(group, dim=2)
            scores = (case.queries[sequence][position].double() * key).sum(-1) * case.shape.scale
            if case.shape.softcap:
                scores = torch.tanh(scores / case.shape.softcap) * case.shape.softcap
            if case.sinks is not None:
                scores = torch.cat([scores, case.sinks.double()[None]])
                value = torch.cat([value, torch.zeros_like(value[:1])])
            results.append((scores.softmax(0)[..., None] * value).sum(0).flatten())
    return torch.stack(results)


@for_all
@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_every_backend_holds_the_same_bytes(kernels: Kernels, block_size: int):
    case = make_case(kernels, SHAPES[2], block_size)
    held = read_layer(kernels, case.pool, 1)
    for table, stored in zip(case.tables, case.keys_values, strict=True):
        rows = held[table].permute(1, 0, 3, 2, 4).flatten(1, 2)
        length = stored.shape[1]
        assert torch.equal(rows[:, :length], quantize_heads(stored.flatten(0, 1)).view(rows[:, :length].shape))
        assert not rows[:, length:].any(), "the rest of a block is cleared"


@for_all
@for_all_shapes
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (100, True)])
def test_attention_is_that_of_the_dequantized_numbers(
    kernels: Kernels, shape: AttentionShape, window: int | None, has_sinks: bool
):
    case, tolerance = make_case(kernels, shape), TOLERANCE[kernels.dtype]
    if has_sinks:
        case.sinks = torch.randn(shape.num_heads, generator=torch.Generator().manual_seed(7)) * 2
    got = case.attend(STEP, window)
    assert got.dtype == kernels.dtype
    torch.testing.assert_close(got.double(), brute_force(case, window), rtol=tolerance, atol=tolerance)


@for_compiled
@for_all_shapes
def test_threads_blocks_and_neighbours_change_no_bit(kernels: Kernels, shape: AttentionShape):
    case = make_case(kernels, shape)
    together = case.attend([(0, 1010, 1030), *STEP[1:]])
    for block_size, num_threads in ((8, 3), (16, 2), (64, 1), (256, 4)):
        kernels.backend.set_num_threads(num_threads)
        other = make_case(kernels, shape, block_size)
        assert torch.equal(other.attend([(0, 1010, 1030), *STEP[1:]]), together)
        for first, end in ((1029, 1030), (1010, 1011), (1022, 1029)):
            assert torch.equal(other.attend([(0, first, end)]), together[first - 1010 : end - 1010])


@for_all
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
def test_a_token_that_is_not_finite_shows_and_harms_its_own_sequence_only(kernels: Kernels, bad: float, which: int):
    case = make_case(kernels, SHAPES[0])
    expected = case.attend(STEP)
    case.keys_values[0][which, 700, 1, 5] = bad
    store(kernels.backend, case.pool, 1, case.tables[:1], case.keys_values[:1])
    got = case.attend(STEP)
    heads = slice(3 * 64, 6 * 64)
    assert not got[0, heads].isfinite().any()
    got[0, heads] = expected[0, heads]
    assert torch.equal(got, expected)


@for_all
def test_cleared_slots_are_zero_and_no_others(kernels: Kernels):
    shape = SHAPES[2]
    pool = torch.zeros(kv_pool_shape(4, 2, 2, 8, shape.head_dim + scale_width(torch.int8)), dtype=torch.int8)
    stored = torch.randn(2, 20, 2, shape.head_dim).to(kernels.dtype)
    store(kernels.backend, pool, 1, [[3, 1, 2]], [stored])
    expected = read_layer(kernels, pool, 1).clone()
    expected[3, :, :, 7] = expected[1, :, :, 0] = expected[2, :, :, 3] = 0
    kernels.backend.clear_slots(pool, np.array([3, 1, 2]), np.array([7, 0, 3]))
    assert torch.equal(read_layer(kernels, pool, 1), expected)


def load(name: str, kernels: Kernels) -> StepRunner:
    runner = StepRunner.load(tiny_model(name), kernels.dtype, kernels.backend, kv_cache_dtype="int8").probe()
    assert runner.pool.dtype == torch.int8
    return runner


@pytest.mark.parametrize("kernels", in_dtype(REFERENCES, *DTYPES), ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2_window"])
def test_every_schedule_gives_the_same_bits(name: str, kernels: Kernels):
    assert count_differing_rows(load(name, kernels)) == dict.fromkeys(SCHEDULES, 0)


@for_compiled
@pytest.mark.parametrize("name", ["llama_bias", "qwen2_window"])
def test_every_schedule_gives_the_same_bits_replayed_or_not(name: str, kernels: Kernels):
    runner = load(name, kernels)
    expected = alone(runner, [LENGTH])
    runner.drop_all()
    runner.capture(70)
    for schedule_name, schedule in SCHEDULES.items():
        kernels.backend.set_num_threads(1 if schedule_name in LONG else 2)
        assert runner.differing_rows(schedule(runner), expected) == 0, schedule_name
        runner.drop_all()
    assert runner.num_replayed > 300


@for_all
def test_logits_are_near_those_of_an_unquantized_pool_and_others(kernels: Kernels):
    name = "llama"
    plain = StepRunner.load(tiny_model(name), kernels.dtype, kernels.backend)
    expected, got = alone(plain, [LENGTH]), alone(load(name, kernels), [LENGTH])
    assert not torch.equal(got, expected)
    assert (got - expected).std() < 0.05 * expected.std()


@for_all
def test_the_fingerprint_tells_them_apart(kernels: Kernels):
    plain = StepRunner.load(tiny_model("llama"), kernels.dtype, kernels.backend)
    assert plain.model.fingerprint() != load("llama", kernels).model.fingerprint()
