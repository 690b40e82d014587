"""The ops of layers with a state, documented once for all backends. Shapes: see `blockyard_kernels.ops`.

Such a layer knows of a sequence's earlier rows by a state of fixed size. The state is a number of units: the
convolution's tail (its last inputs, in the model's dtype), and a float32 matrix of each head. Units lie in the
sequence's fixed blocks (`AttentionBatch.fixed_tables`), none across two blocks.

A recurrence takes one token after another, in float32, and never rounds a state. So results do not depend on how a
sequence's tokens are divided into steps: a prefill computes what decoding token by token would.

Further letters: V value heads, K key heads (value head v reads key head `v * K // V`), N key_dim, D value_dim, F
features of the convolution, w its width.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

UNIT_COLUMNS = 32
"""A head's matrix is stored as [D / UNIT_COLUMNS, N, UNIT_COLUMNS]."""


class RecurrentKind(StrEnum):
    GATED_DELTA = "gated_delta"
    MAMBA2 = "mamba2"
    SHORT_CONV = "short_conv"


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The sizes of a recurrence on one rank."""

    kind: RecurrentKind
    conv_features: int
    conv_width: int
    num_key_heads: int = 0
    num_value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    epsilon: float = 0.0
    """The epsilon of the gated norm."""

    @property
    def in_features(self) -> int:
        """The numbers of an input row."""
        if self.kind is RecurrentKind.SHORT_CONV:
            return 3 * self.conv_features
        num_logits = 1 if self.kind is RecurrentKind.MAMBA2 else 2
        return self.conv_features + self.num_value_heads * (self.value_dim + num_logits)

    @property
    def out_features(self) -> int:
        """The numbers of a result row."""
        return self.num_value_heads * self.value_dim or self.conv_features


class RecurrentWeights(NamedTuple):
    """The weights of a recurrence besides its products."""

    conv: Tensor
    """[F, w]: the last column multiplies the row itself, the one before it the row before."""
    conv_bias: Tensor | None = None
    """[F]."""
    decay_log: Tensor | None = None
    """[V] float32: the logarithm of each head's rate of decay."""
    step_bias: Tensor | None = None
    """[V] float32: added to the time steps."""
    norm: Tensor | None = None
    """[D], of MAMBA2 [V * D]: the weight of the gated norm."""
    skip: Tensor | None = None
    """[V] float32: of MAMBA2, the factor of the values that are added to the results."""


class StateBatch(Protocol):
    """The part of `AttentionBatch` that a recurrence reads."""

    @property
    def num_new_tokens(self) -> npt.NDArray[np.int64]: ...

    @property
    def seq_lens(self) -> npt.NDArray[np.int64]: ...

    @property
    def fixed_tables(self) -> npt.NDArray[np.int64]: ...


class RecurrentOps(Protocol):
    def gate(self, rows: Tensor, gates: Tensor) -> Tensor:
        """Computes `rows * sigmoid(gates)` in float32, rounded once -> [T, width].

        Args:
            rows: [T, width], results of attention.
            gates: [T, width], a part of longer rows; or [T, 1]: one gate of a whole row.
        """
        ...

    def mix(
        self,
        rows: Tensor,
        weights: RecurrentWeights,
        batch: StateBatch,
        kv_pool: Tensor,
        places: tuple[int, ...],
        shape: RecurrentShape,
    ) -> Tensor:
        """Mixes each row with the earlier rows of its sequence -> [T, shape.out_features].

        GATED_DELTA: rows [T, F + V * D + 2 * V] have the convolution's inputs (queries [K, N], keys [K, N], values
        [V, D]), gates [V, D], update logits [V] and time steps [V]. The convolution's results pass SiLU and are
        rounded. Queries and keys are divided by their lengths, queries by sqrt(N) as well. A head's state S [N, D]
        becomes

            S = exp(-exp(decay_log) * softplus(step + step_bias)) * S
            S = S + key (sigmoid(update) * (value - S^T key))^T

        and gives S^T query, which is rounded, normalised by its root mean square, and multiplied by SiLU of the gate.
        Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.

        MAMBA2: rows [T, F + V * D + V] have the convolution's inputs (values [V, D], keys [K, N], queries [K, N], which
        Mamba calls x, B and C), gates [V, D] and time steps [V]. The convolution's results pass SiLU and are rounded.
        With d = softplus(step + step_bias), a head's state becomes

            S = exp(-exp(decay_log) * d) * S + key (d * value)^T

        and gives S^T query + skip * value. The heads' results times SiLU of their gates are normalised in K groups by
        their root mean square, multiplied by the weight, and rounded once.
        Source: Dao, Gu, "Transformers are SSMs", 2024.

        SHORT_CONV: rows [T, 3 * F] have gates B, gates C and inputs x; the results are `C * conv(B * x)`, with B * x
        and the convolution's results rounded.

        Args:
            rows: [T, shape.in_features].
            weights: the weights.
            batch: the step, from `Backend.plan_attention`, with a row of `fixed_tables` for each sequence. A sequence's
                first row, at position 0, begins with a state of zeros, whatever its blocks hold.
            kv_pool: the pool that the fixed blocks belong to; the units of sequences with new rows are written.
            places: where the tail and then each head's matrix begin, in bytes, as if a sequence's fixed blocks lay one
                behind the other.
            shape: the sizes.
        """
        ...
