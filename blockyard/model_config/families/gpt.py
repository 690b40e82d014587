"""GPT-2, GPT-NeoX, OPT, Phi 1 and 2, Starcoder 2, Nemotron: layer norms with biases, and ungated MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import DecoderConfig, Head, Layer, Learned, Mlp, Norm, NormKind, Placement
from blockyard.model_config.families.family import Family
from blockyard.model_config.names import LLAMA_NAMES, Names, RowOrder
from blockyard.model_config.reading import ACTIVATIONS, assemble, attention_of, read_sizes, read_window, uniform
from blockyard.model_config.rotary import MAX_MODEL_LEN, read_rotary

if TYPE_CHECKING:
    from blockyard.model_config.fields import Fields

_PLAIN = replace(LLAMA_NAMES, gate="")


def _norm(fields: Fields, field: str, default: float, **more: bool) -> Norm:
    epsilon = fields.number(field, default, above=0.0)
    return Norm(kind=NormKind.LAYER, epsilon=epsilon, **{"has_bias": True, **more})


def gpt2(fields: Fields) -> DecoderConfig:
    fields.require("scale_attn_by_inverse_layer_idx", False)
    for name in ("reorder_and_upcast_attn", *(f"summary_{part}" for part in _SUMMARY)):
        fields.get(name)
    sizes = read_sizes(fields, has_own_heads=False, inner=4 * fields.integer("hidden_size"))
    norm = _norm(fields, "layer_norm_epsilon", 1e-5)
    scale = sizes.head_dim**-0.5 if fields.flag("scale_attn_weights", default=True) else 1.0
    attention = attention_of(sizes, scale=scale, rotary=None, qkv_bias=True, output_bias=True)
    activation = fields.choose("hidden_act", ACTIVATIONS, "gelu_new")
    feed = Mlp(inner_features=sizes.inner, activation=activation, is_gated=False, has_bias=True)
    length = fields.integer("max_position_embeddings", most=MAX_MODEL_LEN)
    layers = [Layer(mixer=attention, feed=feed, norm=norm)] * sizes.num_layers
    head = Head(is_tied=fields.flag("tie_word_embeddings", default=True))
    return assemble(sizes, length, layers, [], norm, head=head, learned=Learned(num_positions=length))


_SUMMARY = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")


def opt(fields: Fields) -> DecoderConfig:
    fields.require("do_layer_norm_before", True)
    fields.require("_remove_final_layer_norm", False)
    for name in ("layerdrop", "init_std"):
        fields.get(name)
    sizes = read_sizes(fields, has_own_heads=False)
    fields.require("word_embed_proj_dim", sizes.hidden_size)
    has_weights = fields.flag("layer_norm_elementwise_affine", default=True)
    norm = Norm(kind=NormKind.LAYER, epsilon=1e-5, has_weight=has_weights, has_bias=has_weights)
    bias = fields.flag("enable_bias", default=True)
    attention = attention_of(sizes, rotary=None, qkv_bias=bias, output_bias=bias)
    activation = fields.choose("hidden_act", ACTIVATIONS, "relu")
    feed = Mlp(inner_features=sizes.inner, activation=activation, is_gated=False, has_bias=bias)
    length = fields.integer("max_position_embeddings", most=MAX_MODEL_LEN)
    layers = [Layer(mixer=attention, feed=feed, norm=norm)] * sizes.num_layers
    head = Head(is_tied=fields.flag("tie_word_embeddings", default=True))
    learned = Learned(num_positions=length, first_row=2)
    return assemble(sizes, length, layers, [], norm, head=head, learned=learned)


def gpt_neox(fields: Fields) -> DecoderConfig:
    """Reads GPT-NeoX and Pythia."""
    for name in ("classifier_dropout", "is_decoder"):
        fields.get(name)
    sizes = read_sizes(fields, has_own_heads=False)
    rotary, max_model_len = read_rotary(fields, share=0.25)
    norm = _norm(fields, "layer_norm_eps", 1e-5)
    bias = fields.flag("attention_bias", default=True)
    attention = attention_of(sizes, qkv_bias=bias, output_bias=bias)
    feed = Mlp(
        inner_features=sizes.inner,
        activation=fields.choose("hidden_act", ACTIVATIONS, "gelu"),
        is_gated=False,
        has_bias=True,
    )
    is_parallel = fields.flag("use_parallel_residual", default=True)
    placement = Placement.PARALLEL_TWO if is_parallel else Placement.PRE
    layer = Layer(mixer=attention, feed=feed, norm=norm, placement=placement)
    return uniform(fields, sizes, max_model_len, rotary, layer)


def phi(fields: Fields) -> DecoderConfig:
    """Reads Phi 1, 1.5 and 2."""
    fields.require("qk_layernorm", False)
    sizes = read_sizes(fields)
    rotary, max_model_len = read_rotary(fields, share=0.5)
    norm = _norm(fields, "layer_norm_eps", 1e-5)
    activation = fields.choose("hidden_act", ACTIVATIONS, "gelu_new")
    layer = Layer(
        mixer=attention_of(sizes, qkv_bias=True, output_bias=True),
        feed=Mlp(inner_features=sizes.inner, activation=activation, is_gated=False, has_bias=True),
        norm=norm,
        placement=Placement.PARALLEL,
    )
    head = Head(is_tied=fields.flag("tie_word_embeddings"), has_bias=True)
    return assemble(sizes, max_model_len, [layer] * sizes.num_layers, [rotary], norm, head=head)


def starcoder2(fields: Fields) -> DecoderConfig:
    sizes = read_sizes(fields, num_kv_heads=2)
    rotary, max_model_len = read_rotary(fields)
    norm = _norm(fields, "norm_epsilon", 1e-5)
    bias = fields.flag("use_bias", default=True)
    activation = fields.choose("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    layer = Layer(
        mixer=attention_of(sizes, qkv_bias=bias, output_bias=bias, window=read_window(fields, max_model_len)),
        feed=Mlp(inner_features=sizes.inner, activation=activation, is_gated=False, has_bias=bias),
        norm=norm,
    )
    return uniform(fields, sizes, max_model_len, rotary, layer, is_tied=True)


def nemotron(fields: Fields) -> DecoderConfig:
    """Reads Nemotron 3 and 4, and Minitron."""
    sizes = read_sizes(fields)
    rotary, max_model_len = read_rotary(fields, share=0.5)
    norm = replace(_norm(fields, "norm_eps", 1e-5), offset=1.0)
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    activation = fields.choose("hidden_act", ACTIVATIONS, "relu2")
    layer = Layer(
        mixer=attention_of(sizes, qkv_bias=bias, output_bias=bias),
        feed=Mlp(inner_features=sizes.inner, activation=activation, is_gated=False, has_bias=mlp_bias),
        norm=norm,
    )
    return uniform(fields, sizes, max_model_len, rotary, layer)


FAMILIES = {
    "GPT2LMHeadModel": Family(
        "gpt2",
        gpt2,
        Names(
            prefixes=("transformer.", ""),
            embedding="wte",
            positions="wpe",
            final_norm="ln_f",
            layer="h.{}.",
            pre_attention="ln_1",
            pre_feed="ln_2",
            query="attn.c_attn",
            key="attn.c_attn",
            value="attn.c_attn",
            output="attn.c_proj",
            up="mlp.c_fc",
            down="mlp.c_proj",
            are_transposed=True,
        ),
        {
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
        },
    ),
    "OPTForCausalLM": Family(
        "opt",
        opt,
        Names(
            prefixes=("model.decoder.", "decoder."),
            positions="embed_positions",
            final_norm="final_layer_norm",
            pre_attention="self_attn_layer_norm",
            pre_feed="final_layer_norm",
            output="self_attn.out_proj",
            up="fc1",
            down="fc2",
        ),
        {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
    ),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox",
        gpt_neox,
        Names(
            prefixes=("gpt_neox.", ""),
            heads=("lm_head", "embed_out"),
            embedding="embed_in",
            final_norm="final_layer_norm",
            query="attention.query_key_value",
            key="attention.query_key_value",
            value="attention.query_key_value",
            output="attention.dense",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
            row_order=RowOrder.HEADS_INTERLEAVED,
        ),
        {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    ),
    "PhiForCausalLM": Family(
        "phi",
        phi,
        replace(_PLAIN, final_norm="final_layernorm", output="self_attn.dense", up="mlp.fc1", down="mlp.fc2"),
    ),
    "Starcoder2ForCausalLM": Family("starcoder2", starcoder2, replace(_PLAIN, up="mlp.c_fc", down="mlp.c_proj")),
    "NemotronForCausalLM": Family("nemotron", nemotron, _PLAIN),
}
