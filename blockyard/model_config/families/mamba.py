"""Networks with Mamba 2 in most layers and attention in the others: Granite 4 H, Bamba and Nemotron H."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import DecoderConfig, Head, Layer, Mlp
from blockyard.model_config.families.family import Family
from blockyard.model_config.families.granite import read_granite
from blockyard.model_config.families.mixtures import GRANITE_EXPERTS, read_experts
from blockyard.model_config.names import LLAMA_NAMES, RecurrentNames
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
from blockyard.model_config.rotary import read_rotary

if TYPE_CHECKING:
    from blockyard.model_config.fields import Fields
    from blockyard.model_config.reading import Sizes

_KINDS = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}
_ROUTING = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")
_MAMBA_PARTS = ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "conv_bias", "proj_bias")
# Other ways of computing the same cut a text into chunks.
_MAMBA_FIELDS = (*(f"mamba_{part}" for part in _MAMBA_PARTS), "mamba_chunk_size", "time_step_limit")


_LETTERS = {
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "mamba": "linear_attention",
    "attention": "full_attention",
}
# Fields of the first random weights, of experts, and of kernels.
_NEMOTRON_FIELDS = (
    *("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "hidden_dropout", "expand"),
    *("n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("moe_latent_size", "moe_shared_expert_overlap", "routed_scaling_factor", "n_group", "topk_group"),
    *("norm_topk_prob", "num_experts_per_tok", "output_router_logits", "mtp_layers_block_type", "chunk_size"),
    *(
        "use_mamba_kernels",
        "mamba_ssm_cache_dtype",
        "num_logits_to_keep",
        "mtp_hybrid_override_pattern",
        "mamba_proj_bias",
    ),
)


def granite_hybrid(fields: Fields) -> DecoderConfig:
    """Reads Granite 4: with Mamba in some layers or none, and with experts beside the shared MLP or without."""
    sizes = read_sizes(fields, inner=11008)
    types = read_layer_types(fields, sizes.num_layers, tuple(_KINDS)) or ["mamba"] * sizes.num_layers
    has_attention = [_KINDS[kind] for kind in types]
    turns = fields.choose("position_embedding_type", {"nope": False, "rope": True}, "nope")
    network = read_granite(fields, sizes, turns=turns)
    [plain] = set(network.layers)
    activation = fields.choose("hidden_act", ACTIVATIONS, "silu")
    shared = Mlp(inner_features=fields.integer("shared_intermediate_size", 1024), activation=activation)
    feed = shared
    if fields.integer("num_local_experts", 8, least=0):
        feed = read_experts(fields, sizes.inner, renormalises=True, shared=shared)
    # A model without experts or without Mamba has their fields, too.
    for name in (*_ROUTING, *_MAMBA_FIELDS):
        fields.get(name)
    mamba = plain.mixer if all(has_attention) else read_mamba(fields, _read_inner(fields, sizes), plain.norm.epsilon)
    layers = (replace(plain, mixer=plain.mixer if has else mamba, feed=feed) for has in has_attention)
    return replace(network, layers=tuple(layers))


def bamba(fields: Fields) -> DecoderConfig:
    sizes, norm = read_sizes(fields, num_kv_heads=8, inner=14336), read_rms(fields, 1e-5)
    rotary, max_model_len = read_rotary(fields, share=0.5)
    bias = fields.flag("attention_bias")
    attention = attention_of(sizes, qkv_bias=bias, output_bias=bias)
    indices = fields.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not set(indices) <= set(range(sizes.num_layers)):
        fields.refuse("attn_layer_indices", "config.json: attn_layer_indices must be numbers of layers")
        indices = []
    mamba = read_mamba(fields, _read_inner(fields, sizes), norm.epsilon)
    feed = read_feed(fields, sizes, has_bias=fields.flag("mlp_bias"))
    mixers = [attention if index in indices else mamba for index in range(sizes.num_layers)]
    layers = [Layer(mixer=mixer, feed=feed, norm=norm) for mixer in mixers]
    for name in ("num_logits_to_keep", "z_loss_coefficient", *_MAMBA_FIELDS):
        fields.get(name)
    head = Head(is_tied=fields.flag("tie_word_embeddings"))
    return assemble(sizes, max_model_len, layers, [rotary], norm, head=head)


def nemotron_h(fields: Fields) -> DecoderConfig:
    """Reads Nemotron H, each of whose layers has one part: Mamba, attention or an MLP; refuses experts."""
    types = _read_parts(fields)
    sizes = read_sizes(fields, head_dim=128, num_kv_heads=8, inner=21504, num_layers=len(types))
    if len(types) != sizes.num_layers:
        fields.refuse("num_hidden_layers", f"config.json: num_hidden_layers is {sizes.num_layers}, not {len(types)}")
    norm, max_model_len = read_rms(fields, 1e-5), fields.integer("max_position_embeddings", 4096)
    for name in ("attention_bias", "residual_in_fp32", "num_nextn_predict_layers"):
        fields.require(name, False)
    fields.require("sliding_window")
    activation = fields.choose("mlp_hidden_act", ACTIVATIONS, "relu2")
    mlp = Mlp(inner_features=sizes.inner, activation=activation, is_gated=False, has_bias=fields.flag("mlp_bias"))
    inner = fields.integer("mamba_n_heads", 128) * fields.integer("mamba_d_head", 64)
    parts = {
        "linear_attention": Layer(
            mixer=read_mamba(fields, inner, norm.epsilon, 8, 128, "use_bias"), feed=None, norm=norm
        ),
        "full_attention": Layer(mixer=attention_of(sizes, rotary=None), feed=None, norm=norm),
        "mlp": Layer(mixer=None, feed=mlp, norm=norm),
    }
    for name in _NEMOTRON_FIELDS:
        fields.get(name)
    head = Head(is_tied=fields.flag("tie_word_embeddings"))
    return assemble(sizes, max_model_len, [parts[kind] for kind in types], [], norm, head=head)


def _read_inner(fields: Fields, sizes: Sizes) -> int:
    return fields.integer("mamba_expand", 2) * sizes.hidden_size


def _read_parts(fields: Fields) -> list[str]:
    """Reads the part that each layer has, named, or as letters of a pattern."""
    pattern, named = fields.get("hybrid_override_pattern"), fields.get("layers_block_type")
    types = [_LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) and not named else named
    types = [_LETTERS.get(kind, kind) for kind in types] if isinstance(types, list) else []
    if not types or not set(types) <= {*_LETTERS.values()}:
        unknown = ", ".join(sorted(set(map(str, types)) - {*_LETTERS.values()})) or "none"
        problem = f"are not served ({unknown}): a layer is linear_attention (M), full_attention (*) or mlp (-)"
        fields.refuse("layers_block_type", f"config.json: some layers {problem}")
        return ["full_attention"]
    return types


def read_mamba(
    fields: Fields,
    inner: int,
    epsilon: float,
    default_groups: int = 1,
    default_key_dim: int = 256,
    bias_name: str = "mamba_proj_bias",
) -> Recurrent:
    """Reads the sizes of Mamba 2 layers.

    Args:
        fields: the fields.
        inner: the features of all heads together.
        epsilon: of the gated norm.
        default_groups: the number of groups if config.json has none.
        default_key_dim: the state's size if config.json has none.
        bias_name: the field that says whether both products have a bias.
    """
    heads, groups = fields.integer("mamba_n_heads", 128), fields.integer("mamba_n_groups", default_groups)
    key_dim, given = fields.integer("mamba_d_state", default_key_dim), fields.get("mamba_d_head")
    value_dim = max(1, inner // heads)
    if heads * value_dim != inner or given not in (None, "auto", value_dim):
        problem = f"mamba_n_heads ({heads}) times mamba_d_head must be mamba_expand times hidden_size ({inner})"
        fields.refuse("mamba_n_heads", f"config.json: {problem}")
    if heads % groups:
        fields.refuse("mamba_n_groups", f"config.json: mamba_n_groups ({groups}) must divide mamba_n_heads ({heads})")
    if value_dim % STATE_COLUMNS:
        problem = f"mamba_d_head ({value_dim}) must be a multiple of {STATE_COLUMNS}"
        fields.refuse("mamba_d_head", f"config.json: {problem}")
    fields.require("hidden_act", "silu")
    # JSON knows no infinity; transformers writes it as an object.
    fields.require("time_step_limit", [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
    bias = fields.flag(bias_name)
    return Recurrent(
        kind=RecurrentKind.MAMBA2,
        conv_width=fields.integer("mamba_d_conv", 4, least=2, most=MAX_CONV_WIDTH),
        conv_features=inner + 2 * groups * key_dim,
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        num_key_heads=groups,
        num_value_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        epsilon=epsilon,
        in_bias=bias,
        out_bias=bias,
    )


def _names_in(module: str) -> RecurrentNames:
    """Returns the names of Mamba's parts in a module of the layer."""
    return RecurrentNames(
        inputs=(f"{module}.in_proj",),
        conv=f"{module}.conv1d",
        decay_log=f"{module}.A_log",
        step_bias=f"{module}.dt_bias",
        skip=f"{module}.D",
        norm=f"{module}.norm",
        output=f"{module}.out_proj",
    )


