"""Tensors of normally distributed numbers that are the same each time."""

from __future__ import annotations

import torch


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Numbers of mean 0 and variance 1, drawn in float32 and rounded to the dtype."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
