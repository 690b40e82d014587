"""A step that fails by an error of the GPU: after most of them nothing more is computed in the same process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from blockyard.contract.sampling import SamplingParams
from tests.unit.worker_service.executor import Epoch, make_executor, new_sequence
from worker_service.models.loader import load_model

if TYPE_CHECKING:
    from pathlib import Path

ILLEGAL_ADDRESS = "CUDA error: an illegal memory access was encountered"


def fail(model: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> str:
    """Has a step fail with an error. Returns why the step is refused."""

    def run(*_: object) -> None:
        raise error

    executor = make_executor(load_model(model, torch.float32, torch.device("cpu"), lambda done, total: None))
    monkeypatch.setattr(executor.runner, "run", run)
    new = new_sequence(1, [5, 6, 7], [1], SamplingParams(temperature=0.0))
    refusal = Epoch(executor, 1).answer(new_sequences=(new,), work=[(1, 3)]).refusal
    assert refusal is not None
    return refusal.message


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(ILLEGAL_ADDRESS),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
    ids=["torch", "triton"],
)
def test_a_worker_ends_with_its_gpu(model: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="can compute nothing more"):
        fail(model, error, monkeypatch)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        ValueError("a bug"),
    ],
    ids=["torch", "cuda", "triton", "bug"],
)
def test_a_step_that_lacked_memory_is_refused_alone(
    model: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert "failed unexpectedly" in fail(model, error, monkeypatch)
