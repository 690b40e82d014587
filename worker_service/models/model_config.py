"""What a network is made of: config.json read into one frozen dataclass, with every unsupported setting refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's architecture. Read from config.json; the rest of the worker reads sizes from it."""

    architecture: str
    dtype: torch.dtype
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    sliding_window: int | None
    """Keys that a query sees in the layers that have a window; None where no layer has one."""
