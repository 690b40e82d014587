"""Rotary tables against transformers, for every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from blockyard.model_config.rotary import RotaryConfig
from worker_service.models.rotary import KINDS, rotary_table

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("linear", {"factor": 2.5}),
    ("llama3", LLAMA3),
    ("llama3", {**LLAMA3, "factor": 32.0, "high_freq_factor": 9.0}),
    ("yarn", YARN),
    ("yarn", {**YARN, "attention_factor": 0.7}),
    ("yarn", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
    ("yarn", {**YARN, "mscale": 1.2, "mscale_all_dim": 0.6}),
    ("yarn", {**YARN, "factor": 1.0}),
]


def reference_table(kind: str, parameters: dict[str, Any], head_dim: int, theta: float) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(1024)[None])
    sines[..., : head_dim // 2] *= -1
    return torch.cat([cosines, sines], dim=-1)[0]


@pytest.mark.parametrize(("kind", "parameters"), CASES)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (128, 500000.0)])
def test_tables_are_those_of_transformers(kind: str, parameters: dict[str, Any], head_dim: int, theta: float):
    config = RotaryConfig(kind, theta, {name: float(value) for name, value in parameters.items()})
    got = rotary_table(config, head_dim, 1024, torch.float32)
    # Where two frequencies are blended, the order of float32 operations moves a frequency by its last bit.
    tolerance = 1e-4 if kind in ("yarn", "llama3") else 2e-6
    torch.testing.assert_close(got, reference_table(kind, parameters, head_dim, theta), rtol=0, atol=tolerance)


def test_every_kind_is_tested():
    # Whole models have the other two: `tests.kit.kernels.families`.
    assert {kind for kind, _ in CASES} == set(KINDS) - {"longrope", "ntk_alpha"}


def test_a_long_table_is_made_in_parts():
    got = rotary_table(RotaryConfig(), 64, 10_001, torch.float32)
    assert got.shape == (10_001, 128)
    angles = torch.outer(torch.arange(10_001).float(), 1 / 10000.0 ** (torch.arange(0, 64, 2).float() / 64))
    torch.testing.assert_close(got[:, :32], angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(got[:, 64:96], -angles.sin(), rtol=0, atol=1e-6)
    torch.testing.assert_close(got[:, 96:], angles.sin(), rtol=0, atol=1e-6)


def test_the_table_is_rounded_once():
    wide = rotary_table(RotaryConfig(), 64, 100, torch.float32)
    assert torch.equal(rotary_table(RotaryConfig(), 64, 100, torch.bfloat16), wide.bfloat16())
