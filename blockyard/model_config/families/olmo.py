"""OLMo 1, 2 and 3, and Exaone 4: norms without weights, or post-norms only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import DecoderConfig, Head, Layer, Norm, NormKind, Placement
from blockyard.model_config.families.family import Family
from blockyard.model_config.names import LLAMA_NAMES
from blockyard.model_config.reading import (
    assemble,
    attention_of,
    read_feed,
    read_pattern,
    read_rms,
    read_sizes,
    uniform,
    vary,
    windows_of,
)
from blockyard.model_config.rotary import read_rotaries, read_rotary

if TYPE_CHECKING:
    from blockyard.model_config.fields import Fields
    from blockyard.model_config.reading import Sizes

_POST = replace(
    LLAMA_NAMES, post_attention="post_attention_layernorm", post_feed="post_feedforward_layernorm", pre_feed=""
)


def _olmo(fields: Fields, sizes: Sizes, norm: Norm) -> Layer:
    bias = fields.flag("attention_bias")
    attention = attention_of(sizes, qkv_bias=bias, output_bias=bias, qk_norm=norm, norms_whole_rows=True)
    return Layer(mixer=attention, feed=read_feed(fields, sizes), norm=norm, placement=Placement.POST)


def olmo(fields: Fields) -> DecoderConfig:
    """Reads OLMo 1: norms without weights."""
    fields.require("clip_qkv")
    sizes, norm = read_sizes(fields), Norm(kind=NormKind.LAYER, epsilon=1e-5, has_weight=False)
    rotary, max_model_len = read_rotary(fields)
    bias = fields.flag("attention_bias")
    attention = attention_of(sizes, qkv_bias=bias, output_bias=bias)
    layer = Layer(mixer=attention, feed=read_feed(fields, sizes), norm=norm)
    return uniform(fields, sizes, max_model_len, rotary, layer)


def olmo2(fields: Fields) -> DecoderConfig:
    sizes, norm = read_sizes(fields), read_rms(fields, 1e-5, is_wide=True)
    rotary, max_model_len = read_rotary(fields)
    layers = [_olmo(fields, sizes, norm)] * sizes.num_layers
    return assemble(sizes, max_model_len, layers, [rotary], norm, head=Head(is_tied=fields.flag("tie_word_embeddings")))


def olmo3(fields: Fields) -> DecoderConfig:
    sizes, norm = read_sizes(fields), read_rms(fields, 1e-5, is_wide=True)
    rotaries, max_model_len = read_rotaries(fields, 5e5, 5e5)
    types = read_pattern(fields, sizes.num_layers, 4)
    windows = windows_of(fields, types, max_model_len, 4096)
    changes = ({"window": w, "rotary": int(t == "sliding_attention")} for w, t in zip(windows, types, strict=True))
    layers = vary(_olmo(fields, sizes, norm), changes)
    return assemble(sizes, max_model_len, layers, rotaries, norm, head=Head(is_tied=fields.flag("tie_word_embeddings")))


def exaone4(fields: Fields) -> DecoderConfig:
    """Reads Exaone 4: if it has sliding windows, full-attention layers have no rotary embeddings."""
    sizes, norm = read_sizes(fields, num_kv_heads=32), read_rms(fields, 1e-5)
    rotary, max_model_len = read_rotary(fields)
    has_windows = not fields.has("sliding_window") or fields.get("sliding_window") is not None
    pattern = fields.get("sliding_window_pattern")
    every = fields.integer("sliding_window_pattern", 4) if has_windows and not isinstance(pattern, str) else 1
    if has_windows and isinstance(pattern, str) and fields.get("layer_types") is None:
        fields.refuse(
            "sliding_window_pattern", "config.json: sliding_window_pattern is a text, and must be layer_types"
        )
    types = read_pattern(fields, sizes.num_layers, every)
    windows = windows_of(fields, types, max_model_len, 4096)
    attention = attention_of(sizes, qk_norm=norm)
    layer = Layer(mixer=attention, feed=read_feed(fields, sizes), norm=norm, placement=Placement.POST)
    turns = [not has_windows or kind == "sliding_attention" for kind in types]
    changes = ({"window": w, "rotary": 0 if turn else None} for w, turn in zip(windows, turns, strict=True))
    head = Head(is_tied=fields.flag("tie_word_embeddings"))
    return assemble(sizes, max_model_len, vary(layer, changes), [rotary], norm, head=head)


FAMILIES = {
    "OlmoForCausalLM": Family("olmo", olmo),
    "Olmo2ForCausalLM": Family("olmo2", olmo2, _POST),
    "Olmo3ForCausalLM": Family("olmo3", olmo3, _POST),
    "Exaone4ForCausalLM": Family("exaone4", exaone4, _POST),
}
