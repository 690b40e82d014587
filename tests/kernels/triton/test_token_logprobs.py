"""Log probabilities, ranks and best tokens in Triton, as the definition in float64 has them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from blockyard_kernels.cuda import sampling
from tests.kit.kernels.choices import order_of, random_logits
from tests.kit.kernels.guards import Guards
from tests.kit.kernels.triton_interpreter import DEVICE

OPS = sampling.CudaSampling(DEVICE)


@pytest.mark.parametrize("size", [1, 2, 63, 1025, 4097])
def test_tokens_are_told_of_as_the_definition_says(size: int):
    logits = torch.cat([random_logits(2, size), random_logits(1, size).round(), torch.zeros(1, size)])
    logits[1, : size // 3] = -math.inf
    rows, token_ids = np.arange(4), np.arange(4) * 131 % size
    orders = np.array([order_of(row) for row in logits.tolist()])
    expected = torch.log_softmax(logits.double(), -1).numpy()
    for num_best in {0, min(5, size), size}:
        told = OPS.token_logprobs(logits.to(DEVICE), rows, token_ids, num_best)
        assert np.array_equal(told.token_ids[:, 0], token_ids)
        assert np.array_equal(told.token_ids[:, 1:], orders[:, :num_best])
        assert np.array_equal(told.ranks, 1 + (orders == token_ids[:, None]).argmax(1))
        np.testing.assert_allclose(told.logprobs, np.take_along_axis(expected, told.token_ids, 1), rtol=1e-6, atol=1e-6)
        alone = OPS.token_logprobs(logits.to(DEVICE), rows, None, num_best)
        assert np.array_equal(alone.token_ids, told.token_ids[:, 1:])
        assert np.array_equal(alone.logprobs, told.logprobs[:, 1:])
        assert alone.ranks.shape == (0,)


def test_a_large_vocabulary_is_told_of_without_loss():
    logits, given = random_logits(2, 152_000, scale=8.0), [5, 151_999]
    told = OPS.token_logprobs(logits.to(DEVICE), np.arange(2), np.array(given), 0)
    expected = torch.log_softmax(logits.double(), -1)[[0, 1], given].numpy()
    np.testing.assert_allclose(told.logprobs[:, 0], expected, rtol=2e-7, atol=1e-6)
    assert told.ranks.tolist() == [int((row > row[token]).sum()) + 1 for row, token in zip(logits, given, strict=True)]


def test_rows_may_be_told_of_twice_in_any_order_and_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch):
    guards, logits = Guards(monkeypatch), random_logits(3, 300).to(DEVICE)
    single = [OPS.token_logprobs(logits, np.array([row]), np.array([t]), 2) for row, t in ((2, 5), (0, 6), (2, 7))]
    for most in (100, 6, 1):
        monkeypatch.setattr(sampling, "MAX_CANDIDATES", most)
        told = OPS.token_logprobs(logits, np.array([2, 0, 2]), np.array([5, 6, 7]), 2)
        assert told.logprobs.tolist() == [one.logprobs[0].tolist() for one in single]
        assert told.token_ids.tolist() == [one.token_ids[0].tolist() for one in single]
        assert told.ranks.tolist() == [int(one.ranks[0]) for one in single]
    guards.check()
