"""Where a network's tensors stand in a checkpoint: the names of its modules, and how rows lie in what is stored.

A module that several weights share a name with is stored as one, its rows one part after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class RowOrder(Enum):
    """How the rows of queries and keys, or of all three, lie within what is stored."""

    PLAIN = auto()
    PAIRS_INTERLEAVED = auto()
    """The two numbers that turn together stand side by side within a head, not half of the turned ones apart."""
    HEADS_INTERLEAVED = auto()
    """Each head's queries, keys and values stand together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The modules by name. The last four and the norms stand in a layer."""

    prefixes: tuple[str, ...] = ("model.",)
    """Of all but the head: the first with which there is an embedding."""
    heads: tuple[str, ...] = ("lm_head",)
    """The head: the first that is there."""
    embedding: str = "embed_tokens"
    positions: str = ""
    final_norm: str = "norm"
    layer: str = "layers.{}."
    pre_attention: str = "input_layernorm"
    post_attention: str = ""
    pre_feed: str = "post_attention_layernorm"
    post_feed: str = ""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    row_order: RowOrder = RowOrder.PLAIN
    are_transposed: bool = False
    """Weights of the layers' products are stored as [inputs, outputs]."""


LLAMA_NAMES = Names()
