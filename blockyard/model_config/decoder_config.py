"""The architecture of a decoder as records: layers, embedding and head. No weights, no tensors.

A family's reader (`families`) builds it from config.json; the worker builds the network from it, and `capacity` counts
its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from blockyard.contract.models import Task
from blockyard.model_config.activation import Activation
from blockyard.model_config.names import LLAMA_NAMES, Names
from blockyard.model_config.recurrent import Recurrent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blockyard.model_config.pooling.rule import PoolingRule
    from blockyard.model_config.rotary import RotaryConfig
    from blockyard.model_config.stored_weights import StoredWeights

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DTYPES = tuple(ITEM_BYTES)


class NormKind(StrEnum):
    RMS = "rms"
    LAYER = "layer"


@dataclass(frozen=True, slots=True)
class Norm:
    kind: NormKind = NormKind.RMS
    epsilon: float = 1e-6
    offset: float = 0.0
    """Added to the weight in float32 when it is loaded."""
    has_weight: bool = True
    has_bias: bool = False
    is_wide: bool = False
    """True: multiply by the weight in float32, then round. False: round first, then multiply in the model's dtype."""

    @property
    def is_held_wide(self) -> bool:
        """Whether the norm's weights are held in float32."""
        return self.is_wide or self.kind is NormKind.LAYER


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rotary: int | None = 0
    """Index into `DecoderConfig.rotaries`; None: queries and keys are not rotated."""
    window: int | None = None
    """Size of the sliding window: keys that a query sees, its own included; None: all."""
    softcap: float = 0.0
    """Scores become `softcap * tanh(score / softcap)`; 0: no softcap."""
    qk_norm: Norm | None = None
    """Norm of each head's queries and keys before rotation; None: none."""
    norms_whole_rows: bool = False
    """Whether `qk_norm` is over all heads' features together."""
    norms_turned: bool = False
    """Whether `qk_norm` comes after rotation."""
    qkv_bias: bool = False
    output_bias: bool = False
    has_sinks: bool = False
    """Whether each head has an attention sink: one more learned score in the softmax, without a value."""
    gates_output: bool = False
    """Whether each result is multiplied by the sigmoid of a gate, which the queries' product yields too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """Two products with an activation between them."""

    inner_features: int
    activation: Activation = Activation.SILU
    is_gated: bool = True
    """The first product yields gate and up; the second is applied to `activation(gate) * up`."""
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """How experts are chosen and weighted for a row, by their scores: a softmax over one product, or its sigmoids."""

    top_k: int
    renormalises: bool
    """Whether the weights of the chosen experts are divided by their sum."""
    has_bias: bool = False
    is_sigmoid: bool = False
    has_choice_bias: bool = False
    """Whether experts are chosen by their scores and a learned bias, which does not change their weights."""
    scale: float = 1.0
    """Factor of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of gated MLPs: each row's result is the weighted sum of its chosen experts' results."""

    num_experts: int
    inner_features: int
    """Inner features of one expert."""
    router: Router
    activation: Activation = Activation.SILU
    limit: float = 0.0
    """If not 0: gates are clamped from above and ups on both sides; result: `(up + 1) * gate * sigmoid(1.702 gate)`."""
    has_bias: bool = False
    shared: Mlp | None = None
    """An MLP whose result is added to every row; None: there is none."""
    gates_shared: bool = False
    """Whether the shared MLP's result is multiplied by the sigmoid of a product with one output."""

    is_gated = True


