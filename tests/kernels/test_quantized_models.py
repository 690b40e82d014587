"""Checkpoints that come quantized: their levels and scales are those of their format, and schedules change no bit."""

from __future__ import annotations

import json
import random
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockyard.capacity.formats import weight_format
from blockyard.capacity.weights import weights_bytes
from blockyard.contract.parallel import ALONE, Parallel
from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.fields import Fields
from blockyard.model_config.share import Share
from blockyard.model_config.stored_weights import StoredWeights, read_stored_weights
from blockyard_kernels.select import get_backend
from tests.kit.kernels.backends import INSTRUCTION_SETS, build_kernels
from tests.kit.kernels.compressed_tensors import PATH as MADE
from tests.kit.kernels.compressed_tensors import SCHEMES, SHAPE
from tests.kit.kernels.quantized_models import CONFIGS, quantized_model
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from worker_service.models.loader import load_model
from worker_service.models.quantized.unpacking import unpack

if TYPE_CHECKING:
    from pathlib import Path

    from worker_service.models.loader import RunnableModel

CPU = torch.device("cpu")
LENGTH = 150
FORMATS = list(CONFIGS)
TOKEN_IDS = [random.Random(1).randrange(VOCAB_SIZE) for _ in range(LENGTH)]


def load(folder: Path, dtype: torch.dtype, kernels: str = "auto", **how: object) -> RunnableModel:
    build_kernels()
    return load_model(folder, dtype, CPU, lambda done, total: None, kernels, **how)  # type: ignore[arg-type]


def read(folder: Path, pieces: list[int], kernels: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    build_kernels()
    return StepRunner.load(folder, dtype, get_backend(CPU, dtype, kernels)).run("it", TOKEN_IDS, pieces)


def refusal(folder: Path, **how: object) -> str:
    with pytest.raises(BlockyardError) as caught:
        load(folder, torch.bfloat16, "reference", **how)
    assert caught.value.reason is Reason.MODEL_NOT_LOADED
    return caught.value.message


def changed(source: Path, folder: Path, tensors: dict[str, Tensor | None], **config: object) -> Path:
    """Copies a model with other tensors, None for none, and other fields of quantization_config."""
    shutil.copytree(source, folder)
    stored = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in (stored | tensors).items() if value is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("model", ["qwen2", "llama_tied"])
@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_are_what_the_checkpoint_stands_for(model: str, name: str):
    quantized, plain = quantized_model(model, name)
    expected = load_file(plain / "model.safetensors")
    found = dict[str, Tensor]()
    for module in load(quantized, torch.float32, "reference").model.modules():
        found |= dict(module.named_tensors())
    assert found.keys() >= expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key].float(), tensor.float()), key


