"""Recurrences: the mixers of layers that keep a state of fixed size instead of keys and values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

# The most that the kernels (csrc/recurrent.h) hold: tokens of a convolution, and columns of a state that lie together.
MAX_CONV_WIDTH = 8
STATE_COLUMNS = 32


class RecurrentKind(StrEnum):
    GATED_DELTA = "gated_delta"
    """The gated delta rule (Qwen 3.5, Qwen3-Next)."""
    MAMBA2 = "mamba2"
    """Mamba 2 (Granite 4 H, Bamba, Nemotron H): value heads, and groups of them that share keys and queries."""
    SHORT_CONV = "short_conv"
    """A gated convolution over a few tokens (LFM2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrent:
    """A convolution over neighbouring tokens, and with heads a recurrence over its results."""

    kind: RecurrentKind
    conv_width: int
    """Tokens that the convolution sees, the row's own among them."""
    conv_features: int
    conv_bias: bool = False
    num_key_heads: int = 0
    num_value_heads: int = 0
    """Each has a state of key_dim x value_dim numbers; 0: the convolution is all."""
    key_dim: int = 0
    value_dim: int = 0
    epsilon: float = 1e-6
    """The epsilon of the gated norm of the results: of each head, or of each group of Mamba's heads."""
    in_bias: bool = False
    out_bias: bool = False

    @property
    def in_features(self) -> int:
        """The numbers of a row of the first product."""
        if self.kind is RecurrentKind.SHORT_CONV:
            return 3 * self.conv_features
        num_logits = 1 if self.kind is RecurrentKind.MAMBA2 else 2
        return self.conv_features + self.num_value_heads * (self.value_dim + num_logits)

    @property
    def out_features(self) -> int:
        """The numbers of a row that the last product reads."""
        return self.num_value_heads * self.value_dim or self.conv_features

    @property
    def num_rates(self) -> int:
        """The float32 numbers of each head: rate of decay and bias of the time step, for Mamba 2 a skip factor too."""
        return {RecurrentKind.GATED_DELTA: 2, RecurrentKind.MAMBA2: 3, RecurrentKind.SHORT_CONV: 0}[self.kind]

    @property
    def norm_features(self) -> int:
        """The weights of the gated norm; 0: there is none."""
        return self.num_value_heads * self.value_dim if self.kind is RecurrentKind.MAMBA2 else self.value_dim

    def share(self, size: int) -> Recurrent:
        """Returns one rank's part of it, if `size` ranks share the heads or the features."""
        return replace(
            self,
            conv_features=self.conv_features // size,
            num_key_heads=self.num_key_heads // size,
            num_value_heads=self.num_value_heads // size,
        )
