"""The functions between two products."""

from __future__ import annotations

from enum import StrEnum


class Activation(StrEnum):
    """What is made of each number of a product."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU_ERF = "gelu_erf"
    RELU = "relu"
    RELU2 = "relu2"
    """The square of what is above 0."""
    TANH = "tanh"
