"""Models with real shapes and random weights: a folder as a hub has it, made from a fixed seed and never downloaded.

    python benchmarks/kit/models.py [NAME ...] [--folder benchmarks/models]

Speed depends on shapes, not on what was learned. Activations stay near 1 in size, and the tokenizer has a piece for
every id, so that what is slow with real weights and real text is slow here. A folder that is already there is kept,
unless its recipe has changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import shutil
import string
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
from rich.progress import track
from safetensors.torch import save_file
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parents[1] / "models"
RECIPE_FILE = "recipe.json"
# Raised when the same recipe makes other files.
VERSION = 1
WEIGHT_STD = 0.02
MAX_LEN = 4096
BEGIN, END = "<|begin|>", "<|end|>"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A decoder's shape; all else is fixed. `qkv_bias`: Qwen2's, otherwise it is a Llama."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    qkv_bias: bool
    seed: int = 1
    version: int = VERSION

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.hidden_size // self.num_heads


RECIPES = {
    "llama-135m": Recipe(576, 30, 9, 3, 1536, 49152, tied=True, qkv_bias=False),
    "qwen2-0.5b": Recipe(896, 24, 14, 2, 4864, 151936, tied=True, qkv_bias=True),
    "llama-1.1b": Recipe(2048, 22, 32, 4, 5632, 32000, tied=False, qkv_bias=False),
}


def make_model(name: str, folder: Path = FOLDER) -> Path:
    """Makes a model below a folder, unless it is there, and returns its own folder."""
    return write_model(RECIPES[name], folder / name)


def write_model(recipe: Recipe, target: Path) -> Path:
    """Writes a model's folder whole or not at all, unless this very one is there."""
    description = json.dumps(asdict(recipe))
    marker = target / RECIPE_FILE
    if marker.exists() and marker.read_text() == description:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as name:
        folder = Path(name) / target.name
        folder.mkdir()
        write_configuration(recipe, folder)
        make_tokenizer(recipe.vocab_size).save(str(folder / "tokenizer.json"), pretty=False)
        save_file(make_weights(recipe, target.name), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / RECIPE_FILE).write_text(description)
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    return target


# Configuration.


def write_configuration(recipe: Recipe, folder: Path) -> None:
    """Writes what a hub's folder has beside weights and vocabulary."""
    files = {
        "config.json": configuration(recipe),
        "generation_config.json": {"bos_token_id": 256, "eos_token_id": 257},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BEGIN,
            "eos_token": END,
            "model_max_length": MAX_LEN,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def configuration(recipe: Recipe) -> dict[str, Any]:
    """config.json's object, as transformers writes it."""
    family = "Qwen2" if recipe.qkv_bias else "Llama"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "dtype": "bfloat16",
        "vocab_size": recipe.vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": recipe.tied,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": 256,
        "eos_token_id": 257,
    }


# Weights.


def weight_shapes(recipe: Recipe) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of every tensor, in the order of the network."""
    hidden, inner = recipe.hidden_size, recipe.intermediate_size
    q_size, kv_size = recipe.num_heads * recipe.head_dim, recipe.num_kv_heads * recipe.head_dim
    yield "model.embed_tokens.weight", (recipe.vocab_size, hidden)
    for layer in range(recipe.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (size, hidden)
            if recipe.qkv_bias:
                yield f"{prefix}.self_attn.{name}_proj.bias", (size,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_size)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not recipe.tied:
        yield "lm_head.weight", (recipe.vocab_size, hidden)


def make_weights(recipe: Recipe, title: str = "") -> dict[str, torch.Tensor]:
    """Draws every tensor in bfloat16, each from a seed of its own; shows how far it is where there is a title."""
    shapes = list(weight_shapes(recipe))
    shown = track(shapes, description=title, transient=True, disable=not title)
    return {name: _draw(name, shape, recipe.seed) for name, shape in shown}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return (torch.randn(shape, generator=generator) * WEIGHT_STD).bfloat16()


# Vocabulary.


def make_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Makes a byte-level BPE of exactly `vocab_size` pieces, at least 258: bytes, two marks, then ever longer letters.

    Most pieces have 4 letters, about as many as those of a trained vocabulary.
    """
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces += [BEGIN, END]
    merges = list(itertools.islice(_merges(), vocab_size - len(pieces)))
    pieces += [first + second for first, second in merges]
    tokenizer = tokenizers.Tokenizer(BPE({piece: number for number, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN, END])
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """All pairs of letters, then those with a third letter, then with a fourth: 475,228 of them."""
    for length in (1, 2, 3):
        for letters in itertools.product(string.ascii_lowercase, repeat=length + 1):
            yield "".join(letters[:-1]), letters[-1]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(RECIPES)}; default: all")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(RECIPES)):
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    for name in options.names or RECIPES:
        print(make_model(name, options.folder))


if __name__ == "__main__":
    main()
