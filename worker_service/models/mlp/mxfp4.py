"""Numbers of four bits with a scale for each 32 of them: OCP Microscaling Formats (MX), version 1.0, MXFP4."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
# By the four bits: a sign, two of an exponent, one of a mantissa.
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# A scale is a power of two; of this number the exponent is 0. 255 stands for no number.
EXPONENT_BIAS, NO_NUMBER = 127, 255


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes the numbers of rows -> [rows, in_features]: exact in bfloat16 and float32.

    Args:
        blocks: [rows, in_features / 32, 16] uint8, two numbers each, the first in the lower bits.
        scales: [rows, in_features / 32] uint8: exponents.
        dtype: of the result.
    """
    levels = torch.tensor(LEVELS, device=blocks.device)
    pairs = torch.stack([levels[(blocks & 15).long()], levels[(blocks >> 4).long()]], dim=-1)
    factors = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - EXPONENT_BIAS)
    factors = factors.masked_fill(scales == NO_NUMBER, torch.nan)
    return (pairs.flatten(-2) * factors[..., None]).flatten(-2).to(dtype)
