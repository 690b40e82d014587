"""Mixtures of experts: Mixtral, Qwen 3 MoE, OLMoE, Granite MoE and gpt-oss."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockyard.model_config.decoder_config import DecoderConfig, Experts, Head, Layer, Router
from blockyard.model_config.families.family import Family
from blockyard.model_config.families.granite import granite
from blockyard.model_config.names import LLAMA_NAMES, ExpertLayout, ExpertNames
from blockyard.model_config.reading import (
    ACTIVATIONS,
    assemble,
    attention_of,
    read_pattern,
    read_rms,
    read_sizes,
    read_window,
    uniform,
    vary,
    windows_of,
)
from blockyard.model_config.rotary import read_rotary

if TYPE_CHECKING:
    from blockyard.model_config.fields import Fields


def read_experts(
    fields: Fields, inner: int, *, renormalises: bool, has_bias: bool = False, router: Any = None, **more: Any
) -> Experts:
    """Reads the experts; their number may be in either of two fields.

    Args:
        fields: the fields.
        inner: inner features of an expert.
        renormalises: see `Router`.
        has_bias: whether the experts and the router have biases.
        router: further fields of `Router`, by name; None: there are none.
        more: further fields of `Experts`.
    """
    counts = {fields.get(name) for name in ("num_experts", "num_local_experts")} - {None}
    if len(counts) > 1:
        fields.refuse("num_experts", "config.json: num_experts and num_local_experts differ")
    name = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    num_experts = fields.integer(name, most=2**15)
    top_k = fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        problem = f"config.json: num_experts_per_tok ({top_k}) is more than {name} ({num_experts})"
        fields.refuse("num_experts_per_tok", problem)
    if "activation" not in more:
        more["activation"] = fields.choose("hidden_act", ACTIVATIONS, "silu")
    routing = Router(top_k=top_k, renormalises=renormalises, has_bias=has_bias, **(router or {}))
    return Experts(num_experts=num_experts, inner_features=inner, router=routing, has_bias=has_bias, **more)


def mixtral(fields: Fields) -> DecoderConfig:
    sizes, norm = read_sizes(fields, num_kv_heads=8), read_rms(fields, 1e-5)
    rotary, max_model_len = read_rotary(fields, default_theta=1e6)
    attention = attention_of(sizes, window=read_window(fields, max_model_len))
    layer = Layer(mixer=attention, feed=read_experts(fields, sizes.inner, renormalises=True), norm=norm)
    return uniform(fields, sizes, max_model_len, rotary, layer)


def qwen3_moe(fields: Fields) -> DecoderConfig:
    """Reads Qwen 3 MoE; refuses models in which some layers have no experts."""
    sizes, norm = read_sizes(fields, num_kv_heads=4), read_rms(fields)
    rotary, max_model_len = read_rotary(fields)
    fields.require("decoder_sparse_step", 1)
    fields.require("mlp_only_layers", [])
    # transformers gives every layer the window, whatever max_window_layers says.
    window = read_window(fields, max_model_len)
    has_windows = fields.flag("use_sliding_window")
    if has_windows and not fields.has("sliding_window"):
        fields.refuse("sliding_window", "config.json has use_sliding_window, and no sliding_window")
    fields.get("max_window_layers")
    bias = fields.flag("attention_bias")
    attention = attention_of(
        sizes, qk_norm=norm, qkv_bias=bias, output_bias=bias, window=window if has_windows else None
    )
    inner, renormalises = fields.integer("moe_intermediate_size", 768), fields.flag("norm_topk_prob")
    layer = Layer(mixer=attention, feed=read_experts(fields, inner, renormalises=renormalises), norm=norm)
    return uniform(fields, sizes, max_model_len, rotary, layer)


def olmoe(fields: Fields) -> DecoderConfig:
    fields.require("clip_qkv")
    sizes, norm = read_sizes(fields), read_rms(fields, 1e-5)
    rotary, max_model_len = read_rotary(fields)
    bias = fields.flag("attention_bias")
    if sizes.head_dim * sizes.num_heads != sizes.hidden_size:
        fields.refuse("head_dim", "config.json: head_dim must be hidden_size / num_attention_heads")
    attention = attention_of(sizes, qkv_bias=bias, output_bias=bias, qk_norm=norm, norms_whole_rows=True)
    feed = read_experts(fields, sizes.inner, renormalises=fields.flag("norm_topk_prob"))
    return uniform(fields, sizes, max_model_len, rotary, Layer(mixer=attention, feed=feed, norm=norm))


def granite_moe(fields: Fields) -> DecoderConfig:
    """Reads Granite MoE: Granite with experts."""
    dense = granite(fields)
    feed = read_experts(fields, dense.intermediate_size, renormalises=True)
    return replace(dense, layers=tuple(replace(layer, feed=feed) for layer in dense.layers))


def gpt_oss(fields: Fields) -> DecoderConfig:
    sizes, norm = read_sizes(fields, head_dim=64, num_kv_heads=8), read_rms(fields, 1e-5, is_wide=True)
    if not (fields.get("rope_parameters") or fields.get("rope_scaling")):
        fields.refuse("rope_parameters", "config.json has neither rope_parameters nor rope_scaling")
    rotary, max_model_len = read_rotary(fields, default_theta=1.5e5)
    fields.require("hidden_act", "silu")
    fields.require("swiglu_alpha", 1.702)
    limit, bias = fields.number("swiglu_limit", 7.0, above=0.0), fields.flag("attention_bias", default=True)
    types = read_pattern(fields, sizes.num_layers, 2)
    windows = windows_of(fields, types, max_model_len, 128)
    attention = attention_of(sizes, qkv_bias=bias, output_bias=bias, has_sinks=True)
    feed = read_experts(fields, sizes.inner, renormalises=True, has_bias=True, limit=limit)
    layer = Layer(mixer=attention, feed=feed, norm=norm)
    layers = vary(layer, ({"window": window} for window in windows))
    head = Head(is_tied=fields.flag("tie_word_embeddings"))
    return assemble(sizes, max_model_len, layers, [rotary], norm, head=head)


_MIXTRAL = replace(
    LLAMA_NAMES,
    experts=ExpertNames(
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{}.w1.weight",
        up="block_sparse_moe.experts.{}.w3.weight",
        down="block_sparse_moe.experts.{}.w2.weight",
    ),
)
GRANITE_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    gate="block_sparse_moe.input_linear.weight",
    up="block_sparse_moe.input_linear.weight",
    down="block_sparse_moe.output_linear.weight",
    layout=ExpertLayout.STACKED,
)
_GPT_OSS = replace(
    LLAMA_NAMES,
    experts=ExpertNames(
        router="mlp.router",
        gate="mlp.experts.gate_up_proj",
        up="mlp.experts.gate_up_proj",
        down="mlp.experts.down_proj",
        layout=ExpertLayout.GATE_UP_INTERLEAVED,
    ),
)
FAMILIES = {
    "MixtralForCausalLM": Family("mixtral", mixtral, _MIXTRAL),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qwen3_moe),
    "OlmoeForCausalLM": Family("olmoe", olmoe),
    "GraniteMoeForCausalLM": Family("granitemoe", granite_moe, replace(LLAMA_NAMES, experts=GRANITE_EXPERTS)),
    "GptOssForCausalLM": Family("gpt_oss", gpt_oss, _GPT_OSS, unpacked="mxfp4"),
}
