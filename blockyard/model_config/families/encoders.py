"""Encoders: BERT, RoBERTa, XLM-RoBERTa, DistilBERT and ModernBERT."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import Encoder, Head, Layer, Learned, Mlp, Norm, NormKind, Placement
from blockyard.model_config.families.family import Family
from blockyard.model_config.names import Names
from blockyard.model_config.reading import ACTIVATIONS, assemble, attention_of, read_layer_types, read_sizes, vary
from blockyard.model_config.rotary import MAX_MODEL_LEN, read_rotaries

if TYPE_CHECKING:
    from blockyard.model_config.decoder_config import DecoderConfig
    from blockyard.model_config.fields import Fields

# The default of ModernBERT's `local_attention`: keys on both sides together that windowed layers see.
_LOCAL = 128


def bert(fields: Fields, *, counts_from_padding: bool = False, has_types: bool = True) -> DecoderConfig:
    """Reads BERT and its close relatives.

    Args:
        fields: the fields of config.json.
        counts_from_padding: whether position 0 has the row after the padding token's in the position table.
        has_types: whether the model has token types.
    """
    fields.require("position_embedding_type", "absolute")
    fields.require("is_decoder", False)
    fields.get("tie_word_embeddings")
    sizes = read_sizes(fields, has_own_heads=False, inner=3072)
    epsilon = fields.number("layer_norm_eps", 1e-12, above=0.0) if has_types else 1e-12
    norm = Norm(kind=NormKind.LAYER, epsilon=epsilon, has_bias=True)
    layer = Layer(
        mixer=attention_of(sizes, rotary=None, qkv_bias=True, output_bias=True),
        feed=Mlp(
            inner_features=sizes.inner,
            activation=fields.choose("hidden_act", ACTIVATIONS, "gelu"),
            is_gated=False,
            has_bias=True,
        ),
        norm=norm,
        placement=Placement.AFTER_SUMS,
    )
    first_row = fields.integer("pad_token_id", 1, least=0) + 1 if counts_from_padding else 0
    length = fields.integer("max_position_embeddings", 512, most=MAX_MODEL_LEN) - first_row
    if length < 1:
        fields.refuse("max_position_embeddings", "config.json: max_position_embeddings leaves no token a place")
    num_types = fields.integer("type_vocab_size", 2, least=0) if has_types else 0
    return assemble(
        sizes,
        max(length, 1),
        [layer] * sizes.num_layers,
        [],
        None,
        head=Head(is_tied=True),
        learned=Learned(num_positions=max(length, 1), first_row=first_row),
        encoder=Encoder(embedding_norm=norm, num_token_types=num_types),
    )


def modern_bert(fields: Fields) -> DecoderConfig:
    for name in ("classifier_pooling", "classifier_bias", "classifier_activation", *_UNREAD):
        fields.get(name)
    sizes = read_sizes(fields, has_own_heads=False)
    rotaries, max_model_len = read_rotaries(fields, _theta(fields, "global"), _theta(fields, "local"))
    has_bias = fields.flag("norm_bias")
    norm = Norm(kind=NormKind.LAYER, epsilon=fields.number("norm_eps", 1e-5, above=0.0), has_bias=has_bias)
    attention_bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    every = fields.integer("global_attn_every_n_layers", 3)
    types = read_layer_types(fields, sizes.num_layers) or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(sizes.num_layers)
    ]
    # A window counts the own key and the keys on one side.
    window = fields.integer("local_attention", _LOCAL) // 2 + 1
    layer = Layer(
        mixer=attention_of(sizes, qkv_bias=attention_bias, output_bias=attention_bias),
        feed=Mlp(
            inner_features=sizes.inner,
            activation=fields.choose("hidden_act", ACTIVATIONS, "gelu"),
            has_bias=mlp_bias,
        ),
        norm=norm,
    )
    changes = (
        {"window": window if window < max_model_len else None, "rotary": 1} if kind == "sliding_attention" else {}
        for kind in types
    )
    first, *others = vary(layer, changes)
    layers = [replace(first, placement=Placement.PRE_FEED), *others]
    encoder = Encoder(embedding_norm=norm)
    return assemble(sizes, max_model_len, layers, rotaries, norm, head=Head(is_tied=True), encoder=encoder)


# Fields about training, and about the parts that predict masked tokens.
_UNREAD = (
    "initializer_cutoff_factor",
    "embedding_dropout",
    "mlp_dropout",
    "decoder_bias",
    "deterministic_flash_attn",
    "reference_compile",
    "repad_logits_with_grad",
    "sparse_prediction",
    "sparse_pred_ignore_index",
    "layer_norm_eps",
    "position_embedding_type",
    "cls_token_id",
    "tie_word_embeddings",
)


def _theta(fields: Fields, which: str) -> float:
    return fields.number(f"{which}_rope_theta", 160_000.0 if which == "global" else 10_000.0, above=1.0)


_BERT = Names(
    prefixes=("bert.", ""),
    embedding="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    layer="encoder.layer.{}.",
    post_attention="attention.output.LayerNorm",
    post_feed="output.LayerNorm",
    query="attention.self.query",
    key="attention.self.key",
    value="attention.self.value",
    output="attention.output.dense",
    gate="",
    up="intermediate.dense",
    down="output.dense",
)
_DISTIL = replace(
    _BERT,
    prefixes=("distilbert.", ""),
    layer="transformer.layer.{}.",
    post_attention="sa_layer_norm",
    post_feed="output_layer_norm",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    output="attention.out_lin",
    up="ffn.lin1",
    down="ffn.lin2",
)
_MODERN = Names(
    prefixes=("model.", ""),
    embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    final_norm="final_norm",
    pre_attention="attn_norm",
    pre_feed="mlp_norm",
    query="attn.Wqkv",
    key="attn.Wqkv",
    value="attn.Wqkv",
    output="attn.Wo",
    gate="mlp.Wi",
    up="mlp.Wi",
    down="mlp.Wo",
)
_ROBERTA = replace(_BERT, prefixes=("roberta.", ""))
_from_padding = partial(bert, counts_from_padding=True)

FAMILIES = {
    "BertModel": Family("bert", bert, _BERT),
    "RobertaModel": Family("roberta", _from_padding, _ROBERTA),
    "XLMRobertaModel": Family("xlm-roberta", _from_padding, _ROBERTA),
    "DistilBertModel": Family(
        "distilbert",
        partial(bert, has_types=False),
        _DISTIL,
        {
            "hidden_size": "dim",
            "intermediate_size": "hidden_dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "hidden_act": "activation",
        },
    ),
    "ModernBertModel": Family("modernbert", modern_bert, _MODERN, {"hidden_act": "hidden_activation"}),
}
