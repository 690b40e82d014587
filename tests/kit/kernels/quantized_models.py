"""Tiny models in the formats of quantized checkpoints, written out as their tools pack them, with what they stand for.

AWQ as AutoAWQ's `WQLinear_GEMM.from_linear` packs, GPTQ as `QuantLinear.pack` (and less 1 in its first format), and
compressed-tensors as `tests/kernels/data/compressed_tensors.safetensors`, which its own library made.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.kit.kernels.tiny_models import tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable


_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Levels:
    """A weight in four bits: `(levels - zeros) * scales`."""

    levels: Tensor
    """[outputs, inputs] int64 below 16."""
    zeros: Tensor
    """[outputs, groups] int64 below 16."""
    scales: Tensor
    """[outputs, groups], in the dtype in which they are stored."""
    groups: Tensor
    """[inputs]: the group of each input."""

    @classmethod
    def of(
        cls, weight: Tensor, group: int, dtype: torch.dtype, *, symmetric: bool, scattered: bool = False, seed: int = 0
    ) -> Levels:
        """Quantizes a weight; `group`: 0 for all inputs in one; `scattered`: inputs of a group are any."""
        inputs = weight.shape[1]
        group = group or inputs
        groups = torch.arange(inputs) // group
        if scattered:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
        by_group = weight[:, groups.argsort(stable=True)].unflatten(1, (-1, group))
        if symmetric:
            scales = (by_group.abs().amax(2) / 7.5).to(dtype)
            zeros = torch.full_like(scales, 8, dtype=torch.int64)
        else:
            low, high = by_group.amin(2).clamp(max=0), by_group.amax(2).clamp(min=0)
            scales = ((high - low) / 15).to(dtype)
            # As of v1 of GPTQ no zero point is 0: its readers do not agree on that one.
            zeros = (-low / scales.float()).round().clamp(1, 15).long()
        levels = (weight / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 15).long()
        return cls(levels, zeros, scales, groups)

    def dequantize(self) -> Tensor:
        """Returns what it stands for, in float32."""
        return (self.levels - self.zeros[:, self.groups]).float() * self.scales.float()[:, self.groups]


def pack_words(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Packs [rows, columns] into words [rows, columns / 8] int32: the column `order[i]` of each eight at bit 4 * i."""
    words = torch.zeros(len(values), -(-values.shape[1] // 8), dtype=torch.int64)
    for column in range(values.shape[1]):
        words[:, column // 8] |= values[:, column] << 4 * order.index(column % 8)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def awq_tensors(weight: Levels) -> dict[str, Tensor]:
    """Returns the tensors of a module of AWQ."""
    levels, zeros = (pack_words(values.T, _AWQ_COLUMNS) for values in (weight.levels, weight.zeros))
    return {"qweight": levels, "qzeros": zeros, "scales": weight.scales.T.contiguous()}


def gptq_tensors(weight: Levels, *, less: int = 1) -> dict[str, Tensor]:
    """Returns the tensors of a module of GPTQ; `less`: what is taken off zero points."""
    return {
        "qweight": pack_words(weight.levels).T.contiguous(),
        "qzeros": pack_words((weight.zeros - less).T),
        "scales": weight.scales.T.contiguous(),
        "g_idx": weight.groups.int(),
    }


def words_tensors(weight: Levels, *, symmetric: bool) -> dict[str, Tensor]:
    """Returns the tensors of a module of compressed-tensors, pack-quantized."""
    tensors = {"weight_packed": pack_words(weight.levels), "weight_scale": weight.scales}
    tensors["weight_shape"] = torch.tensor(weight.levels.shape)
    if not symmetric:
        tensors["weight_zero_point"] = pack_words(weight.zeros.T).T.contiguous()
    if not weight.groups.equal(weight.groups.sort().values):
        tensors["weight_g_idx"] = weight.groups.int()
    return tensors


def bytes_tensors(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the tensors of a module of compressed-tensors, int-quantized, and what they stand for."""
    scales = (weight.abs().amax(1, keepdim=True) / 127.5).bfloat16()
    levels = (weight / scales.float()).round().clamp(-128, 127)
    return {"weight": levels.to(torch.int8), "weight_scale": scales}, levels * scales.float()


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


TOKENS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
CHANNELS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
GROUPS: dict[str, Any] = {**CHANNELS, "num_bits": 4, "strategy": "group", "group_size": 32}
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "w8a8": _compressed("int-quantized", CHANNELS, TOKENS),
    "w4a16": _compressed("pack-quantized", GROUPS),
    "w4a16_asymmetric": _compressed("pack-quantized", {**GROUPS, "symmetric": False}),
    "w4a16_channel": _compressed("pack-quantized", {**CHANNELS, "num_bits": 4}),
    "w4a16_ordered": _compressed("pack-quantized", {**GROUPS, "actorder": "group"}),
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": _GPTQ,
    "gptq_asymmetric": {**_GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
    "gptq_ordered": {**_GPTQ, "desc_act": True},
}
"""`quantization_config` of each format."""


def quantize_module(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Quantizes a weight in one of CONFIGS; returns its tensors, and what they stand for."""
    if name == "w8a8":
        return bytes_tensors(weight)
    symmetric = name in ("w4a16", "w4a16_channel", "w4a16_ordered", "gptq", "gptq_ordered")
    dtype = torch.bfloat16 if name.startswith("w4") else torch.float16
    # Modules of one input have the same order, as GPTQ finds it.
    scattered, group = name.endswith("ordered"), 0 if name == "w4a16_channel" else 32
    levels = Levels.of(weight, group, dtype, symmetric=symmetric, scattered=scattered, seed=weight.shape[1])
    packers: dict[str, Callable[[], dict[str, Tensor]]] = {
        "awq": lambda: awq_tensors(levels),
        "gptq": lambda: gptq_tensors(levels),
        "gptq_ordered": lambda: gptq_tensors(levels),
        "gptq_asymmetric": lambda: gptq_tensors(levels, less=0),
    }
    pack = packers.get(name, lambda: words_tensors(levels, symmetric=symmetric))
    return pack(), levels.dequantize()


@cache
def quantized_model(model: str, name: str) -> tuple[Path, Path]:
    """Makes a tiny model's folder in one of CONFIGS, and one of the same weights as plain floats; once a process."""
    home = Path(tempfile.mkdtemp(prefix="quantized-models-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return write_quantized(tiny_model(model), name, home)


def write_quantized(source: Path, name: str, home: Path, left: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Writes both folders of `quantized_model` below `home`; `left`: ends of modules that stay as they are."""
    tensors, plain = dict[str, Tensor](), dict[str, Tensor]()
    for key, tensor in load_file(source / "model.safetensors").items():
        module, _, end = key.rpartition(".")
        if end != "weight" or tensor.dim() != 2 or module.endswith(("embed_tokens", "lm_head", *left)):
            tensors[key] = plain[key] = tensor
            continue
        parts, plain[key] = quantize_module(name, tensor.float())
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    quantized, dense = home / f"{source.name}-{name}", home / f"{source.name}-{name}-plain"
    for folder, weights in ((quantized, tensors), (dense, plain)):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    stored = CONFIGS[name] | ({"ignore": ["lm_head", *(f"re:.*{end}$" for end in left)]} if left else {})
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": stored}))
    return quantized, dense
