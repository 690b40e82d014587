"""Adapters of recurrences and shared experts: as if their products had been added to the weights."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kit.kernels.backends import BEST, REFERENCE, Kernels
from tests.kit.kernels.families import VOCAB_SIZE, family_model
from tests.kit.kernels.ranks import new_backend
from tests.kit.kernels.step_runner import StepRunner

if TYPE_CHECKING:
    from pathlib import Path

RANK, ALPHA = 4, 8
TARGETS = {
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "o_proj", "up_proj"),
    "qwen3_next": ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"),
    "lfm2": ("in_proj", "out_proj", "k_proj", "w1", "w2"),
    "granite_hybrid": ("in_proj", "out_proj", "q_proj", "input_linear", "output_linear"),
}
TOKEN_IDS = [(7919 * place) % VOCAB_SIZE for place in range(1, 49)]


def make_adapter(name: str, folder: Path) -> tuple[Path, Path]:
    """Writes an adapter, and the model with the adapter's products in its weights; returns both folders."""
    tensors, generator = load_file(family_model(name) / "model.safetensors"), torch.Generator().manual_seed(5)
    factors: dict[str, torch.Tensor] = {}
    for tensor_name, weight in sorted(tensors.items()):
        module = tensor_name.removesuffix(".weight")
        is_routed = re.search(r"\.experts\.|block_sparse_moe", module)
        if is_routed or weight.dim() != 2 or module.rpartition(".")[2] not in TARGETS[name]:
            continue
        inner = torch.randn(RANK, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        outer = torch.randn(weight.shape[0], RANK, generator=generator) * 0.2 * RANK**-0.5
        factors |= {
            f"base_model.model.{module}.lora_A.weight": inner,
            f"base_model.model.{module}.lora_B.weight": outer,
        }
        weight += ALPHA / RANK * outer @ inner
    found = {each.split(".lora_")[0].rpartition(".")[2] for each in factors}
    assert found == set(TARGETS[name])
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir()
    merged.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS[name])}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors, adapter / "adapter_model.safetensors")
    (merged / "config.json").write_text((family_model(name) / "config.json").read_text())
    save_file(tensors, merged / "model.safetensors")
    return adapter, merged


@pytest.mark.parametrize("kernels", [Kernels(each, torch.float32) for each in (REFERENCE, BEST)], ids=str)
@pytest.mark.parametrize("name", TARGETS)
def test_logits_are_those_of_merged_weights(name: str, kernels: Kernels, tmp_path: Path) -> None:
    adapter, merged = make_adapter(name, tmp_path)
    expected = StepRunner.load(merged, kernels.dtype, new_backend(kernels)).run("merged", TOKEN_IDS, [48])
    runner = StepRunner.load(family_model(name), kernels.dtype, new_backend(kernels)).make_slots([adapter])
    plain = runner.run("plain", TOKEN_IDS, [48])
    runner.adapt("adapted", 1)
    got = runner.run("adapted", TOKEN_IDS, [30, 1, 17])
    assert (got - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (plain - expected).abs().max() > 0.05 * expected.abs().max()
