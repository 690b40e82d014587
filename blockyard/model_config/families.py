"""The architectures by name, and what sets each apart. All of them are one network, `worker_service.models.decoder`.

A new family of the same network is one more entry; what config.json says is read in `network`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Windows(Enum):
    """Which layers see only the last keys."""

    NEVER = auto()
    """None; config.json may not ask for one."""
    ALWAYS = auto()
    """All, if there is a `sliding_window`."""
    FLAGGED = auto()
    """Those that `layer_types` or `max_window_layers` name, if `use_sliding_window` is set."""


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes, and config.json does not say."""

    model_type: str = ""
    """The `model_type` that belongs to it; transformers builds the network by that one. Empty: any."""
    qkv_bias: bool = False
    """Queries, keys and values always have a bias, the output projection never; `attention_bias` changes nothing."""
    reads_attention_bias: bool = False
    """`attention_bias` gives one to all four."""
    reads_mlp_bias: bool = False
    """`mlp_bias` gives one to all projections of the MLP."""
    qk_norm: bool = False
    """Queries and keys are normalised for each head."""
    windows: Windows = Windows.NEVER
    head_dim: int | None = None
    """Where config.json has none; None: hidden_size / num_attention_heads."""
    num_kv_heads: int | None = None
    """Where config.json has no `num_key_value_heads`; None: num_attention_heads."""


# The `sliding_window` of a family that has windows, where config.json has none: transformers' default of all of them.
DEFAULT_WINDOW = 4096

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("llama", reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family("mistral", windows=Windows.ALWAYS, num_kv_heads=8),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, windows=Windows.FLAGGED, num_kv_heads=32),
    "Qwen3ForCausalLM": Family(
        "qwen3", reads_attention_bias=True, qk_norm=True, windows=Windows.FLAGGED, head_dim=128, num_kv_heads=32
    ),
}
