"""Granite 3, dense: Llama with scaling factors for embedding, scores, residual and logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import DecoderConfig, Head, Layer
from blockyard.model_config.families.family import Family
from blockyard.model_config.reading import Sizes, assemble, attention_of, read_feed, read_rms, read_sizes
from blockyard.model_config.rotary import read_rotary

if TYPE_CHECKING:
    from blockyard.model_config.fields import Fields


def granite(fields: Fields) -> DecoderConfig:
    """Reads Granite 3, dense."""
    return read_granite(fields, read_sizes(fields), mlp_bias=fields.flag("mlp_bias"))


def read_granite(fields: Fields, sizes: Sizes, *, turns: bool = True, mlp_bias: bool = False) -> DecoderConfig:
    """Reads a network whose layers are all alike. `turns`: whether attention has rotary embeddings."""
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
}
