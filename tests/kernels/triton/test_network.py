"""A network on the GPU backend's own kernels, against the reference: op by op, and as graphs."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from blockyard_kernels.capture import CaptureSizes
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.strict_graphs import StrictRecording
from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from tests.kit.kernels.triton_interpreter import DEVICE, IS_INTERPRETED

from blockyard_kernels.cuda import graphs  # isort: skip
from blockyard_kernels.cuda.backend import CudaBackend  # isort: skip

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

PIECES = [9, 1, 1]


def prompts(count: int) -> list[list[int]]:
    chooser = random.Random(count)
    return [[chooser.randrange(VOCAB_SIZE) for _ in range(sum(PIECES) + place)] for place in range(count)]


def run(runner: StepRunner) -> Tensor:
    """Computes sequences beside each other: prompts of different lengths, then two decodes."""
    told, sequences = [], prompts(3)
    for step in range(len(PIECES)):
        work = []
        for name, ids in enumerate(sequences):
            end = len(ids) - sum(PIECES[step + 1 :])
            work.append((name, ids[runner.length(name) : end]))
        told += [logits[-1] for logits in runner.step(work)]
    return torch.stack(told).cpu()


@pytest.mark.parametrize(("name", "invariant"), [("qwen3", False), ("llama_bias", True)])
def test_logits_are_those_of_the_reference(name: str, invariant: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "TOKEN_MULTIPLE", 16)
    truth = run(StepRunner.load(tiny_model(name), torch.float32))
    backend = CudaBackend(DEVICE, invariant=invariant)
    backend.record = StrictRecording if IS_INTERPRETED else backend.record
    if invariant:
        runner = StepRunner.load(tiny_model(name), torch.float32, backend, block_size=16)
        torch.testing.assert_close(run(runner), truth, rtol=1e-4, atol=1e-4)
    # What is recorded are the same ops.
    captured = StepRunner.load(tiny_model(name), torch.float32, backend, block_size=16)
    # Padding writes to block 0, which is nobody's.
    captured._free.remove(0)
    captured.model.reserve_positions(64)
    captured._captured = captured.model.capture(captured.pool, CaptureSizes(64, 8, 16, max_length=64))
    torch.testing.assert_close(run(captured), truth, rtol=1e-4, atol=1e-4)
    assert captured.num_replayed == len(PIECES)


def test_logits_with_adapters_are_those_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As graphs. An adapter of some modules beside one of all, and a sequence without."""
    monkeypatch.setattr(graphs, "TOKEN_MULTIPLE", 16)
    model = tiny_model("llama_bias")
    folders = [
        make_tiny_adapter(tmp_path / "all", model, 1, rank=5),
        make_tiny_adapter(tmp_path / "few", model, 2, targets=("v_proj", "up_proj")),
    ]
    backend = CudaBackend(DEVICE)
    backend.record = StrictRecording if IS_INTERPRETED else backend.record
    truth = StepRunner.load(model, torch.float32).make_slots(folders)
    captured = StepRunner.load(model, torch.float32, backend, block_size=16).make_slots(folders)
    for runner in (truth, captured):
        runner.adapt(0, 1)
        runner.adapt(1, 2)
    # Padding writes to block 0, which is nobody's.
    captured._free.remove(0)
    captured.model.reserve_positions(64)
    sizes = CaptureSizes(64, 8, 16, max_length=64, num_lora_slots=2)
    captured._captured = captured.model.capture(captured.pool, sizes)
    torch.testing.assert_close(run(captured), run(truth), rtol=1e-4, atol=1e-4)
    assert captured.num_replayed == len(PIECES)
