"""How fast a run could be on a machine that never waits and never computes in vain: arithmetic over a model's shape.

A prompt costs its operations at the machine's rate: matrix products and causal attention, the head once, for the one
row whose logits are wanted. A step of decodes costs the larger of two times: of its bytes (all weights once, and the
keys and values of all sequences) over the bandwidth, and of its operations over the rate. What is left out is free:
norms, rotation, sampling, the embedding's rows, and whatever happens between the processes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.kernels.ceilings import Ceilings

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a decoder is made of, in numbers of elements."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Reads the shape from a model folder's config.json."""
        config = json.loads((folder / "config.json").read_text())
        num_heads = config["num_attention_heads"]
        return cls(
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads", num_heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
        )

    @property
    def layer_matrices(self) -> tuple[tuple[int, int], ...]:
        """The (rows, columns) of a layer's matrices, those of one input together: qkv, output, gate and up, down."""
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        hidden, inner = self.hidden_size, self.intermediate_size
        return (q_size + 2 * kv_size, hidden), (hidden, q_size), (2 * inner, hidden), (hidden, inner)

    @property
    def num_layer_weights(self) -> int:
        """Elements of the matrices of all layers."""
        return self.num_layers * sum(rows * columns for rows, columns in self.layer_matrices)

    @property
    def num_head_weights(self) -> int:
        """Elements of the matrix that makes logits; of tied weights it is the embedding's table."""
        return self.vocab_size * self.hidden_size

    @property
    def num_weights(self) -> int:
        """Elements of all matrices that a model holds."""
        return self.num_layer_weights + self.num_head_weights * (1 if self.tied else 2)

    @property
    def num_kv_elements(self) -> int:
        """Elements of one token's keys and values over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Machine:
    """The ceilings that count for one way of computing.

    Attributes:
        bandwidth: bytes a second.
        matrix_rate: operations a second of products with weights, multiplications and additions each counted.
        attention_rate: the same of attention.
        weight_bytes: of one element of a weight.
        kv_bytes: of one element of a key or value.
    """

    bandwidth: float
    matrix_rate: float
    attention_rate: float
    weight_bytes: float
    kv_bytes: float


def machine_for(ceilings: Ceilings, dtype: str, quantization: str = "") -> Machine:
    """The machine at its best, for weights of a dtype or quantized ones; attention is computed in the dtype.

    Attention takes no tiles: its products are small, and each is of its own sequence.
    """
    weights = quantization or dtype
    return Machine(
        bandwidth=ceilings.bandwidth.best,
        matrix_rate=ceilings.rate(weights).best,
        attention_rate=ceilings.rate(dtype, on_tiles=False).best,
        weight_bytes=ITEM_BYTES[weights],
        kv_bytes=ITEM_BYTES[dtype],
    )


def prompt_seconds(shape: Shape, machine: Machine, num_tokens: int) -> float:
    """The time of one prompt, computed at once or in pieces, up to its first output token."""
    products, attention = prompt_operations(shape, num_tokens)
    return products / machine.matrix_rate + attention / machine.attention_rate


def decode_seconds(shape: Shape, machine: Machine, batch_size: int, context: int) -> float:
    """The time of one token for each of a batch, whose sequences are `context` tokens long, the new one among them."""
    weights = shape.num_layer_weights + shape.num_head_weights
    num_bytes = weights * machine.weight_bytes + batch_size * context * shape.num_kv_elements * machine.kv_bytes
    attention = _attention_operations(shape, batch_size * context)
    computing = 2 * batch_size * weights / machine.matrix_rate + attention / machine.attention_rate
    return max(num_bytes / machine.bandwidth, computing)


def run_seconds(
    shape: Shape, machine: Machine, batch_size: int, num_prompt_tokens: int, num_output_tokens: int
) -> float:
    """The time of a batch: all prompts, each of which gives a first token, then one step for each further token."""
    prompts = batch_size * prompt_seconds(shape, machine, num_prompt_tokens)
    # The step that makes the third token reads the second one, and so on.
    contexts = range(num_prompt_tokens + 1, num_prompt_tokens + num_output_tokens)
    return prompts + sum(decode_seconds(shape, machine, batch_size, context) for context in contexts)


def prompt_operations(shape: Shape, num_tokens: int) -> tuple[int, int]:
    """Multiplications and additions of one prompt: of products with weights, and of attention."""
    products = 2 * (num_tokens * shape.num_layer_weights + shape.num_head_weights)
    return products, _attention_operations(shape, num_tokens * (num_tokens + 1) // 2)


def _attention_operations(shape: Shape, num_pairs: int) -> int:
    """Of so many pairs of a query and a key: a product with the key and one with the value in every head."""
    return 4 * num_pairs * shape.num_layers * shape.num_heads * shape.head_dim
