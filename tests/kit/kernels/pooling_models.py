"""Tiny seeded models that pool, saved as transformers and sentence-transformers save them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.kit.kernels.families import home, scatter_weights

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE = 256
HIDDEN = 64
LABELS = {0: "sad", 1: "glad", 2: "neither"}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_DECODER = {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 512}
_QWEN3 = {**_DECODER, "head_dim": 16, "tie_word_embeddings": True}
_DISTIL = {
    "vocab_size": VOCAB_SIZE,
    "dim": HIDDEN,
    "hidden_dim": 96,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
}
# Layers of both kinds, and a window on both sides that is shorter than a text.
_MODERN = {
    **_SIZES,
    "num_hidden_layers": 4,
    "local_attention": 16,
    "max_position_embeddings": 512,
    "cls_token_id": 0,
    "sep_token_id": 2,
}
_TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How transformers makes one, and what sentence-transformers writes beside it."""

    architecture: str
    config: str
    fields: dict[str, Any]
    mode: str = ""
    """Of pooling; empty: there is no modules.json."""
    dense: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of 2_Dense, beside its sizes."""
    is_bare: bool = False
    """Names of tensors have no prefix."""


RECIPES = {
    "qwen3_embedding": Recipe("Qwen3ForCausalLM", "Qwen3Config", _QWEN3, "lasttoken", is_bare=True),
    "qwen3_reranker": Recipe("Qwen3ForCausalLM", "Qwen3Config", _QWEN3),
    "llama_reranker": Recipe("LlamaForSequenceClassification", "LlamaConfig", {**_DECODER, "num_labels": 1}),
    "llama_classifier": Recipe("LlamaForSequenceClassification", "LlamaConfig", {**_DECODER, "id2label": LABELS}),
    "qwen2_classifier": Recipe(
        "Qwen2ForSequenceClassification",
        "Qwen2Config",
        {**_DECODER, "id2label": LABELS, "problem_type": "multi_label_classification"},
    ),
    "llama_mean": Recipe(
        "LlamaModel",
        "LlamaConfig",
        _DECODER,
        "mean",
        {"bias": True, "activation_function": "torch.nn.modules.activation.Tanh"},
    ),
    "bert": Recipe("BertModel", "BertConfig", _SIZES, "mean"),
    "bert_reranker": Recipe("BertForSequenceClassification", "BertConfig", {**_SIZES, "num_labels": 1}),
    "roberta": Recipe("RobertaForMaskedLM", "RobertaConfig", {**_SIZES, "type_vocab_size": 1}, "cls"),
    "xlm_roberta_reranker": Recipe(
        "XLMRobertaForSequenceClassification", "XLMRobertaConfig", {**_SIZES, "type_vocab_size": 1, "num_labels": 1}
    ),
    "distilbert_classifier": Recipe(
        "DistilBertForSequenceClassification", "DistilBertConfig", {**_DISTIL, "id2label": LABELS}
    ),
    "modernbert": Recipe("ModernBertModel", "ModernBertConfig", _MODERN, "mean"),
    "modernbert_classifier": Recipe(
        "ModernBertForSequenceClassification",
        "ModernBertConfig",
        {**_MODERN, "id2label": LABELS, "classifier_pooling": "mean"},
    ),
    "mistral_first": Recipe("MistralModel", "MistralConfig", {**_DECODER, "sliding_window": None}, "cls"),
}


@cache
@torch.no_grad()
def pooling_model(name: str) -> Path:
    """The folder of a model, made once in this process and removed at its end."""
    recipe = RECIPES[name]
    config = getattr(transformers, recipe.config)(**recipe.fields)
    # Spelled out: other ways of attention have other bits.
    config._attn_implementation = "eager"
    model = getattr(transformers, recipe.architecture)(config)
    scatter_weights(model, seed=sum(name.encode()))
    folder = home() / name
    model.save_pretrained(folder)
    if recipe.is_bare:
        stored = load_file(folder / "model.safetensors")
        bare = {key.removeprefix("model."): tensor for key, tensor in stored.items()}
        save_file(bare, folder / "model.safetensors", {"format": "pt"})
    if recipe.mode:
        _write_modules(folder, recipe)
    return folder


def _write_modules(folder: Path, recipe: Recipe) -> None:
    modules = [_TRANSFORMER, {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    pooling = {"word_embedding_dimension": HIDDEN, "include_prompt": True}
    old = {"lasttoken": "lasttoken", "cls": "cls_token", "mean": "mean_tokens"}
    pooling |= {f"pooling_mode_{name}": mode == recipe.mode for mode, name in old.items()}
    write_json(folder / "1_Pooling" / "config.json", pooling)
    if recipe.dense:
        modules.append({"path": "2_Dense", "type": "sentence_transformers.models.Dense"})
        write_json(folder / "2_Dense" / "config.json", {"in_features": HIDDEN, "out_features": 24, **recipe.dense})
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(24, HIDDEN, generator=generator) * HIDDEN**-0.5
        bias = torch.randn(24, generator=generator)
        save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    modules.append({"path": f"{len(modules)}_Normalize", "type": "sentence_transformers.models.Normalize"})
    write_json(
        folder / "modules.json", [{"idx": index, "name": str(index)} | each for index, each in enumerate(modules)]
    )
    prompts = {"query": "find: ", "document": ""}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": None})
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 100, "do_lower_case": False})


def write_json(path: Path, values: Any) -> None:
    """Writes a file, in a folder that it makes."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(values))
