"""Gemma 1, 2 and 3: norms with 1 + weight, scaled embeddings, GELU; from 2 on sandwich norms and windows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import DecoderConfig, Head, Layer, Mlp, Norm, Placement
from blockyard.model_config.families.family import Family
from blockyard.model_config.names import LLAMA_NAMES
from blockyard.model_config.reading import (
    ACTIVATIONS,
    assemble,
    attention_of,
    read_pattern,
    read_sizes,
    vary,
    windows_of,
)
from blockyard.model_config.rotary import read_rotaries, read_rotary

if TYPE_CHECKING:
    from blockyard.model_config.fields import Fields
    from blockyard.model_config.reading import Sizes

HEAD_DIM = 256
SANDWICH_NAMES = replace(
    LLAMA_NAMES,
    post_attention="post_attention_layernorm",
    pre_feed="pre_feedforward_layernorm",
    post_feed="post_feedforward_layernorm",
)


def _read(fields: Fields, activation: str) -> tuple[Sizes, Norm, Mlp]:
    fields.require("use_bidirectional_attention", False)
    sizes = read_sizes(fields, head_dim=HEAD_DIM)
    norm = Norm(epsilon=fields.number("rms_norm_eps", 1e-6, above=0.0), offset=1.0, is_wide=True)
    return (
        sizes,
        norm,
        Mlp(inner_features=sizes.inner, activation=fields.choose(activation, ACTIVATIONS, "gelu_pytorch_tanh")),
    )


def _head(fields: Fields, softcap: float = 0.0) -> Head:
    return Head(is_tied=fields.flag("tie_word_embeddings", default=True), softcap=softcap)


def _softcap(fields: Fields, name: str, default: float) -> float:
    """Reads a softcap; 0 (no softcap) if the field is null, `default` if it is missing."""
    return fields.number(name, default, above=0.0) if fields.get(name) is not None or not fields.has(name) else 0.0


def gemma(fields: Fields) -> DecoderConfig:
    sizes, norm, feed = _read(fields, "hidden_act")
    # Old files have both fields, and transformers reads only hidden_act: they must agree.
    fields.require("hidden_activation", fields.get("hidden_act"))
    rotary, max_model_len = read_rotary(fields)
    bias = fields.flag("attention_bias")
    layer = Layer(mixer=attention_of(sizes, qkv_bias=bias, output_bias=bias), feed=feed, norm=norm)
    scale = sizes.hidden_size**0.5
    layers = [layer] * sizes.num_layers
    return assemble(sizes, max_model_len, layers, [rotary], norm, head=_head(fields), embedding_scale=scale)


def gemma2(fields: Fields) -> DecoderConfig:
    sizes, norm, feed = _read(fields, "hidden_activation")
    rotary, max_model_len = read_rotary(fields)
    bias = fields.flag("attention_bias")
    attention = attention_of(
        sizes,
        scale=fields.number("query_pre_attn_scalar", 256.0, above=0.0) ** -0.5,
        softcap=_softcap(fields, "attn_logit_softcapping", 50.0),
        qkv_bias=bias,
        output_bias=bias,
    )
    layer = Layer(mixer=attention, feed=feed, norm=norm, placement=Placement.SANDWICH)
    types = read_pattern(fields, sizes.num_layers, 2)
    windows = windows_of(fields, types, max_model_len, 4096)
    head = _head(fields, _softcap(fields, "final_logit_softcapping", 30.0))
    layers = vary(layer, ({"window": window} for window in windows))
    return assemble(sizes, max_model_len, layers, [rotary], norm, head=head, embedding_scale=sizes.hidden_size**0.5)


def gemma3(fields: Fields) -> DecoderConfig:
    """Reads Gemma 3's text model."""
    # transformers' configuration has this field, but its network does not use it.
    fields.require("attn_logit_softcapping")
    sizes, norm, feed = _read(fields, "hidden_activation")
    rotaries, max_model_len = read_rotaries(fields, 1e6, 1e4, "rope_local_base_freq")
    bias = fields.flag("attention_bias")
    attention = attention_of(
        sizes,
        scale=fields.number("query_pre_attn_scalar", 256.0, above=0.0) ** -0.5,
        qk_norm=norm,
        qkv_bias=bias,
        output_bias=bias,
    )
    layer = Layer(mixer=attention, feed=feed, norm=norm, placement=Placement.SANDWICH)
    types = read_pattern(fields, sizes.num_layers, fields.integer("sliding_window_pattern", 6))
    windows = windows_of(fields, types, max_model_len, 4096)
    softcap = _softcap(fields, "final_logit_softcapping", 0.0)
    changes = ({"window": w, "rotary": int(t == "sliding_attention")} for w, t in zip(windows, types, strict=True))
    return assemble(
        sizes,
        max_model_len,
        vary(layer, changes),
        rotaries,
        norm,
        head=_head(fields, softcap),
        embedding_scale=sizes.hidden_size**0.5,
    )


FAMILIES = {
    "GemmaForCausalLM": Family("gemma", gemma),
    "Gemma2ForCausalLM": Family("gemma2", gemma2, SANDWICH_NAMES),
    "Gemma3ForCausalLM": Family("gemma3_text", gemma3, SANDWICH_NAMES),
}
