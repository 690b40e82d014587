"""From an architecture's name to what sets it apart. All of them are one network, `worker_service.models.decoder`.

A new family of the same network is one more entry; what config.json says is read in `model_config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Windows(Enum):
    """Which layers see only the last keys."""

    NEVER = auto()
    """None, whatever config.json says."""
    ALWAYS = auto()
    """All, if config.json has a `sliding_window`."""
    FLAGGED = auto()
    """Those that `layer_types` or `max_window_layers` name, if `use_sliding_window` is set."""


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes, and config.json does not say."""

    qkv_bias: bool = False
    """Queries, keys and values always have a bias, the output projection never."""
    reads_attention_bias: bool = False
    """`attention_bias` gives one to all four."""
    reads_mlp_bias: bool = False
    """`mlp_bias` gives one to all projections of the MLP."""
    qk_norm: bool = False
    """Queries and keys are normalised for each head."""
    windows: Windows = Windows.NEVER
    head_dim: int | None = None
    """Where config.json has none; None: hidden_size / num_attention_heads."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(windows=Windows.ALWAYS),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=Windows.FLAGGED),
    "Qwen3ForCausalLM": Family(reads_attention_bias=True, qk_norm=True, windows=Windows.FLAGGED, head_dim=128),
}