@pytest.mark.parametrize("kernels", [INSTRUCTION_SETS[0], "reference"])
@pytest.mark.parametrize("name", FORMATS)
def test_schedules_do_not_matter_and_logits_are_near_those_of_the_plain_weights(name: str, kernels: str):
    quantized, plain = quantized_model("qwen2", name)
    whole = read(quantized, [LENGTH], kernels)
    assert torch.equal(read(quantized, [1, 16, 90, 3, *[1] * 10, 30], kernels), whole)
    exact = read(plain, [LENGTH], "reference", torch.float32)
    assert (whole - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("kernels", INSTRUCTION_SETS)
def test_all_kernels_give_the_bits_of_the_reference_in_products(kernels: str):
    """A whole network has other ops, whose bits are a backend's own: one module alone."""
    build_kernels()
    folder = quantized_model("qwen2", "gptq_ordered")[0]
    rows = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    results = list[Tensor]()
    for name in (kernels, "reference"):
        loaded = load(folder, torch.float32, name)
        results.append(loaded.backend.linear(rows, loaded.model.layers[0].mixer.qkv.packed))
    assert torch.equal(*results)


@pytest.mark.parametrize(("name", "quantization"), [("w8a8", "int8"), ("awq", "int4")])
def test_it_tells_what_it_holds(name: str, quantization: str):
    folder, plain = quantized_model("qwen2", name)
    loaded, dense = load(folder, torch.bfloat16), load(plain, torch.bfloat16)
    assert loaded.quantization == quantization
    assert loaded.config.stored is not None
    assert loaded.parameter_bytes < 0.8 * dense.parameter_bytes
    assert loaded.model.probe()


@pytest.mark.parametrize("model", ["qwen2", "llama_tied"])
def test_what_the_checkpoint_has_not_quantized_may_be_held_in_8_bits(model: str, tmp_path: Path):
    """That is the head: the layers are the checkpoint's."""
    folder, plain = quantized_model(model, "awq")
    ours = load(folder, torch.bfloat16, quantization="int8", packed_cache=tmp_path)
    again = load(folder, torch.bfloat16, quantization="int8", packed_cache=tmp_path)
    assert (again.origin.source, again.model.fingerprint()) == ("packed", ours.model.fingerprint())
    without = load(folder, torch.bfloat16, packed_cache=tmp_path)
    dense = load(plain, torch.bfloat16, quantization="int8")
    assert ours.parameter_bytes < without.parameter_bytes or model == "llama_tied"
    held = weight_format("cpu", "bfloat16", "int8", "auto")
    assert weights_bytes(ours.config, Share.of(ours.config, ALONE), held) == ours.parameter_bytes
    rows = ours.model._fixed_rows()
    assert torch.equal(rows, without.model._fixed_rows())
    assert torch.equal(ours.model.compute_logits(rows), dense.model.compute_logits(rows))


@pytest.mark.parametrize("name", ["w8a8", "gptq_ordered", "w4a16_channel"])
def test_packed_weights_are_read_as_they_were_written(name: str, tmp_path: Path):
    folder = quantized_model("qwen2", name)[0]
    first = load(folder, torch.bfloat16, packed_cache=tmp_path)
    again = load(folder, torch.bfloat16, packed_cache=tmp_path)
    assert (first.origin.source, again.origin.source) == ("files", "packed")
    assert again.model.fingerprint() == first.model.fingerprint()
    assert again.parameter_bytes == first.parameter_bytes


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_have_the_same_sizes_and_plans_know_them(name: str, kernels: str):
    folder = quantized_model("qwen2", name)[0]
    made, loaded = load(folder, torch.bfloat16, kernels, load_format="random"), load(folder, torch.bfloat16, kernels)
    held = weight_format("cpu", "bfloat16", "none", kernels)
    assert made.parameter_bytes == loaded.parameter_bytes
    assert weights_bytes(loaded.config, Share.of(loaded.config, ALONE), held) == loaded.parameter_bytes
    logits = made.model.compute_logits(made.model._fixed_rows())
    assert logits.isfinite().all() and logits.std() > 0.01


def test_two_ranks_hold_the_two_halves_of_eight_bits():
    whole = load(quantized_model("llama_tied", "w8a8")[0], torch.float32, "reference").model
    halves = [
        load(quantized_model("llama_tied", "w8a8")[0], torch.float32, "reference", parallel=Parallel(2, 1, rank)).model
        for rank in range(2)
    ]
    for name, dim in (("qkv", 0), ("output", 1), ("gate_up", 0), ("down", 1)):
        parts = [dict(_tensors(model, name)) for model in halves]
        for key, tensor in _tensors(whole, name):
            assert torch.equal(torch.cat([part[key] for part in parts], dim), tensor)


def _tensors(model: object, name: str) -> list[tuple[str, Tensor]]:
    layer = model.layers[0]  # type: ignore[attr-defined]
    projection = getattr(layer.mixer if hasattr(layer.mixer, name) else layer.feed, name)
    weight, _ = projection.packed.unpack()
    sizes = [rows.num_rows for rows in projection.modules]
    return list(zip([rows.name for rows in projection.modules], weight.split(sizes), strict=True))


# What is refused.


def test_sizes_that_would_cut_a_group_are_refused():
    message = refusal(quantized_model("llama_tied", "gptq_ordered")[0], parallel=Parallel(2, 1, 0))
    assert "allows a tensor-parallel size of 1 " in message


def test_a_second_quantization_is_refused():
    assert "are quantized already" in refusal(quantized_model("qwen2", "awq")[0], quantization="fp8")


def test_a_gpu_is_refused():
    with pytest.raises(BlockyardError, match="kernels for GPUs do not multiply such yet"):
        load_model(quantized_model("qwen2", "gptq")[0], None, torch.device("cuda"), lambda done, total: None)


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensors", "told"),
    [
        ("gptq", {f"{QUERY}.qweight": None}, f"no tensor {QUERY}.qweight"),
        ("gptq", {f"{QUERY}.scales": torch.full((3, 96), float("nan")).half()}, "scales that are not finite"),
        ("gptq", {f"{QUERY}.qzeros": torch.full((3, 12), -1, dtype=torch.int32)}, "convert the model to gptq_v2"),
        ("gptq", {f"{QUERY}.g_idx": torch.arange(96).int() % 3}, "a g_idx of its own"),
        ("gptq", {f"{QUERY}.qweight": torch.zeros(6, 96, dtype=torch.int32)}, "has shape"),
        ("gptq", {f"{QUERY}.qweight": torch.zeros(12, 96)}, "is stored as F32; supported are I32"),
        ("gptq_ordered", {f"{QUERY}.g_idx": torch.zeros(96).int()}, "groups are not of 32 inputs each"),
        ("gptq_ordered", {f"{QUERY}.g_idx": torch.arange(96).int() // 32}, "differ in g_idx"),
        ("w8a8", {f"{QUERY}.weight": torch.zeros(96, 96)}, "is stored as F32; supported are I8"),
        ("w8a8", {f"{QUERY}.weight_zero_point": torch.ones(96, 1, dtype=torch.int8)}, "has zero points, though"),
        ("w4a16", {f"{QUERY}.weight_shape": torch.tensor([96, 90])}, r"weight_shape is \[96, 90\], not \[96, 96\]"),
        ("w4a16_asymmetric", {f"{QUERY}.weight_zero_point": None}, "no tensor"),
    ],
)
def test_damaged_tensors_are_refused(name: str, tensors: dict[str, Tensor | None], told: str, tmp_path: Path):
    folder = changed(quantized_model("qwen2", name)[0], tmp_path / "model", tensors)
    with pytest.raises(BlockyardError, match=told):
        load(folder, torch.bfloat16, "reference")


def test_integers_are_no_weights_of_a_model_that_is_not_quantized(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(quantized_model("qwen2", "w8a8")[0], folder)
    shutil.copyfile(tiny_model("qwen2") / "config.json", folder / "config.json")
    assert "is stored as I8; supported are F64, F32, F16, BF16" in refusal(folder)


def test_modules_may_be_left_as_they_are(tmp_path: Path):
    """Those that `ignore` names are read in floats; of projections that are multiplied as one all or none."""
    quantized, plain = quantized_model("qwen2", "w4a16")
    down, dense = "model.layers.1.mlp.down_proj", load_file(plain / "model.safetensors")
    tensors: dict[str, Tensor | None] = {
        f"{down}.{part}": None for part in ("weight_packed", "weight_scale", "weight_shape")
    }
    tensors[f"{down}.weight"] = dense[f"{down}.weight"]
    folder = changed(quantized, tmp_path / "one", tensors, ignore=["lm_head", "re:.*layers.1.mlp.down_proj"])
    loaded = load(folder, torch.float32, "reference")
    downs = [module for module in loaded.model.modules() if module.name.endswith("down_proj")]
    layouts = [module.describe() for module in downs]
    assert "4 bits" in layouts[0] and "float32" in layouts[1]
    some = changed(quantized, tmp_path / "some", {}, ignore=["lm_head", QUERY])
    assert "has only some of them quantized" in refusal(some)


# The formats by those who made them.


@pytest.mark.parametrize("name", list(SCHEMES))
def test_levels_are_those_of_compressed_tensors(name: str):
    """What the library makes of weights, and of that again: `tests.kit.kernels.compressed_tensors` asked it."""
    tensors = {
        key.removeprefix(f"{name}."): value for key, value in load_file(MADE).items() if key.startswith(f"{name}.")
    }
    stored = stored_weights(_scheme(name))
    made = {key: value for key, value in tensors.items() if key != "dequantized"}
    weight = unpack(stored, name, SHAPE, made, torch.bfloat16).dequantize()
    assert torch.equal(weight.to(tensors["dequantized"].dtype), tensors["dequantized"])


def _scheme(name: str) -> dict[str, object]:
    form, arguments, _ = SCHEMES[name]
    config = json.loads(json.dumps(CONFIGS["w8a8" if form == "int-quantized" else "w4a16"]))
    weights = {**arguments, "type": "int", "dynamic": False}
    config["config_groups"]["group_0"]["weights"] = weights
    return config


def stored_weights(config: dict[str, object]) -> StoredWeights:
    fields = Fields({"quantization_config": config})
    stored = read_stored_weights(fields)
    assert stored is not None, fields.violations
    return stored
