"""What follows a product that a library or several ranks have made: bias, gate and rounding, in one pass.

Element by element: an output depends on its own sums alone.
"""
# Triton's functions are in a language of their own, of which pyright sees the syntax.
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 1024


@triton.jit
def _load_finished(sums, bias, m, n, is_column, num_columns, HAS_BIAS: tl.constexpr):
    value = tl.load(sums + m * num_columns + n, mask=is_column, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + n, mask=is_column, other=0.0).to(tl.float32)
    return value


@triton.jit
def _finish(
    sums,
    bias,
    result,
    num_columns,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = n < num_outputs
    value = _load_finished(sums, bias, m, n, is_output, num_columns, HAS_BIAS)
    if GATED:
        up = _load_finished(sums, bias, m, n + num_outputs, is_output, num_columns, HAS_BIAS)
        value = value / (1 + tl.exp(-value)) * up
    tl.store(result + m * num_outputs + n, value.to(result.dtype.element_ty), mask=is_output)


def finish(
    sums: Tensor,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    gated: bool = False,
) -> Tensor:
    """Adds a bias to sums, gates and rounds, in this order and in float32.

    Args:
        sums: [M, N], contiguous.
        bias: [N].
        dtype: of the result.
        gated: the first half of the columns are gates, the others ups.

    Returns:
        [M, N], or [M, N / 2] of `silu(gate) * up`.
    """
    num_rows, num_columns = sums.shape
    num_outputs = num_columns // 2 if gated else num_columns
    result = sums.new_empty(num_rows, num_outputs, dtype=dtype)
    if num_rows == 0:
        return result
    _finish[(num_rows, -(-num_outputs // BLOCK))](
        sums,
        sums if bias is None else bias,
        result,
        num_columns,
        num_outputs,
        HAS_BIAS=bias is not None,
        GATED=gated,
        BLOCK=BLOCK,
        # Each step is rounded by itself, as it is where there is no bias.
        enable_fp_fusion=False,
    )
    return result
