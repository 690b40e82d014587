"""Adapters' folders: what is served is read whole, and what is not is refused by its name."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockyard.errors import BlockyardError, Reason
from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from worker_service.lora.adapter_files import AdapterFiles
from worker_service.lora.peft_folder import PeftFolder

if TYPE_CHECKING:
    from pathlib import Path

Q_PROJ = "model.layers.0.self_attn.q_proj"
TENSOR = f"base_model.model.{Q_PROJ}.lora_A.weight"


def make(folder: Path, model: Path, **fields: Any) -> Path:
    return make_tiny_adapter(folder, model, 1, targets=("q_proj", "down_proj"), **fields)


def refusal(folder: Path, max_rank: int = 8) -> str:
    with pytest.raises(BlockyardError) as caught:
        AdapterFiles(PeftFolder(folder), max_rank)
    assert caught.value.reason is Reason.MODEL_NOT_LOADED
    return caught.value.message


def test_factors_are_read_with_their_scale(tmp_path: Path, model: Path) -> None:
    files = AdapterFiles(PeftFolder(make(tmp_path, model)), 4)
    assert set(files.modules) == {
        f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    assert files.modules[Q_PROJ] == (4, 64, 64)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    inner, outer = files.read(Q_PROJ)
    assert torch.equal(inner, stored[TENSOR])
    assert torch.equal(outer, stored[TENSOR.replace("lora_A", "lora_B")] * 2.0)


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"lora_alpha": 3}, 3 / 4),
        ({"use_rslora": True}, 8 / math.sqrt(4)),
        ({"alpha_pattern": {"q_proj": 12}}, 3.0),
        ({"r": 16, "rank_pattern": {"q_proj": 4, "mlp.down_proj": 4}}, 8 / 4),
        ({"alpha_pattern": {"layers.1.self_attn.q_proj": 12}}, 2.0),
    ],
)
def test_the_scale_is_that_of_the_module(tmp_path: Path, model: Path, fields: dict[str, Any], scale: float) -> None:
    files = AdapterFiles(PeftFolder(make(tmp_path, model, **fields)), 8)
    assert files.config.scale_of(Q_PROJ) == (4, scale)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"r": "4"}, "r and lora_alpha"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
        ({"r": 6}, "its rank is 6"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, model: Path, fields: dict[str, Any], name: str) -> None:
    assert name in refusal(make(tmp_path, model, **fields))


def test_a_rank_above_the_limit_is_refused(tmp_path: Path, model: Path) -> None:
    assert "rank 4, more than --max-lora-rank 3" in refusal(make(tmp_path, model), max_rank=3)


@pytest.mark.parametrize("name", ["base_model.model.lm_head.bias", "base_model.model.x.lora_magnitude_vector.weight"])
def test_tensors_of_other_kinds_are_refused(tmp_path: Path, model: Path, name: str) -> None:
    path = make(tmp_path, model) / "adapter_model.safetensors"
    save_file(load_file(path) | {name: torch.zeros(4)}, path)
    assert name in refusal(tmp_path)


def test_files_that_are_damaged_missing_or_of_another_format_are_refused(tmp_path: Path, model: Path) -> None:
    path = make(tmp_path, model) / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "damaged or not complete" in refusal(tmp_path)
    tensors = {name: tensor for name, tensor in load_file(_write(path, whole)).items() if name != TENSOR}
    save_file(tensors, path)
    assert f"{Q_PROJ} has one factor alone" in refusal(tmp_path)
    path.rename(tmp_path / "adapter_model.bin")
    assert "loading it can run code" in refusal(tmp_path)
    (tmp_path / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refusal(tmp_path)


def _write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_the_digest_is_that_of_the_contents(tmp_path: Path, model: Path) -> None:
    first, same = (PeftFolder(make(tmp_path / name, model)).digest() for name in ("a", "b"))
    assert first == same
    config = tmp_path / "b" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 9}))
    assert PeftFolder(tmp_path / "b").digest() != first
