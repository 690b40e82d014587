"""Writes what the library compressed-tensors makes of weights, and what it makes of that again, for tests without it.

    python -m tests.kit.kernels.compressed_tensors        needs `pip install compressed-tensors`

Each case has its scheme's name before the library's own names of tensors, and `dequantized` for what it gives back.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PATH = Path(__file__).parents[2] / "kernels" / "data" / "compressed_tensors.safetensors"
SHAPE = (40, 128)
SCHEMES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": True}, torch.bfloat16),
    "w4a16": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
        torch.bfloat16,
    ),
    "w4a16_asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
        torch.float16,
    ),
    "w4a16_channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel", "symmetric": True}, torch.bfloat16),
}
"""The library's format, its arguments of weights, and the dtype of these."""


def main() -> None:
    """The program."""
    compressors = importlib.import_module("compressed_tensors.compressors")
    quantization = importlib.import_module("compressed_tensors.quantization")
    helpers = importlib.import_module("compressed_tensors.quantization.utils")
    tensors = dict[str, torch.Tensor]()
    for number, (name, (form, arguments, dtype)) in enumerate(SCHEMES.items()):
        generator = torch.Generator().manual_seed(number)
        weight = (torch.randn(SHAPE, generator=generator) + 0.3).to(dtype)
        weights = quantization.QuantizationArgs(**arguments)
        inputs = quantization.QuantizationArgs(num_bits=8, strategy="token", dynamic=True) if name == "w8a8" else None
        scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)
        group = arguments.get("group_size", SHAPE[1])
        by_group = weight.unflatten(1, (-1, group))
        scale, zero = helpers.calculate_qparams(by_group.amin(2), by_group.amax(2), weights)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        compressor = compressors.BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        given = compressor.decompress(stored, scheme)["weight"]
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in stored.items() if value is not None}
        tensors[f"{name}.dequantized"] = given.contiguous()
    PATH.parent.mkdir(exist_ok=True)
    save_file(tensors, PATH, {"made by": f"compressed-tensors {metadata.version('compressed-tensors')}"})


if __name__ == "__main__":
    main()