_MAMBA = _names_in("mamba")
_SHARED = ("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear")
_GRANITE = replace(
    LLAMA_NAMES,
    gate=_SHARED[0],
    up=_SHARED[1],
    down=_SHARED[2],
    experts=replace(GRANITE_EXPERTS, shared=_SHARED),
    recurrent=_MAMBA,
)
_BAMBA = replace(
    LLAMA_NAMES,
    final_norm="final_layernorm",
    pre_feed="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    recurrent=_MAMBA,
)
_NEMOTRON = replace(
    LLAMA_NAMES,
    prefixes=("backbone.", "model."),
    embedding="embeddings",
    final_norm="norm_f",
    pre_attention="norm",
    pre_feed="norm",
    query="mixer.q_proj",
    key="mixer.k_proj",
    value="mixer.v_proj",
    output="mixer.o_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
    recurrent=_names_in("mixer"),
)
_NEMOTRON_RENAMED = {
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "mamba_hidden_act",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
}
FAMILIES = {
    "GraniteMoeHybridForCausalLM": Family("granitemoehybrid", granite_hybrid, _GRANITE),
    "BambaForCausalLM": Family("bamba", bamba, _BAMBA),
    "NemotronHForCausalLM": Family("nemotron_h", nemotron_h, _NEMOTRON, renamed=_NEMOTRON_RENAMED),
}
