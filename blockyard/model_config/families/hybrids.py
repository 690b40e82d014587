"""Networks with attention in some layers and a recurrence in the others: Qwen 3.5, Qwen3-Next and LFM2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import Activation, DecoderConfig, Head, Layer, Mlp, Norm
from blockyard.model_config.families.family import Family
from blockyard.model_config.families.mixtures import read_experts
from blockyard.model_config.names import LLAMA_NAMES, ExpertLayout, ExpertNames, RecurrentNames
from blockyard.model_config.reading import (
    ACTIVATIONS,
    assemble,
    attention_of,
    read_feed,
    read_layer_types,
    read_rms,
    read_sizes,
)
from blockyard.model_config.recurrent import MAX_CONV_WIDTH, STATE_COLUMNS, Recurrent, RecurrentKind
from blockyard.model_config.rotary import COMMON_KINDS, read_rotary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.model_config.decoder_config import Experts
    from blockyard.model_config.fields import Fields
    from blockyard.model_config.reading import Sizes

# Multimodal positions have three parts, which are equal in a text-only prompt.
_KINDS = {**COMMON_KINDS, "mrope": "default"}


def qwen3_5(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(fields, head_dim=256, num_kv_heads=4)
    return _gated_delta_network(fields, sizes, [read_feed(fields, sizes)] * sizes.num_layers)


def qwen3_5_moe(fields: Fields) -> DecoderConfig:
    experts = _read_shared_experts(fields, renormalises=True)
    sizes = read_sizes(fields, head_dim=256, num_kv_heads=2, inner=experts.inner_features)
    return _gated_delta_network(fields, sizes, [experts] * sizes.num_layers)


def qwen3_next(fields: Fields) -> DecoderConfig:
    """Reads Qwen3-Next, some layers of which may have an MLP instead of experts."""
    sizes = read_sizes(fields, head_dim=256, num_kv_heads=2, inner=5632)
    experts = _read_shared_experts(fields, renormalises=fields.flag("norm_topk_prob", default=True))
    dense, every = read_feed(fields, sizes), fields.integer("decoder_sparse_step", 1)
    without = fields.get("mlp_only_layers") or []
    if not isinstance(without, list):
        fields.refuse("mlp_only_layers", "config.json: mlp_only_layers must be a list of layers")
        without = []
    has_experts = [index not in without and not (index + 1) % every for index in range(sizes.num_layers)]
    return _gated_delta_network(fields, sizes, [experts if has else dense for has in has_experts])


def _read_shared_experts(fields: Fields, *, renormalises: bool) -> Experts:
    """Reads experts with a shared one, whose result is gated."""
    shared = Mlp(
        inner_features=fields.integer("shared_expert_intermediate_size", 512),
        activation=fields.choose("hidden_act", ACTIVATIONS, "silu"),
    )
    inner = fields.integer("moe_intermediate_size", 512)
    return read_experts(fields, inner, renormalises=renormalises, shared=shared, gates_shared=True)


def _gated_delta_network(fields: Fields, sizes: Sizes, feeds: Sequence[Mlp | Experts]) -> DecoderConfig:
    """Reads a network with the gated delta rule, and gated attention in every fourth layer by default."""
    norm = _offset_norm(fields)
    rotary, max_model_len = read_rotary(fields, share=0.25, kinds=_KINDS)
    bias = fields.flag("attention_bias")
    attention = attention_of(sizes, qkv_bias=bias, output_bias=bias, qk_norm=norm, gates_output=True)
    recurrent = read_gated_delta(fields, norm.epsilon)
    every = fields.integer("full_attention_interval", 4)
    types = read_layer_types(fields, sizes.num_layers, ("linear_attention", "full_attention"))
    if types is None:
        types = ["linear_attention" if (index + 1) % every else "full_attention" for index in range(sizes.num_layers)]
    mixers = {"linear_attention": recurrent, "full_attention": attention}
    layers = [Layer(mixer=mixers[kind], feed=feed, norm=norm) for kind, feed in zip(types, feeds, strict=True)]
    head = Head(is_tied=fields.flag("tie_word_embeddings"))
    return assemble(sizes, max_model_len, layers, [rotary], norm, head=head)


def read_gated_delta(fields: Fields, epsilon: float) -> Recurrent:
    """Reads the sizes of gated delta rule layers."""
    key_heads, value_heads = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    key_dim, value_dim = fields.integer("linear_key_head_dim", 128), fields.integer("linear_value_head_dim", 128)
    if value_heads % key_heads:
        problem = f"must be a multiple of linear_num_key_heads ({key_heads}), not {value_heads}"
        fields.refuse("linear_num_value_heads", f"config.json: linear_num_value_heads {problem}")
    if value_dim % STATE_COLUMNS:
        fields.refuse(
            "linear_value_head_dim", f"config.json: linear_value_head_dim must be a multiple of {STATE_COLUMNS}"
        )
    fields.require("hidden_act", "silu")
    return Recurrent(
        kind=RecurrentKind.GATED_DELTA,
        conv_width=fields.integer("linear_conv_kernel_dim", 4, least=2, most=MAX_CONV_WIDTH),
        conv_features=2 * key_heads * key_dim + value_heads * value_dim,
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        epsilon=epsilon,
    )


def lfm2(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(fields, num_kv_heads=8)
    return _short_conv_network(fields, sizes, [Mlp(inner_features=_lfm2_inner(fields, sizes.inner))] * sizes.num_layers)


def lfm2_moe(fields: Fields) -> DecoderConfig:
    """Reads LFM2 with experts in all layers but the first ones."""
    sizes = read_sizes(fields, num_kv_heads=8, inner=7168)
    num_dense = fields.integer("num_dense_layers", 2, least=0)
    router = {
        "is_sigmoid": True,
        "has_choice_bias": fields.flag("use_expert_bias", default=True),
        "scale": fields.number("routed_scaling_factor", 1.0),
    }
    experts = read_experts(
        fields,
        fields.integer("moe_intermediate_size", 1792),
        renormalises=fields.flag("norm_topk_prob", default=True),
        router=router,
        activation=Activation.SILU,
    )
    dense = Mlp(inner_features=sizes.inner)
    return _short_conv_network(
        fields, sizes, [dense if index < num_dense else experts for index in range(sizes.num_layers)]
    )


def _short_conv_network(fields: Fields, sizes: Sizes, feeds: Sequence[Mlp | Experts]) -> DecoderConfig:
    """Reads a network with short convolutions, and attention in the layers that config.json names."""
    norm = read_rms(fields, 1e-5)
    rotary, max_model_len = read_rotary(fields, default_theta=1e6)
    count, bias = sizes.num_layers, fields.flag("conv_bias")
    indices = fields.get("full_attn_idxs")
    if indices is not None and not (isinstance(indices, list) and set(indices) <= set(range(count))):
        fields.refuse("full_attn_idxs", f"config.json: full_attn_idxs must be numbers of layers below {count}")
        indices = None
    own = ["full_attention" if indices is None or index in indices else "conv" for index in range(count)]
    types = read_layer_types(fields, count, ("conv", "full_attention")) or own
    attention, width = (
        attention_of(sizes, qk_norm=norm),
        fields.integer("conv_L_cache", 3, least=2, most=MAX_CONV_WIDTH),
    )
    conv = Recurrent(
        kind=RecurrentKind.SHORT_CONV,
        conv_width=width,
        conv_features=sizes.hidden_size,
        conv_bias=bias,
        in_bias=bias,
        out_bias=bias,
    )
    mixers = {"conv": conv, "full_attention": attention}
    layers = [Layer(mixer=mixers[kind], feed=feed, norm=norm) for kind, feed in zip(types, feeds, strict=True)]
    is_tied = fields.flag("tie_embedding", default=fields.flag("tie_word_embeddings", default=True))
    return assemble(sizes, max_model_len, layers, [rotary], norm, head=Head(is_tied=is_tied))


def _lfm2_inner(fields: Fields, stated: int) -> int:
    """Returns an MLP's inner features: most files state a number that is cut to two thirds and rounded up."""
    inner = fields.integer("block_ff_dim", stated)
    factor = fields.number("block_ffn_dim_multiplier", 1.0, above=0.0)
    multiple = fields.integer("block_multiple_of", 256)
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return inner
    return -(-int(factor * int(2 * inner / 3)) // multiple) * multiple


def _offset_norm(fields: Fields) -> Norm:
    """Reads a norm whose stored weight is the true one minus 1, and which multiplies in float32."""
    return replace(read_rms(fields, is_wide=True), offset=1.0)


_QWEN = replace(LLAMA_NAMES, prefixes=("model.language_model.", "model."))
_LFM2 = replace(
    LLAMA_NAMES,
    final_norm="embedding_norm",
    pre_attention="operator_norm",
    pre_feed="ffn_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    recurrent=RecurrentNames(inputs=("conv.in_proj",), conv="conv.conv", output="conv.out_proj"),
)
_QWEN_MOE = replace(
    _QWEN,
    other_experts=ExpertNames(
        gate="mlp.experts.gate_up_proj",
        up="mlp.experts.gate_up_proj",
        down="mlp.experts.down_proj",
        layout=ExpertLayout.STACKED,
    ),
)
_QWEN_NEXT = replace(
    LLAMA_NAMES, recurrent=RecurrentNames(inputs=("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"))
)
_LFM2_MOE = replace(
    _LFM2,
    experts=ExpertNames(
        router="feed_forward.gate",
        gate="feed_forward.experts.{}.w1.weight",
        up="feed_forward.experts.{}.w3.weight",
        down="feed_forward.experts.{}.w2.weight",
        choice_bias="feed_forward.expert_bias",
    ),
)
FAMILIES = {
    "Qwen3_5ForCausalLM": Family("qwen3_5_text", qwen3_5, _QWEN),
    "Qwen3_5ForConditionalGeneration": Family("qwen3_5", qwen3_5, _QWEN, texts={"qwen3_5_text": qwen3_5}),
    "Qwen3_5MoeForCausalLM": Family("qwen3_5_moe_text", qwen3_5_moe, _QWEN_MOE),
    "Qwen3_5MoeForConditionalGeneration": Family(
        "qwen3_5_moe", qwen3_5_moe, _QWEN_MOE, texts={"qwen3_5_moe_text": qwen3_5_moe}
    ),
    "Qwen3NextForCausalLM": Family("qwen3_next", qwen3_next, _QWEN_NEXT),
    "Lfm2ForCausalLM": Family("lfm2", lfm2, _LFM2, renamed={"rms_norm_eps": "norm_eps"}),
    "Lfm2MoeForCausalLM": Family("lfm2_moe", lfm2_moe, _LFM2_MOE, renamed={"rms_norm_eps": "norm_eps"}),
}