class Placement(StrEnum):
    """The positions of a layer's norms."""

    PRE = "pre"
    """Norms before attention and before the MLP."""
    POST = "post"
    """Norms of the results of attention and MLP, before the residual addition."""
    SANDWICH = "sandwich"
    """Norms before and after both attention and MLP."""
    AFTER_SUMS = "after_sums"
    """Norms after each residual addition (post-norm, as in BERT)."""
    PRE_FEED = "pre_feed"
    """A norm before the MLP only: attention's input is normalized already."""
    PARALLEL = "parallel"
    """One norm; attention and MLP both read its result in parallel."""
    PARALLEL_TWO = "parallel_two"
    """Two norms of the same rows, one for attention and one for the MLP, which run in parallel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    mixer: Attention | Recurrent | None
    """The part that mixes the rows of a sequence: attention, or a recurrence; None: the layer has `feed` alone."""
    feed: Mlp | Experts | None
    """None: the layer has `mixer` alone. Only with `Placement.PRE`."""
    norm: Norm
    """The kind of all the layer's norms except `qk_norm`."""
    placement: Placement = Placement.PRE
    residual_scale: float = 1.0
    """Factor of attention's and MLP's results in the residual addition."""

    @property
    def mlp(self) -> Mlp | None:
        """The MLP that every row goes through: the layer's own, or the one beside its experts; None: there is none."""
        return self.feed.shared if isinstance(self.feed, Experts) else self.feed


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Learned position embeddings: a table with one row per position, added to the token embedding."""

    num_positions: int
    first_row: int = 0
    """The index of position 0's row in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Parts that only an encoder, with bidirectional attention, has."""

    embedding_norm: Norm | None = None
    num_token_types: int = 0
    """Rows of the token-type table, of which the token's row is added to its embedding; 0: there is no table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    is_tied: bool = False
    """Whether its weight is the embedding table."""
    has_bias: bool = False
    scale: float = 1.0
    """Factor of the logits."""
    softcap: float = 0.0
    """Logits become `softcap * tanh(logit / softcap)` after scaling; 0: no softcap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The architecture of a decoder, as config.json states it."""

    architecture: str = ""
    dtype_name: str = "float32"
    """The dtype that the model computes in, one of DTYPES."""
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
    """Whether `embedding_scale` is rounded to the dtype before it multiplies."""
    learned: Learned | None = None
    encoder: Encoder | None = None
    """Not None for an encoder, whose attention is bidirectional; None: attention is causal."""
    pooling: PoolingRule | None = None
    """How the rows are pooled; None: the model generates tokens by its head."""
    stored: StoredWeights | None = None
    """How the checkpoint's weights are quantized; None: they are not."""
    remarks: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Sentences for the log about parts of the checkpoint that are ignored."""

    @property
    def task(self) -> Task:
        return self.pooling.task if self.pooling else Task.GENERATE

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> Iterator[Attention]:
        """The attention of each layer that has one."""
        return (layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention))

    @property
    def attention(self) -> Attention:
        """The first attention of any layer; all have the same heads and head width."""
        return next(self.attentions)

    @property
    def recurrent(self) -> Recurrent | None:
        """The first recurrence of any layer, all have the same sizes; None: no layer has one."""
        return next((layer.mixer for layer in self.layers if isinstance(layer.mixer, Recurrent)), None)

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
    def feeds(self) -> frozenset[Mlp | Experts]:
        """The different MLPs and experts of the layers, without those that experts share."""
        return frozenset(layer.feed for layer in self.layers if layer.feed is not None)

    @property
    def inner_sizes(self) -> frozenset[int]:
        """The inner features of every MLP and expert."""
        mlps = {layer.mlp for layer in self.layers if layer.mlp is not None}
        return frozenset(feed.inner_features for feed in self.feeds | mlps)

    @property
    def intermediate_size(self) -> int:
        """The most inner features of an MLP or an expert."""
        return max(self.inner_sizes)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer with attention the size of its sliding window; None: full attention."""
        return tuple(attention.window for attention in self.attentions)

    @property
    def sliding_window(self) -> int | None:
        """The first sliding window of any layer; None: no layer has one."""
        return next((window for window in self.windows if window is not None), None)


def norms_of(layer: Layer) -> Iterable[str]:
    """Returns the norms of a layer, as field names of `Names`."""
    if layer.mixer is None or layer.feed is None:
        return ("pre_feed",) if layer.mixer is None else ("pre_attention",)
    return {
        Placement.PRE: ("pre_attention", "pre_feed"),
        Placement.POST: ("post_attention", "post_feed"),
        Placement.SANDWICH: ("pre_attention", "post_attention", "pre_feed", "post_feed"),
        Placement.AFTER_SUMS: ("post_attention", "post_feed"),
        Placement.PRE_FEED: ("pre_feed",),
        Placement.PARALLEL: ("pre_attention",),
        Placement.PARALLEL_TWO: ("pre_attention", "pre_feed"),
    }[layer.placement]


def is_widely_served(config: DecoderConfig) -> bool:
    """Returns whether kernels with a limited set of ops can compute the network.

    They lack encoders, recurrences, mixtures of experts, query and key norms after rotation, gates of attention, and
    query scales that grow with the position.
    """
    return (
        config.encoder is None
        and config.recurrent is None
        and not any(rotary.query_growth for rotary in config.rotaries)
        and all(isinstance(layer.feed, Mlp) for layer in config.layers)
        and not any(attention.norms_turned or attention.gates_output for attention in config.attentions)
    )
