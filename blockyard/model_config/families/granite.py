"""Granite 3 and 4, dense: Llama with scaling factors for embedding, scores, residual and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import DecoderConfig, Head, Layer
from blockyard.model_config.families.family import Family
from blockyard.model_config.names import LLAMA_NAMES
from blockyard.model_config.reading import Sizes, assemble, attention_of, read_feed, read_rms, read_sizes
from blockyard.model_config.rotary import read_rotary

if TYPE_CHECKING:
    from blockyard.model_config.fields import Fields

_ROUTING = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "time_step_limit")
_MAMBA = ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size", "conv_bias", "proj_bias")


def granite_dense(fields: Fields) -> DecoderConfig:
    """Reads Granite 4's dense models; refuses experts and state-space layers, which the architecture may have."""
    if fields.integer("num_local_experts", 8, least=0):
        fields.refuse(
            "num_local_experts", "config.json: num_local_experts must be 0, since experts are not supported here"
        )
    types = fields.get("layer_types")
    if not isinstance(types, list) or not {str(kind) for kind in types} <= {"attention", "full_attention"}:
        fields.refuse("layer_types", "config.json: layer_types must all be full_attention: no layers with a state")
    for name in (*_ROUTING, *(f"mamba_{part}" for part in _MAMBA)):
        fields.get(name)
    sizes = replace(read_sizes(fields, inner=1), inner=fields.integer("shared_intermediate_size", 1024))
    turns = fields.choose("position_embedding_type", {"nope": False, "rope": True}, "nope")
    return _granite(fields, sizes, turns=turns)


def granite(fields: Fields) -> DecoderConfig:
    """Reads Granite 3, dense."""
    return _granite(fields, read_sizes(fields), mlp_bias=fields.flag("mlp_bias"))


def _granite(fields: Fields, sizes: Sizes, *, turns: bool = True, mlp_bias: bool = False) -> DecoderConfig:
    rotary, max_model_len = read_rotary(fields)
    norm, bias = read_rms(fields), fields.flag("attention_bias")
    scale = fields.number("attention_multiplier", 1.0, above=0.0)
    layer = Layer(
        mixer=attention_of(sizes, scale=scale, rotary=0 if turns else None, qkv_bias=bias, output_bias=bias),
        feed=read_feed(fields, sizes, has_bias=mlp_bias),
        norm=norm,
        residual_scale=fields.number("residual_multiplier", 1.0),
    )
    head = Head(is_tied=fields.flag("tie_word_embeddings"), scale=1 / fields.number("logits_scaling", 1.0, above=0.0))
    return assemble(
        sizes,
        max_model_len,
        [layer] * sizes.num_layers,
        [rotary] if turns else [],
        norm,
        head=head,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        rounds_embedding_scale=False,
    )


FAMILIES = {
    "GraniteForCausalLM": Family("granite", granite),
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        granite_dense,
        replace(
            LLAMA_NAMES,
            **dict.fromkeys(("gate", "up"), "shared_mlp.input_linear"),
            down="shared_mlp.output_linear",
        ),
    ),
}
