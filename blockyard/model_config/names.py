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


class ExpertLayout(Enum):
    """How the weights of a layer's experts are stored."""

    EXPERTS = auto()
    """Each in tensors of its own, [inner, width] and [width, inner]: `{}` in a name is its number."""
    STACKED = auto()
    """In one tensor of all gates and ups, [experts, 2 * inner, width], and one of all that leads back."""
    GATE_UP_INTERLEAVED = auto()
    """In one [experts, width, 2 * inner], a gate and its up side by side, and one [experts, inner, width].

    As MXFP4, whose names end in _blocks and _scales: [experts, 2 * inner, width / 32, 16] and [experts, width,
    inner / 32, 16].
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The router's module, and the tensors of the experts, in a layer."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    layout: ExpertLayout = ExpertLayout.EXPERTS


_EXPERT_NAMES = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The modules by name. All but the first five and the last two stand in a layer."""

    prefixes: tuple[str, ...] = ("model.", "")
    """Of all but the head: the first with which there is an embedding."""
    heads: tuple[str, ...] = ("lm_head",)
    """The head: the first that is there."""
    embedding: str = "embed_tokens"
    positions: str = ""
    token_types: str = ""
    embedding_norm: str = ""
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
    sinks: str = "self_attn.sinks"
    experts: ExpertNames = _EXPERT_NAMES
    row_order: RowOrder = RowOrder.PLAIN
    are_transposed: bool = False
    """Weights of the layers' products are stored as [inputs, outputs]."""


LLAMA_NAMES = Names()
