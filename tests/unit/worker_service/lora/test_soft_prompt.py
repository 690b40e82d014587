"""Soft prompts' folders: what is served is read whole, and what is not is refused by its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockyard.errors import BlockyardError, Reason
from tests.kit.kernels.tiny_adapters import make_tiny_prompt, read_prompt
from worker_service.lora.peft_folder import PeftFolder
from worker_service.lora.reader import read_soft_prompt

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 64


def read(folder: Path, width: int = WIDTH, max_tokens: int = 8) -> torch.Tensor:
    return read_soft_prompt(PeftFolder(folder), width, torch.bfloat16, max_tokens)


def refusal(folder: Path, **limits: int) -> str:
    with pytest.raises(BlockyardError) as caught:
        read(folder, **limits)
    assert caught.value.reason is Reason.MODEL_NOT_LOADED
    return caught.value.message


def test_rows_are_read_and_rounded(tmp_path: Path, model: Path) -> None:
    folder = make_tiny_prompt(tmp_path, model, 1)
    assert torch.equal(read(folder), read_prompt(folder).bfloat16())


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "peft_type is 'PREFIX_TUNING'"),
        ({"peft_type": "P_TUNING"}, "peft_type is 'P_TUNING'"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "MULTITASK_PROMPT_TUNING"),
        ({"num_transformer_submodules": 2}, "num_transformer_submodules"),
        ({"num_virtual_tokens": 7}, "num_virtual_tokens 7"),
        ({"token_dim": 32}, "token_dim 32"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, model: Path, fields: dict[str, Any], name: str) -> None:
    assert name in refusal(make_tiny_prompt(tmp_path, model, 1, **fields))


def test_prompts_of_another_model_and_longer_ones_are_refused(tmp_path: Path, model: Path) -> None:
    folder = make_tiny_prompt(tmp_path, model, 1)
    assert "64 numbers, and the model 128" in refusal(folder, width=128)
    assert "6 virtual tokens, more than --max-prompt-adapter-tokens 5" in refusal(folder, max_tokens=5)


def test_tensors_of_other_kinds_are_refused(tmp_path: Path, model: Path) -> None:
    path = make_tiny_prompt(tmp_path, model, 1) / "adapter_model.safetensors"
    rows = load_file(path)["prompt_embeddings"]
    for tensors in ({"other": rows}, {"prompt_embeddings": rows, "other": rows.clone()}):
        save_file(tensors, path)
        assert "must have prompt_embeddings" in refusal(tmp_path)
    save_file({"prompt_embeddings": rows.int()}, path)
    assert "in floating point" in refusal(tmp_path)
