"""Tiny random models with a tokenizer, made by fixed seeds from transformers' own classes, as a hub's folder has them.

Their weights are spread so that logits are far apart: greedy decoding has a clear winner nearly everywhere.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

transformers.utils.logging.disable_progress_bar()

VOCAB_SIZE = 384
BEGIN, END, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BEGIN, END, USER, ASSISTANT)  # ids 0 to 3
MAX_LEN = 2048

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
LINES = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A block holds the keys and values of some tokens; a table names the blocks of a sequence.",
    "def add(first, second):\n    return first + second\n",
    "one two three four five six seven eight nine ten",
    "naïve café, 漢字, ½ × € and 🙂",
)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


class _Recipe(NamedTuple):
    """A config class's name, and what it is given beyond the sizes."""

    config: str
    changes: dict[str, Any]
    max_shard_size: str = "1GB"


RECIPES = {
    "llama": _Recipe("LlamaConfig", {}),
    "llama_sharded": _Recipe("LlamaConfig", {}, "100KB"),
    "llama_tied": _Recipe("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_bias": _Recipe("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama_llama3": _Recipe("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "llama_yarn": _Recipe("LlamaConfig", {"rope_parameters": _YARN_ROPE}),
    "llama_linear": _Recipe("LlamaConfig", {"rope_parameters": _LINEAR_ROPE}),
    "mistral": _Recipe("MistralConfig", {"sliding_window": 40, "head_dim": 32}),
    "qwen2": _Recipe("Qwen2Config", {"num_attention_heads": 6, "hidden_size": 96}),
    "qwen2_window": _Recipe("Qwen2Config", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    # Five of six layers see 40 tokens: a few blocks.
    "gemma3": _Recipe(
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "sliding_window": 40,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": _Recipe("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True, "num_attention_heads": 8}),
}


@cache
def tiny_model(name: str) -> Path:
    """The folder of a tiny model, made once in this process and removed at its end."""
    return make_tiny_model(name, _home() / name)


def make_tiny_model(name: str, folder: Path) -> Path:
    """Writes a tiny model and its tokenizer into a folder, and returns it.

    Args:
        name: one of RECIPES.
        folder: made if need be.
    """
    recipe = RECIPES[name]
    config = getattr(transformers, recipe.config)(**{**_SIZES, **recipe.changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _spread(model, seed=sum(name.encode()))
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=1)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=recipe.max_shard_size)
    save_tokenizer(folder)
    return folder


@cache
def _home() -> Path:
    folder = tempfile.mkdtemp(prefix="tiny-models-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@torch.no_grad()
def _spread(model: torch.nn.Module, seed: int) -> None:
    """Draws all weights anew: products keep the size of their input, and logits spread by about 3."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed_tokens" in name:
            parameter.copy_(noise * 0.4)
        elif name.endswith("norm.weight"):
            parameter.copy_(1 + 0.1 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(0.1 * noise)
        else:
            gain = 3.0 if "lm_head" in name else 1.0
            parameter.copy_(noise * gain * parameter.shape[1] ** -0.5)


def save_tokenizer(folder: Path) -> None:
    """Writes the tokenizer of all tiny models."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(),
        bos_token=BEGIN,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=MAX_LEN,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def train_tokenizer() -> tokenizers.Tokenizer:
    """Makes a byte-level BPE of VOCAB_SIZE tokens: every text can be encoded, and every id has a piece."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer
