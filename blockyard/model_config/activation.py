"""The activation functions of MLPs and pooling heads."""

from __future__ import annotations

from enum import StrEnum


class Activation(StrEnum):
    """An elementwise function between two linear products."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU_ERF = "gelu_erf"
    RELU = "relu"
    RELU2 = "relu2"
    """`max(x, 0) ** 2`."""
    TANH = "tanh"
