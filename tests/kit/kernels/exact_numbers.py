"""Numbers whose sums are exact in any order, and what may differ where they are not."""

from __future__ import annotations

import torch

from tests.kit.kernels.random_tensors import random

# Some last places in float32, one of which may decide how a value is rounded, and then its product.
ROUNDING = {torch.float32: 2.0**-19, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def eighths(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of which every sum of squares is exact in float32, in any order."""
    return random(*shape, seed=seed).mul(8).round().clamp(-31, 31).div(8).to(dtype)


def balanced_eighths(num_rows: int, width: int, *, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows of them whose mean is 0."""
    half = eighths(num_rows, width // 2, dtype=dtype, seed=seed)
    return torch.cat([half, half.new_zeros(num_rows, width % 2), -half], 1)


def assert_equal_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Whatever is not a number is so in the same places."""
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def assert_one_rounding(got: torch.Tensor, expected: torch.Tensor, atol: float = 1e-7) -> None:
    """What is rounded differs by a last place or two at most."""
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.cpu(), expected, rtol=ROUNDING[expected.dtype], atol=atol)
