"""What a decoder is made of: its layers as records, and what stands before and after them. No weights, no tensors.

A family's reader (`families`) makes it of config.json; the worker builds the network from it, and plans count it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from blockyard.contract.models import Task
from blockyard.model_config.activation import Activation
from blockyard.model_config.names import LLAMA_NAMES, Names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.model_config.pooling.rule import PoolingRule
    from blockyard.model_config.rotary import RotaryConfig
    from blockyard.model_config.stored_weights import StoredWeights

DTYPES = ("float32", "bfloat16", "float16")


class NormKind(StrEnum):
    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Norm:
    kind: NormKind = NormKind.RMS
    epsilon: float = 1e-6
    offset: float = 0.0
    """Added to the weight, in float32, when it is loaded."""
    has_weight: bool = True
    has_bias: bool = False
    is_wide: bool = False
    """The weight multiplies in float32, before the one rounding; else after it, in the model's dtype."""

    @property
    def is_held_wide(self) -> bool:
        """Whether its weights are held in float32."""
        return self.is_wide or self.kind is NormKind.LAYER


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: int | None = 0
    """Index into `DecoderConfig.rotaries`; None: positions do not turn queries and keys."""
    window: int | None = None
    """Keys that a query sees, its own among them; None: all."""
    softcap: float = 0.0
    """Scores are `softcap * tanh(score / softcap)`; 0: they are as they are."""
    qk_norm: Norm | None = None
    """Of each head's queries and keys, before they are turned."""
    norms_whole_rows: bool = False
    """Whether that norm is of all heads' numbers together."""
    norms_turned: bool = False
    """Whether that norm is of queries and keys that are turned already."""
    qkv_bias: bool = False
    output_bias: bool = False
    has_sinks: bool = False
    """Each head has a score of its own beside those of its keys, of which no value comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Two products with an activation between them."""

    inner_features: int
    activation: Activation = Activation.SILU
    is_gated: bool = True
    """The first product has gates and ups; the second multiplies `activation(gate) * up`."""
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How a row's experts are chosen, and what each counts: a softmax of one product."""

    top_k: int
    renormalises: bool
    """Whether the softmax is that of the chosen alone; else of all experts."""
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Many gated MLPs, of which each row goes through some: their weighted sum."""

    num_experts: int
    inner_features: int
    """Of one expert."""
    router: Router
    activation: Activation = Activation.SILU
    limit: float = 0.0
    """If not 0, gates are cut there, ups on both sides, and the product is `(up + 1) * gate * sigmoid(1.702 gate)`."""
    has_bias: bool = False

    is_gated = True


class Placement(StrEnum):
    """Where a layer's norms stand."""

    PRE = "pre"
    """Before attention and before the MLP."""
    POST = "post"
    """After each, before its result is added."""
    SANDWICH = "sandwich"
    """Before and after each."""
    AFTER_SUMS = "after_sums"
    """After the sum of attention and what it read, and after that of the MLP and what it read."""
    PRE_FEED = "pre_feed"
    """Before the MLP alone: what attention reads is normed already."""
    PARALLEL = "parallel"
    """One before both, which read the same rows."""
    PARALLEL_TWO = "parallel_two"
    """One for each, of the same rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    attention: Attention
    feed: Mlp | Experts
    norm: Norm
    """Of all its norms but those of queries and keys."""
    placement: Placement = Placement.PRE
    residual_scale: float = 1.0
    """Factor of what attention and MLP add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Positions that have a row of a table each, which is added to the embedding."""

    num_positions: int
    first_row: int = 0
    """The table's row of position 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """What a network has whose rows see those behind them too."""

    embedding_norm: Norm | None = None
    num_token_types: int = 0
    """Rows of a table of which one is added to each row of the embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    is_tied: bool = False
    """It is the embedding's table."""
    has_bias: bool = False
    scale: float = 1.0
    """Factor of the logits."""
    softcap: float = 0.0
    """Then they are `softcap * tanh(logit / softcap)`; 0: they are as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The architecture of a decoder, as config.json states it."""

    architecture: str = ""
    dtype_name: str = "float32"
    """What the model computes in, one of DTYPES."""
    vocab_size: int
    hidden_size: int
    max_model_len: int
    layers: tuple[Layer, ...]
    rotaries: tuple[RotaryConfig, ...]
    final_norm: Norm | None
    head: Head
    names: Names = field(default=LLAMA_NAMES, repr=False)
    embedding_scale: float = 1.0
    """Factor of the embedding's rows."""
    rounds_embedding_scale: bool = True
    """Whether that is rounded to the dtype before it multiplies."""
    learned: Learned | None = None
    encoder: Encoder | None = None
    """None: rows see none behind them."""
    pooling: PoolingRule | None = None
    """What is made of its rows instead of tokens; None: tokens are, and its head makes logits."""
    stored: StoredWeights | None = None
    """How the checkpoint has quantized its weights; None: it has not."""
    remarks: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Sentences for the log: what was passed over."""

    @property
    def task(self) -> Task:
        return self.pooling.task if self.pooling else Task.GENERATE

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> Attention:
        """The first layer's attention: heads and their width are those of all layers."""
        return self.layers[0].attention

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def intermediate_size(self) -> int:
        """Inner features of an MLP, or of an expert: those of all layers."""
        return self.layers[0].feed.inner_features

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer the keys that a query sees, its own among them; None: all."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one; None where no layer has."""
        return next((window for window in self.windows if window is not None), None)


def norms_of(placement: Placement) -> Iterable[str]:
    """Returns which norms a layer has, by their fields of `Names`."""
    return {
        Placement.PRE: ("pre_attention", "pre_feed"),
        Placement.POST: ("post_attention", "post_feed"),
        Placement.SANDWICH: ("pre_attention", "post_attention", "pre_feed", "post_feed"),
        Placement.AFTER_SUMS: ("post_attention", "post_feed"),
        Placement.PRE_FEED: ("pre_feed",),
        Placement.PARALLEL: ("pre_attention",),
        Placement.PARALLEL_TWO: ("pre_attention", "pre_feed"),
    }[placement]


def is_widely_served(config: DecoderConfig) -> bool:
    """Returns whether kernels that are not complete have all its ops.

    It is no encoder, no layer is a mixture of experts, and queries and keys are normed before they are turned, with no
    factor that grows with the position.
    """
    return (
        config.encoder is None
        and not any(rotary.query_growth for rotary in config.rotaries)
        and all(isinstance(layer.feed, Mlp) and not layer.attention.norms_turned for layer in config.layers)
    )
