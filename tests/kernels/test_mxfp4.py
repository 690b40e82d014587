"""gpt-oss as its checkpoints are: experts in MXFP4, turned into numbers when they are loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from blockyard.contract.parallel import Parallel
from blockyard.errors import BlockyardError
from tests.kit.kernels.backends import BEST, Kernels
from tests.kit.kernels.families import family_model
from tests.kit.kernels.ranks import Ranks
from tests.kit.kernels.step_runner import StepRunner
from worker_service.models.mlp.tensors import BLOCK, LEVELS, NO_NUMBER, dequantize_mxfp4
from worker_service.models.model_config import read_config
from worker_service.models.sharded_files import write_slices
from worker_service.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from pathlib import Path

KERNELS = Kernels(BEST, torch.bfloat16)
TOKEN_IDS = list(range(3, 43))
QUANTIZED = ("gate_up_proj", "down_proj")


def random_blocks(*shape: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws blocks [*shape, 16] of any bits, and scales that make numbers of them as large as weights are."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (*shape, BLOCK // 2), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)


def write(folder: Path, *, as_blocks: bool) -> Path:
    """Writes the tiny gpt-oss with experts whose numbers fit MXFP4: as such, or as numbers."""
    folder.mkdir()
    config = json.loads((family_model("gpt_oss") / "config.json").read_text())
    config["dtype"] = "bfloat16"
    if as_blocks:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(family_model("gpt_oss") / "model.safetensors")
    for seed, name in enumerate([name for name in tensors if name.endswith(QUANTIZED)]):
        count, in_features, out_features = tensors.pop(name).shape
        blocks, scales = random_blocks(count, out_features, in_features // BLOCK, seed=seed)
        if as_blocks:
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(
        {name: each if each.dtype is torch.uint8 else each.bfloat16() for name, each in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def test_numbers_are_those_of_the_format() -> None:
    blocks, scales = random_blocks(3, 5, 4, seed=1)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    for number in range(3):
        assert torch.equal(dequantize_mxfp4(blocks[number], scales[number], torch.bfloat16), expected[number].t())
    every = torch.tensor([[[low + 16 * low for low in range(16)]]], dtype=torch.uint8)
    one = dequantize_mxfp4(every[0], torch.tensor([[127]], dtype=torch.uint8), torch.float32)
    assert one.tolist() == [[level for level in LEVELS for _ in range(2)]]
    assert dequantize_mxfp4(every[0], torch.tensor([[NO_NUMBER]], dtype=torch.uint8), torch.float32).isnan().all()


def test_blocks_give_the_bits_of_their_numbers(tmp_path: Path) -> None:
    """On one rank and on two, whose features end within a block, and of a share that was saved."""
    blocks, numbers = (write(tmp_path / str(as_blocks), as_blocks=as_blocks) for as_blocks in (True, False))
    expected = StepRunner.load(numbers, torch.bfloat16, KERNELS.backend).run("x", TOKEN_IDS, [40])
    assert torch.equal(StepRunner.load(blocks, torch.bfloat16, KERNELS.backend).run("x", TOKEN_IDS, [40]), expected)
    assert torch.equal(Ranks(blocks, KERNELS, 2).logits(TOKEN_IDS, [30, 10]), expected)
    config, read = read_config(blocks, None), WeightFiles(blocks, lambda done, total: None)
    assert any("mxfp4" in remark for remark in config.remarks)
    paths = write_slices(config, read, Parallel(2, 1, 1), tmp_path, 1 << 30)
    assert len(paths) == 1
    stored = load_file(paths[0])
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    assert stored[name].dtype is torch.uint8
    assert torch.equal(stored[name], load_file(blocks / "model.safetensors")[name][:, 64:])


def test_no_other_architecture_takes_it(tmp_path: Path) -> None:
    config = json.loads((family_model("mixtral") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(BlockyardError, match="quantized"):
        read_config(tmp_path, None)


def test_bytes_are_taken_for_no_numbers(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", as_blocks=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].byte()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BlockyardError, match=r"model\.norm\.weight is stored as torch\.uint8"):
        StepRunner.load(folder, torch.bfloat16, KERNELS.backend)
