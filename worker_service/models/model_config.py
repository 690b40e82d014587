"""The sizes of a network and its dtype: `blockyard.model_config.network` for PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch

from blockyard.contract.models import Task
from blockyard.model_config.decoder_config import DTYPES, DecoderConfig
from blockyard.model_config.network import read_network

if TYPE_CHECKING:
    from pathlib import Path


_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(DecoderConfig):
    """A decoder's architecture. Read from config.json; the rest of the worker reads sizes from it."""

    dtype: torch.dtype
    quantized_kv: torch.dtype | None = None
    """The dtype of KV blocks; None: `dtype`, they are not quantized."""

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of KV blocks."""
        return self.quantized_kv or self.dtype


def read_config(folder: Path, dtype: torch.dtype | None, task: Task = Task.UNSPECIFIED) -> ModelConfig:
    """Reads a model folder's config.json.

    Args:
        folder: the model's folder.
        dtype: the dtype to compute in; None: the dtype of config.json, or float32 if it names none.
        task: the task for which the model is served; UNSPECIFIED: the task in its files.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, if the file is missing or damaged, or needs an unsupported feature.
    """
    network = read_network(folder, "auto" if dtype is None else str(dtype).removeprefix("torch."), task)
    values = {field.name: getattr(network, field.name) for field in fields(DecoderConfig)}
    return ModelConfig(**values, dtype=_DTYPES[network.dtype_name])


def hold_kv_in(kv_cache_dtype: str, config: ModelConfig) -> ModelConfig:
    """Returns the configuration with KV blocks of a dtype; "auto" and the model's own dtype leave it as it is."""
    return replace(config, quantized_kv=torch.int8) if kv_cache_dtype == "int8" else config
