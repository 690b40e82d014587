"""The worker's master oracle over ranks: any schedule, on any number of them, gives what one alone gives.

Ranks are threads here, each with its share of the network, a pool and rows of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from tests.integration.worker_service.steps.test_schedules import (
    NUM_DEVICE_BLOCKS,
    NUM_HOST_BLOCKS,
    Chaos,
    alone,
    sequences,
    small_executor,
)
from tests.kit.kernels.backends import BEST, REFERENCE, Kernels
from tests.kit.kernels.ranks import new_backend
from tests.kit.kernels.tiny_models import tiny_model
from tests.unit.worker_service.executor import make_executor
from tests.unit.worker_service.ranks_executor import RanksExecutor
from worker_service.models import loader
from worker_service.parallel import ALONE, Parallel

if TYPE_CHECKING:
    from kernels.ops import Backend
    from worker_service.models.loader import LoadedModel
    from worker_service.steps.rank_steps import RankSteps
    from worker_service.steps.step_executor import StepExecutor


@dataclass(frozen=True, slots=True)
class Case:
    """A model, what computes it, and by how many ranks."""

    model: str
    kernels: Kernels
    quantization: str
    tensor_size: int
    pipeline_size: int = 1

    def load(self, monkeypatch: pytest.MonkeyPatch, parallel: Parallel = ALONE) -> LoadedModel:
        """Loads a rank's share, with a backend of its own: in one process ranks would share it."""

        def own_backend(*_arguments: object) -> Backend:
            return new_backend(self.kernels, self.quantization)

        monkeypatch.setattr(loader, "get_backend", own_backend)
        device = torch.device("cpu")
        return loader.load_model(
            tiny_model(self.model), self.kernels.dtype, device, lambda done, total: None,
            quantization=self.quantization, parallel=parallel,
        )  # fmt: skip

    def make_rank(self, monkeypatch: pytest.MonkeyPatch, parallel: Parallel, ranks: RankSteps) -> StepExecutor:
        return make_executor(
            self.load(monkeypatch, parallel),
            num_device_blocks=NUM_DEVICE_BLOCKS,
            num_host_blocks=NUM_HOST_BLOCKS,
            max_captured_tokens=0 if self.kernels.is_reference else 20,
            ranks=ranks,
        )

    def __str__(self) -> str:
        return f"{self.model}-{self.kernels}-{self.quantization}-{self.tensor_size}x{self.pipeline_size}"


CASES = [
    Case("qwen3", Kernels(REFERENCE, torch.float32), "none", 2),
    Case("llama_bias", Kernels(REFERENCE, torch.bfloat16), "none", 4),
    Case("llama_bias", Kernels(BEST, torch.float32), "none", 2),
    Case("qwen3", Kernels(BEST, torch.bfloat16), "none", 4),
    Case("qwen3", Kernels(BEST, torch.bfloat16), "int8", 2),
    Case("llama", Kernels(REFERENCE, torch.bfloat16), "none", 1, 2),
    Case("qwen3", Kernels(REFERENCE, torch.float32), "none", 2, 2),
    Case("llama_bias", Kernels(BEST, torch.bfloat16), "none", 1, 2),
    Case("qwen3", Kernels(BEST, torch.float32), "none", 2, 2),
    Case("qwen3", Kernels(BEST, torch.bfloat16), "int8", 1, 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_schedule_on_any_number_of_ranks_gives_the_tokens_of_one(case: Case, monkeypatch: pytest.MonkeyPatch):
    loaded = case.load(monkeypatch)
    chosen = sequences(1, loaded.config.vocab_size)
    lonely = small_executor(loaded)
    expected = [alone(lonely, one) for one in chosen]
    told = [one.told for one in chosen]
    for one in chosen:
        one.told = {}
    ranks = RanksExecutor(
        lambda parallel, steps: case.make_rank(monkeypatch, parallel, steps), case.tensor_size, case.pipeline_size
    )
    chaos = Chaos(ranks, seed=1)
    chaos.run(chosen)
    assert [one.output for one in chosen] == expected
    assert [one.told for one in chosen] == told
    assert all(len(rank.batch) == 0 for rank in ranks.ranks)
