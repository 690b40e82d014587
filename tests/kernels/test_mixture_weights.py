"""The weights of mixtures through all that weights go through: named, packed, saved, made, cut, quantized, refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from blockyard.capacity.weights import count_elements
from blockyard.contract.parallel import ALONE, Parallel
from blockyard.errors import BlockyardError
from blockyard_kernels.collectives import Ranks as JoinedRanks
from blockyard_kernels.cuda.backend import CudaBackend
from tests.kit.kernels.backends import BEST, CPU, Kernels, build_kernels
from tests.kit.kernels.families import family_model
from tests.kit.kernels.ranks import Ranks, new_backend
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.thread_collectives import ThreadMeeting
from worker_service.cache_engine import BlockFormat
from worker_service.models.builder import build_decoder
from worker_service.models.loader import RunnableModel, load_model
from worker_service.models.model_config import read_config
from worker_service.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from pathlib import Path

    from worker_service.models.decoder import DecoderModel

# One of each layout; with a shared expert, and with a bias of the choice.
MIXTURES = ["mixtral", "granite_moe", "gpt_oss", "qwen3_next", "lfm2_moe", "granite_hybrid"]
RANKS = (ALONE, Parallel(2, 1, 1), Parallel(1, 2, 1))
for_each = pytest.mark.parametrize("name", MIXTURES)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    build_kernels()


def load(
    folder: Path,
    load_format: str = "auto",
    parallel: Parallel = ALONE,
    *,
    quantization: str = "none",
    cache: Path | None = None,
) -> RunnableModel:
    return load_model(
        folder, None, CPU, lambda done, total: None, BEST, quantization, load_format, parallel, packed_cache=cache
    )


def stored(name: str) -> dict[str, torch.Tensor]:
    return load_file(family_model(name) / "model.safetensors")


@for_each
def test_what_is_held_goes_by_the_names_of_the_checkpoint(name: str) -> None:
    model = load(family_model(name)).model
    tensors = dict(pair for module in model.modules() for pair in module.named_tensors())
    expected = stored(name)
    assert tensors.keys() == expected.keys()
    for each, tensor in tensors.items():
        # Qwen3-Next stores the weights of its norms less one.
        offset = name == "qwen3_next" and each.endswith("norm.weight") and "linear_attn" not in each
        assert torch.equal(tensor, expected[each] + offset), each
    # A bias may be there.
    assert frozenset().union(*(module.tensor_names for module in model.modules())) >= expected.keys()
    assert "Experts [8, 64, 96], panels of float32" in model.describe("kernels")
    assert ("mlp.shared_expert.gate_up_proj: Linear [192, 96]" in model.describe("kernels")) is (name == "qwen3_next")
    parts = dict(
        pair
        for module in load(family_model(name), parallel=RANKS[1]).model.modules()
        for pair in module.named_tensors()
    )
    whole = ("down_proj_bias", "expert_bias", "shared_expert_gate.weight", "linear_attn.norm.weight")
    for each in (each for each in parts if "expert" in each or "linear" in each or "sinks" in each):
        assert parts[each].numel() * 2 == expected[each].numel() or each.endswith(whole), each


def test_experts_may_be_stored_together(tmp_path: Path) -> None:
    """Checkpoints of Qwen 3.5 have one tensor for all experts of a layer, others one for each."""
    folder = family_model("qwen3_5_moe")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts."
        experts = [
            {name: tensors.pop(f"{prefix}{number}.{name}_proj.weight") for name in ("gate", "up", "down")}
            for number in range(8)
        ]
        tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat([each["gate"], each["up"]]) for each in experts])
        tensors[f"{prefix}down_proj"] = torch.stack([each["down"] for each in experts])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model = load(tmp_path).model
    assert model.fingerprint() == load(folder).model.fingerprint()
    assert dict(pair for module in model.modules() for pair in module.named_tensors()).keys() == tensors.keys()


@for_each
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_packed_weights_are_read_as_they_were_written(name: str, quantization: str, tmp_path: Path) -> None:
    for parallel in RANKS:
        first, second = (
            load(family_model(name), parallel=parallel, quantization=quantization, cache=tmp_path) for _ in range(2)
        )
        assert second.origin.source == "packed"
        for one, other in zip(first.parts, second.parts, strict=True):
            assert torch.equal(one, other)


@for_each
def test_random_ones_are_as_many(name: str) -> None:
    made = load(family_model(name), "random")
    assert count_elements(made.config) == sum(tensor.numel() for tensor in stored(name).values())
    assert made.parameter_bytes == load(family_model(name)).parameter_bytes
    assert made.model.fingerprint() == load(family_model(name), "random").model.fingerprint()


@for_each
def test_a_plan_in_segments_gives_the_bits_of_one_rank(name: str) -> None:
    """Sums of experts are added up between segments: of few rows, whose brief ops come first, and of many."""
    kernels, token_ids = Kernels(BEST, torch.bfloat16), list(range(2, 42))
    whole = StepRunner.load(family_model(name), kernels.dtype, kernels.backend).run("x", token_ids, [40])
    ranks = Ranks(family_model(name), kernels, 2)
    for runner in ranks.runners:
        runner.capture(64)
    assert torch.equal(ranks.logits(token_ids, [30, 3, 1, 6]), whole)
    assert [runner.num_replayed for runner in ranks.runners] == [4, 4]


@pytest.mark.parametrize("name", MIXTURES[:3])
def test_two_stages_give_the_bits_of_one(name: str) -> None:
    """The first one's rows travel as they are computed, and the second makes logits of them."""
    kernels, token_ids = Kernels(BEST, torch.float32), list(range(2, 42))
    whole = StepRunner.load(family_model(name), kernels.dtype, kernels.backend).run("x", token_ids, [40])
    stages: list[DecoderModel] = []
    for rank, world in enumerate(ThreadMeeting(2).make_collectives()):
        backend = new_backend(kernels)
        (alone,) = ThreadMeeting(1).make_collectives()
        backend.join(JoinedRanks(world, alone))
        stages.append(StepRunner.load(family_model(name), kernels.dtype, backend, parallel=Parallel(1, 2, rank)).model)
    # What is sent waits until it is received: both run in this thread.
    num_groups = stages[0].kv_groups.num_groups
    tables = np.arange(2 * num_groups).reshape(num_groups, 2)
    batch = kernels.backend.plan_attention([40], [40], tables, 32, stages[0].config.sliding_window, num_groups)
    pools = [torch.zeros(BlockFormat.of(stage, 32).pool_shape(tables.size), dtype=kernels.dtype) for stage in stages]
    _, hidden = (stage.forward(torch.tensor(token_ids), batch, pool) for stage, pool in zip(stages, pools, strict=True))
    assert torch.equal(stages[1].compute_logits(hidden), whole)


def test_kernels_without_experts_are_named_with_those_that_have_them() -> None:
    folder = family_model("qwen3_moe")
    files = WeightFiles(folder, lambda done, total: None)
    with pytest.raises(BlockyardError, match=r"lack operations that Qwen3MoeForCausalLM needs: use .*reference"):
        build_decoder(read_config(folder, None), CudaBackend(CPU), files)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"num_experts": 4}, "num_experts and num_local_experts differ"),
        ("mixtral", {"num_experts_per_tok": 9}, r"num_experts_per_tok \(9\) is more than"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ("gpt_oss", {"rope_parameters": None}, "neither rope_parameters nor rope_scaling"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    name: str, changes: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    config = json.loads((family_model(name) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(BlockyardError, match=sentence):
        read_config(tmp_path, None)
