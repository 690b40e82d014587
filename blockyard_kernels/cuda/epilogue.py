"""The epilogue of a product: bias, activation, gate and logit transform, in float32, rounded once.

Our product kernels run it at their end. After a product of a library or of several ranks it runs as a separate kernel.
It works element by element: an output depends on its own sums only. Where the code here adds a product to a value, it
uses an explicit `fma`, so that all callers round alike.
"""
# Triton functions are not plain Python: pyright understands only their syntax.
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from blockyard_kernels.shapes import AS_THEY_ARE, Activation, LogitTransform

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BLOCK = 1024
TWO_LOG2_OF_E = tl.constexpr(2 * math.log2(math.e))


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The operations after the bias."""

    gated: bool = False
    """The first half of the columns are gates, the second half ups: results are `activation(gate) * up`."""
    activation: Activation | None = None
    """The activation; None: no activation."""
    logits: LogitTransform = AS_THEY_ARE
    """Not for gated products."""

    @property
    def is_idle(self) -> bool:
        return not self.gated and self.activation is None and self.logits.is_idle

    @property
    def options(self) -> dict[str, Any]:
        return {
            "GATED": self.gated,
            "ACTIVATION": self.activation and self.activation.value,
            "SCALE": float(self.logits.scale),
            "SOFTCAP": float(self.logits.softcap),
        }


PLAIN = Epilogue()


@triton.jit
def bounded(exponents, BOUND: tl.constexpr):
    """Computes `BOUND * tanh(x)` from exponents with `2 ** exponent == exp(2 * x)`; it errs by at most 2e-7 * BOUND."""
    return BOUND - 2 * BOUND / (1 + tl.exp2(exponents))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Computes a `blockyard_kernels.shapes.Activation`, or returns x without one. NaN stays NaN."""
    if ACTIVATION == "silu":
        x = x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        # 1 + tanh(u) is 2 / (1 + exp(-2 u)), which loses no digits where the tanh is near -1. The factors are
        # -2 * sqrt(2 / pi), and the same times 0.044715.
        x = x / (1 + tl.exp(x * tl.fma(x * x, -0.07135481628, -1.595769122)))
    elif ACTIVATION == "gelu_erf":
        x = x * 0.5 * (1 + tl.erf(x * 0.7071067812))
    elif ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu2":
        x = tl.where(x < 0, 0.0, x)
        x = x * x
    elif ACTIVATION == "tanh":
        x = bounded(x * TWO_LOG2_OF_E, 1.0)
    return x


@triton.jit
def transform(logits, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """Applies a `blockyard_kernels.shapes.LogitTransform`."""
    if SCALE != 1.0:
        logits = logits * SCALE
    if SOFTCAP != 0.0:
        logits = bounded(logits * (TWO_LOG2_OF_E / SOFTCAP), SOFTCAP)
    return logits


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
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_output = n < num_outputs
    value = _load_finished(sums, bias, m, n, is_output, num_columns, HAS_BIAS)
    if GATED:
        up = _load_finished(sums, bias, m, n + num_outputs, is_output, num_columns, HAS_BIAS)
        value = activate(value, ACTIVATION) * up
    else:
        value = transform(activate(value, ACTIVATION), SCALE, SOFTCAP)
    tl.store(result + m * num_outputs + n, value.to(result.dtype.element_ty), mask=is_output)


def finish(sums: Tensor, bias: Tensor | None, *, dtype: torch.dtype, epilogue: Epilogue = PLAIN) -> Tensor:
    """Adds a bias to sums, applies the epilogue in float32, and rounds.

    Args:
        sums: [M, N], contiguous.
        bias: [N].
        dtype: the dtype of the result.
        epilogue: the operations after the bias.

    Returns:
        [M, N], or [M, N / 2] if gated.
    """
    num_rows, num_columns = sums.shape
    num_outputs = num_columns // 2 if epilogue.gated else num_columns
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
        **epilogue.options,
        BLOCK=BLOCK,
        # Each operation is rounded separately, as without a bias.
        enable_fp_fusion=False,
    )
    return result
