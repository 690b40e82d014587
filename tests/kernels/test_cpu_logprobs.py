"""Our own kernels tell of tokens: their log probabilities, ranks and the best, as the definition in float64 does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from blockyard_kernels.reference.sampling import ReferenceSampling
from tests.kit.kernels.backends import COMPILED, in_dtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kit.kernels.backends import Kernels

# Around a vector and a chunk of either width.
SIZES = [1, 2, 7, 8, 9, 15, 16, 17, 33, 511, 512, 513, 1023, 1024, 1025, 2049, 5001]
for_all = pytest.mark.parametrize("kernels", in_dtype(COMPILED, torch.float32), ids=str)


def random_logits(num_rows: int, vocab_size: int, *, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * scale


def order_of(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda token_id: (-values[token_id], token_id))


@for_all
@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_told_of_as_the_definition_says(kernels: Kernels, size: int) -> None:
    ops = kernels.backend.sampling
    logits = torch.cat([random_logits(3, size), random_logits(3, size).round(), torch.zeros(1, size)])
    logits[1, : size // 3] = -math.inf
    rows, token_ids = np.arange(7), np.arange(7) * 131 % size
    orders = np.array([order_of(row) for row in logits.tolist()])
    expected = torch.log_softmax(logits.double(), -1).numpy()
    for num_best in {0, 1, min(5, size), size // 2, size}:
        told = ops.token_logprobs(logits, rows, token_ids, num_best)
        assert np.array_equal(told.token_ids[:, 0], token_ids)
        assert np.array_equal(told.token_ids[:, 1:], orders[:, :num_best])
        assert np.array_equal(told.ranks, 1 + (orders == token_ids[:, None]).argmax(1))
        np.testing.assert_allclose(told.logprobs, np.take_along_axis(expected, told.token_ids, 1), rtol=1e-6, atol=2e-6)
        alone = ops.token_logprobs(logits, rows, None, num_best)
        assert np.array_equal(alone.token_ids, told.token_ids[:, 1:])
        assert np.array_equal(alone.logprobs, told.logprobs[:, 1:])
        assert alone.ranks.shape == (0,)


@for_all
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_a_large_vocabulary_is_told_of_without_loss(kernels: Kernels, scale: float) -> None:
    logits, rows = random_logits(4, 152_000, scale=scale), np.arange(4)
    told = kernels.backend.sampling.token_logprobs(logits, rows, rows * 1000, 20)
    expected = torch.log_softmax(logits.double(), -1).numpy()
    np.testing.assert_allclose(told.logprobs, np.take_along_axis(expected, told.token_ids, 1), rtol=2e-7, atol=4e-6)
    reference = ReferenceSampling(logits.device).token_logprobs(logits, rows, rows * 1000, 20)
    assert np.array_equal(told.token_ids, reference.token_ids)
    assert np.array_equal(told.ranks, reference.ranks)


@for_all
def test_rows_may_be_told_of_twice_and_in_any_order(kernels: Kernels) -> None:
    ops, logits = kernels.backend.sampling, random_logits(3, 300)
    told = ops.token_logprobs(logits, np.array([2, 0, 2]), np.array([5, 6, 7]), 2)
    single = [ops.token_logprobs(logits, np.array([row]), np.array([t]), 2) for row, t in ((2, 5), (0, 6), (2, 7))]
    assert told.logprobs.tolist() == [one.logprobs[0].tolist() for one in single]
    assert told.ranks.tolist() == [int(one.ranks[0]) for one in single]
