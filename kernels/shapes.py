"""What ops are told about a network beside its tensors, and the sum of a product's leaves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of attention in a model. Query head h reads key-value head `h * num_kv_heads // num_heads`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores, most often `head_dim ** -0.5`."""
    softcap: float = 0.0
    """Then scores are `softcap * tanh(score / softcap)`, before any is hidden; 0: they are as they are."""
    is_causal: bool = True
    """Whether a row sees no key behind its own; else all, or as many as a window lets it see before its own."""


class QueryKeyNorms(NamedTuple):
    """The RMS norms of queries and of keys, their weights as those of `rms_norm`."""

    query: Tensor
    """[D], of each head; of whole rows [H * D]."""
    key: Tensor
    """[D], or [K * D]."""
    epsilon: float
    are_of_whole_rows: bool = False
    """Whether the mean square is that of all heads of a row together."""
    follow_rotation: bool = False
    """Whether they are of what is rotated; of heads alone."""


class Activation(StrEnum):
    """A function of each number, in float32 of a number in the dtype."""

    SILU = "silu"
    """x / (1 + exp(-x))."""
    GELU_TANH = "gelu_tanh"
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))."""
    GELU_ERF = "gelu_erf"
    """x / 2 * (1 + erf(x / sqrt(2)))."""
    RELU = "relu"
    RELU2 = "relu2"
    """The square of what is above 0."""
    TANH = "tanh"


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """What is done with sums in float32 that are logits, after the bias."""

    scale: float = 1.0
    softcap: float = 0.0
    """Then they are `softcap * tanh(logit / softcap)`; 0: they are as they are."""

    @property
    def is_idle(self) -> bool:
        """Whether they stay as they are."""
        return self.scale == 1.0 and not self.softcap


AS_THEY_ARE = LogitTransform()


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Options of a packed linear layer: its activation, its logits and how its inner dimension is summed."""

    gated: bool = False
    """The first half of the rows are gates, the second half ups: products come out as `activation(gate) * up`."""
    activation: Activation | None = None
    """Applied to the products, rounded to the dtype, or to the gates, where None becomes SiLU. Not for a partial
    weight."""
    logits: LogitTransform = AS_THEY_ARE
    """Applied to `wide` results."""
    leaves: int = 1
    """Slices of in_features that are summed apart and added as `add_leaves` does: a power of two, at most 8. A
    backend that does not promise batch invariance may sum them in one."""
    partial: bool = False
    """Whether other ranks hold the rest of in_features: sums in float32 go through the group that the backend has
    joined, and the bias is added once, after them. Not for a gated weight."""

    def __post_init__(self) -> None:
        if self.gated and self.activation is None:
            object.__setattr__(self, "activation", Activation.SILU)


PLAIN_LINEAR = LinearSpec()


def add_leaves(sums: Sequence[Tensor]) -> Tensor:
    """Adds float32 sums of leaves, a power of two of them in order, as a binary tree.

    The inner dimension of a product that devices may share is cut in a power of two of equal slices, its leaves, on one
    device too. Each is summed by itself in float32; then neighbours are added, and sums of neighbours: a device that
    holds some neighbouring leaves comes to a subtree's sum, and devices in pairs to the rest of the tree. So the result
    does not depend on how many devices share a product.
    """
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
