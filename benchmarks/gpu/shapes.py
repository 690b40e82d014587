"""The shapes that the stages of benchmarks/gpu_day.sh measure: Llama-3.1-8B's, and a tiny one for `--dry`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from blockyard_kernels.sampling import Choices
from worker_service.models.model_config import read_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker_service.models.model_config import ModelConfig

BLOCK_SIZE = 16
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
TINY = {
    **LLAMA_8B,
    # A processor has no products of half floats with results in float32.
    "dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def shape(*, is_dry: bool) -> ModelConfig:
    """The network to measure."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY if is_dry else LLAMA_8B))
        return read_config(Path(folder), None)


def block_tables(lengths: Sequence[int]) -> list[list[int]]:
    """The blocks of sequences of these lengths, all their own, from block 1 on."""
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    ends = np.cumsum([1, *counts]).tolist()
    return [list(range(end - count, end)) for end, count in zip(ends[1:], counts, strict=True)]


def greedy(rows: int) -> Choices:
    """The choice of the likeliest token in so many rows."""
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    numbers = [np.arange(rows, dtype=np.int64) for _ in range(3)]
    return Choices(zeros, np.zeros(rows, np.int64), ones, zeros.copy(), *numbers)
