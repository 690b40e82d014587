"""The parameters of ops besides tensors: shapes of attention, norms, activations and options of linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def scale_width(pool_dtype: torch.dtype) -> int:
    """Returns the elements of a KV pool that hold the scale of a token's key or value of a head."""
    return torch.float32.itemsize if pool_dtype == torch.int8 else 0


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of attention in a model. Query head h reads key-value head `h * num_kv_heads // num_heads`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor of the scores, most often `head_dim ** -0.5`."""
    softcap: float = 0.0
    """If not 0, scores become `softcap * tanh(score / softcap)` before they are masked."""
    is_causal: bool = True
    """Whether a row sees no keys after its own. If false, it sees all keys, or with a sliding window as many after its
    own as before it."""


class QueryKeyNorms(NamedTuple):
    """RMS norms of queries and keys. Their weights are applied as in `Backend.rms_norm`."""

    query: Tensor
    """[D], for each head; [H * D] if `are_of_whole_rows`."""
    key: Tensor
    """[D], for each head; [K * D] if `are_of_whole_rows`."""
    epsilon: float
    are_of_whole_rows: bool = False
    """Whether the mean square is taken over all heads of a row together, not over each head."""
    follow_rotation: bool = False
    """Whether the norms come after the rotary embedding; only for norms of each head."""


class Activation(StrEnum):
    """An elementwise function, computed in float32 from numbers in the model's dtype."""

    SILU = "silu"
    """x / (1 + exp(-x))."""
    GELU_TANH = "gelu_tanh"
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))."""
    GELU_ERF = "gelu_erf"
    """x / 2 * (1 + erf(x / sqrt(2)))."""
    RELU = "relu"
    RELU2 = "relu2"
    """max(x, 0) ** 2."""
    TANH = "tanh"


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """A transform of float32 logits after the bias: first `scale`, then `softcap`."""

    scale: float = 1.0
    softcap: float = 0.0
    """If not 0, logits become `softcap * tanh(logit / softcap)`."""

    @property
    def is_idle(self) -> bool:
        """Whether the transform leaves logits unchanged."""
        return self.scale == 1.0 and not self.softcap


AS_THEY_ARE = LogitTransform()


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """Options of a packed linear layer: its activation, its logits and how its inner dimension is summed."""

    gated: bool = False
    """The first half of the rows are gates, the second half ups: the results are `activation(gate) * up`."""
    activation: Activation | None = None
    """Applied to the products after they are rounded to the dtype, or to the gates of a gated weight, where None
    becomes SiLU. Not for a partial weight."""
    logits: LogitTransform = AS_THEY_ARE
    """Applied to `wide` results."""
    leaves: int = 1
    """The number of slices of in_features that are summed separately and added as a tree (`add_leaves`): a power of
    two, at most 8. A backend that does not promise batch invariance may sum all of in_features at once."""
    partial: bool = False
    """Whether other ranks hold the rest of in_features (row parallelism): the float32 sums are all-reduced over the
    ranks that the backend has joined, then the bias is added once. Not for a gated weight."""

    def __post_init__(self) -> None:
        if self.gated and self.activation is None:
            object.__setattr__(self, "activation", Activation.SILU)


PLAIN_LINEAR = LinearSpec()


def add_leaves(sums: Sequence[Tensor]) -> Tensor:
    """Adds float32 sums of leaves, a power of two of them in order, as a binary tree.

    The inner dimension of a product is cut into a power of two of equal slices, the leaves, even on one device. The
    product over each leaf is summed separately in float32. The sums are then added as a binary tree: neighbours
    first, then the sums of neighbours. With tensor parallelism each device holds some neighbouring leaves and computes
    the sum of their subtree; the devices add these sums in pairs along the rest of the tree. So the result does not
    depend on the number of devices.
    """
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
