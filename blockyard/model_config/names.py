"""The names of a network's modules in a checkpoint, and the order of rows in the stored tensors.

Weights with the same module name are stored as one tensor, their rows one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class RowOrder(Enum):
    """The order of rows in the stored Q and K weights, or in a fused QKV weight."""

    PLAIN = auto()
    PAIRS_INTERLEAVED = auto()
    """Within a head the two features of a rotated pair are adjacent, instead of half the rotated features apart."""
    HEADS_INTERLEAVED = auto()
    """Each head's rows of Q, K and V are adjacent."""


class ExpertLayout(Enum):
    """How the weights of a layer's experts are stored."""

    EXPERTS = auto()
    """Each expert in its own tensors, [inner, width] and [width, inner]; `{}` in a name is the expert's number."""
    STACKED = auto()
    """One tensor with all gates and ups, [experts, 2 * inner, width], and one with all down projections."""
    GATE_UP_INTERLEAVED = auto()
    """One tensor [experts, width, 2 * inner] with each gate beside its up, and one [experts, inner, width].

    In MXFP4 their names end in _blocks and _scales: [experts, 2 * inner, width / 32, 16] and [experts, width,
    inner / 32, 16].
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The names of a layer's router module and of its experts' tensors."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    layout: ExpertLayout = ExpertLayout.EXPERTS
    choice_bias: str = ""
    shared: tuple[str, str, str] = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    )
    """Gate, up and down of the shared MLP; gate and up may be one tensor."""
    shared_gate: str = "mlp.shared_expert_gate"


_EXPERT_NAMES = ExpertNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentNames:
    """The names of a recurrence's modules and tensors, relative to the layer."""

    inputs: tuple[str, ...] = (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )
    """The modules of the first product: inputs of the convolution, gates, update logits, time steps.

    One module, of Mamba 2: gates, inputs of the convolution, time steps. Two modules: the rows of the first are grouped
    by key head, each with its query, key, values and gates; those of the second too, each with the update logits and
    the time steps of its values.
    """
    conv: str = "linear_attn.conv1d"
    decay_log: str = "linear_attn.A_log"
    step_bias: str = "linear_attn.dt_bias"
    skip: str = ""
    norm: str = "linear_attn.norm"
    output: str = "linear_attn.out_proj"


_RECURRENT_NAMES = RecurrentNames()


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of modules. From `pre_attention` to `recurrent` they are relative to the layer."""

    prefixes: tuple[str, ...] = ("model.", "")
    """Prefixes of all modules except the head; the first prefix with which the embedding exists is used."""
    heads: tuple[str, ...] = ("lm_head",)
    """Names of the head; the first that exists is used."""
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
    other_experts: ExpertNames | None = None
    """Names of experts in some of the architecture's checkpoints, which are used if the tensors exist."""
    recurrent: RecurrentNames = _RECURRENT_NAMES
    row_order: RowOrder = RowOrder.PLAIN
    are_transposed: bool = False
    """Whether the weights of the layers' products are stored as [inputs, outputs]."""


LLAMA_NAMES = Names()
