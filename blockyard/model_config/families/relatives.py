"""Relatives of Llama with other factors, rotary embeddings, biases or storage layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import DecoderConfig, Head, Layer, Mlp, Placement
from blockyard.model_config.families.family import Family
from blockyard.model_config.names import LLAMA_NAMES, RowOrder
from blockyard.model_config.reading import (
    ACTIVATIONS,
    assemble,
    attention_of,
    read_feed,
    read_pattern,
    read_rms,
    read_sizes,
    read_window,
    uniform,
    vary,
    windows_of,
)
from blockyard.model_config.rotary import COMMON_KINDS, read_rotary

if TYPE_CHECKING:
    from blockyard.model_config.fields import Fields

INTERLEAVED = replace(LLAMA_NAMES, row_order=RowOrder.PAIRS_INTERLEAVED)
# "su" and "yarn" are the names that older files have for longrope.
_PHI3_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
_FUSED_MLP = {"gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj"}


def smollm3(fields: Fields) -> DecoderConfig:
    """Reads SmolLM 3: by default every fourth layer has no rotary embeddings."""
    sizes, norm = read_sizes(fields, num_kv_heads=4), read_rms(fields)
    rotary, max_model_len = read_rotary(fields, default_theta=2e6)
    count, every = sizes.num_layers, fields.integer("no_rope_layer_interval", 4)
    turns = fields.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(count)]
    if not isinstance(turns, list) or len(turns) != count or any(turn not in (0, 1) for turn in turns):
        fields.refuse("no_rope_layers", "config.json: no_rope_layers must have a 0 or 1 for each layer")
        turns = [1] * count
    is_used = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
    own = ["full_attention" if turn or not is_used else "sliding_attention" for turn in turns]
    types = read_pattern(fields, count, 1) if fields.get("layer_types") is not None else own
    window = read_window(fields, max_model_len)
    windows = [window if is_used and kind == "sliding_attention" else None for kind in types]
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    layer = Layer(
        mixer=attention_of(sizes, qkv_bias=bias, output_bias=bias),
        feed=read_feed(fields, sizes, has_bias=mlp_bias),
        norm=norm,
    )
    changes = ({"window": w, "rotary": 0 if turn else None} for w, turn in zip(windows, turns, strict=True))
    head = Head(is_tied=fields.flag("tie_word_embeddings", default=True))
    return assemble(sizes, max_model_len, vary(layer, changes), [rotary], norm, head=head)


def phi3(fields: Fields) -> DecoderConfig:
    """Reads Phi 3 and 4."""
    sizes = read_sizes(fields)
    rotary, max_model_len = read_rotary(fields, share=1.0, kinds=_PHI3_KINDS, original_length=4096)
    norm = read_rms(fields, 1e-5)
    attention = attention_of(sizes, window=read_window(fields, max_model_len))
    layer = Layer(mixer=attention, feed=read_feed(fields, sizes), norm=norm)
    return uniform(fields, sizes, max_model_len, rotary, layer)


def glm(fields: Fields, placement: Placement) -> DecoderConfig:
    """Reads GLM-4 9B (placement PRE) and GLM-4 0414 (placement SANDWICH)."""
    sizes = read_sizes(fields, head_dim=128, num_kv_heads=2)
    rotary, max_model_len = read_rotary(fields, share=0.5)
    norm = read_rms(fields, 1.5625e-7)
    attention = attention_of(sizes, qkv_bias=fields.flag("attention_bias", default=True))
    layer = Layer(mixer=attention, feed=read_feed(fields, sizes), norm=norm, placement=placement)
    return uniform(fields, sizes, max_model_len, rotary, layer)


def ernie(fields: Fields) -> DecoderConfig:
    """Reads Ernie 4.5, dense."""
    sizes = read_sizes(fields, head_dim=None if fields.has("head_dim") else 128, num_kv_heads=2)
    rotary, max_model_len = read_rotary(fields, default_theta=5e5)
    norm, bias = read_rms(fields, 1e-5), fields.flag("use_bias")
    layer = Layer(
        mixer=attention_of(sizes, qkv_bias=bias, output_bias=bias),
        feed=read_feed(fields, sizes, has_bias=bias),
        norm=norm,
    )
    return uniform(fields, sizes, max_model_len, rotary, layer, is_tied=True)


def seed_oss(fields: Fields) -> DecoderConfig:
    head_dim = None if fields.has("head_dim") else 128
    sizes, norm = read_sizes(fields, head_dim=head_dim, num_kv_heads=8), read_rms(fields)
    rotary, max_model_len = read_rotary(fields)
    attention = attention_of(
        sizes,
        qkv_bias=fields.flag("attention_bias", default=True),
        output_bias=fields.flag("attention_out_bias"),
    )
    feed = read_feed(fields, sizes, has_bias=fields.flag("mlp_bias"))
    layer = Layer(mixer=attention, feed=feed, norm=norm)
    return uniform(fields, sizes, max_model_len, rotary, layer)


def arcee(fields: Fields) -> DecoderConfig:
    """Reads Arcee: an ungated MLP."""
    sizes, norm = read_sizes(fields), read_rms(fields, 1e-5)
    rotary, max_model_len = read_rotary(fields)
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    activation = fields.choose("hidden_act", ACTIVATIONS, "relu2")
    feed = Mlp(inner_features=sizes.inner, activation=activation, is_gated=False, has_bias=mlp_bias)
    layer = Layer(mixer=attention_of(sizes, qkv_bias=bias, output_bias=bias), feed=feed, norm=norm)
    return uniform(fields, sizes, max_model_len, rotary, layer)


def ministral(fields: Fields) -> DecoderConfig:
    """Reads Ministral: `layer_types` says which layers have a sliding window; by default all do."""
    if fields.get("head_dim") is None:
        fields.refuse("head_dim", "config.json has no head_dim, which a Ministral needs")
    sizes, norm = read_sizes(fields, num_kv_heads=8), read_rms(fields)
    rotary, max_model_len = read_rotary(fields)
    is_null = fields.has("sliding_window") and fields.get("sliding_window") is None
    every = 1 if is_null else sizes.num_layers + 1
    types = read_pattern(fields, sizes.num_layers, every)
    windows = windows_of(fields, types, max_model_len, 4096)
    layer = Layer(mixer=attention_of(sizes), feed=read_feed(fields, sizes), norm=norm)
    head = Head(is_tied=fields.flag("tie_word_embeddings"))
    layers = vary(layer, ({"window": window} for window in windows))
    return assemble(sizes, max_model_len, layers, [rotary], norm, head=head)


def ministral3(fields: Fields) -> DecoderConfig:
    """Reads Ministral 3: queries are scaled by their position."""
    if fields.get("rope_parameters") is None:
        fields.refuse("rope_parameters", "config.json has no rope_parameters, which a Ministral 3 needs")
    sizes, norm = (
        read_sizes(fields, head_dim=None if fields.has("head_dim") else 128, num_kv_heads=8),
        read_rms(fields, 1e-5),
    )
    rotary, max_model_len = read_rotary(fields, grows_queries=True)
    attention = attention_of(sizes, window=read_window(fields, max_model_len))
    layer = Layer(mixer=attention, feed=read_feed(fields, sizes), norm=norm)
    return uniform(fields, sizes, max_model_len, rotary, layer)


def hunyuan(fields: Fields) -> DecoderConfig:
    """Reads Hunyuan, dense: query and key norms come after rotation."""
    sizes, norm, bias = read_sizes(fields), read_rms(fields, 1e-5), fields.flag("attention_bias")
    rotary, max_model_len = read_rotary(fields, kinds={**COMMON_KINDS, "dynamic": "ntk_alpha"})
    attention = attention_of(sizes, qkv_bias=bias, output_bias=bias, qk_norm=norm, norms_turned=True)
    layer = Layer(mixer=attention, feed=read_feed(fields, sizes), norm=norm)
    return uniform(fields, sizes, max_model_len, rotary, layer)


def helium(fields: Fields) -> DecoderConfig:
    sizes, norm = read_sizes(fields, head_dim=128, num_kv_heads=20), read_rms(fields, 1e-8, is_wide=True)
    rotary, max_model_len = read_rotary(fields, default_theta=1e5)
    if sizes.num_heads * sizes.head_dim != sizes.hidden_size:
        fields.refuse("head_dim", "config.json: head_dim times num_attention_heads must be hidden_size")
    attention = attention_of(sizes, qkv_bias=fields.flag("attention_bias"))
    feed = read_feed(fields, sizes, has_bias=fields.flag("mlp_bias"))
    layer = Layer(mixer=attention, feed=feed, norm=norm)
    return uniform(fields, sizes, max_model_len, rotary, layer)


FAMILIES = {
    "SmolLM3ForCausalLM": Family("smollm3", smollm3),
    "Phi3ForCausalLM": Family(
        "phi3",
        phi3,
        replace(LLAMA_NAMES, **_FUSED_MLP, **dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj")),
    ),
    "GlmForCausalLM": Family("glm", lambda fields: glm(fields, Placement.PRE), replace(INTERLEAVED, **_FUSED_MLP)),
    "Glm4ForCausalLM": Family(
        "glm4",
        lambda fields: glm(fields, Placement.SANDWICH),
        replace(
            INTERLEAVED,
            **_FUSED_MLP,
            post_attention="post_self_attn_layernorm",
            pre_feed="post_attention_layernorm",
            post_feed="post_mlp_layernorm",
        ),
    ),
    "Ernie4_5ForCausalLM": Family("ernie4_5", ernie, INTERLEAVED),
    "SeedOssForCausalLM": Family("seed_oss", seed_oss),
    "ArceeForCausalLM": Family("arcee", arcee, replace(LLAMA_NAMES, gate="")),
    "MinistralForCausalLM": Family("ministral", ministral),
    "Ministral3ForCausalLM": Family("ministral3", ministral3),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense",
        hunyuan,
        replace(LLAMA_NAMES, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"),
    ),
    "HeliumForCausalLM": Family("helium", helium, INTERLEAVED),
}
