"""Cohere's Command, and StableLM: layer norms and a gated MLP, mostly parallel to attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import DecoderConfig, Head, Layer, Norm, NormKind, Placement
from blockyard.model_config.families.family import Family
from blockyard.model_config.names import LLAMA_NAMES, RowOrder
from blockyard.model_config.reading import (
    assemble,
    attention_of,
    read_feed,
    read_pattern,
    read_sizes,
    uniform,
    vary,
    windows_of,
)
from blockyard.model_config.rotary import read_rotary

if TYPE_CHECKING:
    from blockyard.model_config.fields import Fields
    from blockyard.model_config.reading import Sizes

INTERLEAVED = replace(LLAMA_NAMES, row_order=RowOrder.PAIRS_INTERLEAVED)


def cohere(fields: Fields) -> DecoderConfig:
    """Reads Cohere's Command R."""
    fields.require("use_qk_norm", False)
    sizes = read_sizes(fields)
    rotary, max_model_len = read_rotary(fields, default_theta=5e5)
    layer = _cohere_layer(fields, sizes)
    return assemble(sizes, max_model_len, [layer] * sizes.num_layers, [rotary], layer.norm, head=_cohere_head(fields))


def cohere2(fields: Fields) -> DecoderConfig:
    """Reads Command R7B and A: layers without a sliding window have no rotary embeddings."""
    sizes = read_sizes(fields)
    rotary, max_model_len = read_rotary(fields)
    layer = _cohere_layer(fields, sizes)
    types = read_pattern(fields, sizes.num_layers, fields.integer("sliding_window_pattern", 4))
    windows = windows_of(fields, types, max_model_len, 4096)
    changes = (
        {"window": w, "rotary": 0 if kind == "sliding_attention" else None}
        for w, kind in zip(windows, types, strict=True)
    )
    return assemble(sizes, max_model_len, vary(layer, changes), [rotary], layer.norm, head=_cohere_head(fields))


def _cohere_layer(fields: Fields, sizes: Sizes) -> Layer:
    norm = Norm(kind=NormKind.LAYER, epsilon=fields.number("layer_norm_eps", 1e-5, above=0.0))
    bias = fields.flag("attention_bias")
    attention = attention_of(sizes, qkv_bias=bias, output_bias=bias)
    return Layer(mixer=attention, feed=read_feed(fields, sizes), norm=norm, placement=Placement.PARALLEL)


def _cohere_head(fields: Fields) -> Head:
    return Head(is_tied=fields.flag("tie_word_embeddings", default=True), scale=fields.number("logit_scale", 0.0625))


def stablelm(fields: Fields) -> DecoderConfig:
    fields.require("qk_layernorm", False)
    sizes = read_sizes(fields, num_kv_heads=32)
    rotary, max_model_len = read_rotary(fields, share=0.25)
    norm = Norm(kind=NormKind.LAYER, epsilon=fields.number("layer_norm_eps", 1e-5, above=0.0), has_bias=True)
    is_parallel = fields.flag("use_parallel_residual")
    layer = Layer(
        mixer=attention_of(sizes, qkv_bias=fields.flag("use_qkv_bias")),
        feed=read_feed(fields, sizes),
        norm=norm,
        placement=Placement.PARALLEL if is_parallel else Placement.PRE,
    )
    return uniform(fields, sizes, max_model_len, rotary, layer)


FAMILIES = {
    "CohereForCausalLM": Family("cohere", cohere, INTERLEAVED),
    "Cohere2ForCausalLM": Family("cohere2", cohere2, INTERLEAVED),
    "StableLmForCausalLM": Family("stablelm", stablelm),
}
