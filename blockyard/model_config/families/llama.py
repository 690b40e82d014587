"""Llama and its close relatives: pre-norms, a gated MLP and rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from blockyard.model_config.decoder_config import Attention, DecoderConfig, Head, Layer, Mlp, Norm
from blockyard.model_config.families.family import Family
from blockyard.model_config.reading import ACTIVATIONS, Windows, read_sizes, read_windows
from blockyard.model_config.rotary import read_rotary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.model_config.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties that the architecture fixes and config.json does not state."""

    qkv_bias: bool = False
    """Q, K and V always have biases, the output projection never; `attention_bias` is ignored."""
    reads_attention_bias: bool = False
    """Whether `attention_bias` adds biases to the projections of queries, keys, values and the output."""
    reads_mlp_bias: bool = False
    """Whether `mlp_bias` adds biases to all projections of the MLP."""
    qk_norm: bool = False
    """Queries and keys are normalised for each head."""
    windows: Windows = Windows.NEVER
    head_dim: int | None = None
    """The default if config.json has no `head_dim`; None: hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """The default if config.json has no `num_key_value_heads`; None: num_attention_heads."""
    epsilon: float = 1e-6
    """The default if config.json has no `rms_norm_eps`."""
    positions: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments for `read_rotary`."""


def read_llama(fields: Fields, traits: Traits) -> DecoderConfig:
    """Reads a network of Llama's kind."""
    sizes = read_sizes(fields, head_dim=traits.head_dim, num_kv_heads=traits.num_kv_heads)
    rotary, max_model_len = read_rotary(fields, **traits.positions)
    norm = Norm(epsilon=fields.number("rms_norm_eps", traits.epsilon, above=0.0))
    qkv_bias, output_bias, mlp_bias = _read_biases(fields, traits)
    attention = Attention(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5,
        qk_norm=norm if traits.qk_norm else None,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
    )
    activation = fields.choose("hidden_act", ACTIVATIONS, "silu")
    feed = Mlp(inner_features=sizes.inner, activation=activation, has_bias=mlp_bias)
    windows = read_windows(fields, traits.windows, sizes.num_layers, max_model_len)
    return DecoderConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        max_model_len=max_model_len,
        layers=tuple(Layer(mixer=replace(attention, window=window), feed=feed, norm=norm) for window in windows),
        rotaries=(rotary,),
        final_norm=norm,
        head=Head(is_tied=fields.flag("tie_word_embeddings")),
    )


def _read_biases(fields: Fields, traits: Traits) -> tuple[bool, bool, bool]:
    attention_bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    unread = {
        "attention_bias": attention_bias and not (traits.reads_attention_bias or traits.qkv_bias),
        "mlp_bias": mlp_bias and not traits.reads_mlp_bias,
    }
    for name in (name for name, is_unread in unread.items() if is_unread):
        fields.refuse(name, f"config.json asks for {name}, which this architecture does not have")
    has_attention_bias = traits.reads_attention_bias and attention_bias
    return traits.qkv_bias or has_attention_bias, has_attention_bias, traits.reads_mlp_bias and mlp_bias


def _family(model_type: str, traits: Traits) -> Family:
    return Family(model_type, partial(read_llama, traits=traits))


FAMILIES = {
    "LlamaForCausalLM": _family("llama", Traits(reads_attention_bias=True, reads_mlp_bias=True)),
    "MistralForCausalLM": _family("mistral", Traits(windows=Windows.ALWAYS, num_kv_heads=8)),
    "Qwen2ForCausalLM": _family("qwen2", Traits(qkv_bias=True, windows=Windows.FLAGGED, num_kv_heads=32)),
    "Qwen3ForCausalLM": _family(
        "qwen3",
        Traits(reads_attention_bias=True, qk_norm=True, windows=Windows.FLAGGED, head_dim=128, num_kv_heads=32),
    ),
}
