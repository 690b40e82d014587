"""The demo model's network on the device against the processor in float32, whole and in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from blockyard_kernels.select import get_backend
from tests.kit.kernels.step_runner import StepRunner

pytestmark = pytest.mark.gpu

DEMO = Path(__file__).parents[2] / "models" / "demo"
LENGTH = 120
TOKEN_IDS = [(7919 * index) % 257 for index in range(1, LENGTH + 1)]


def load(device: torch.device, dtype: torch.dtype) -> StepRunner:
    return StepRunner.load(DEMO, dtype, get_backend(device, dtype, "reference"))


@pytest.fixture(scope="module")
def truth() -> torch.Tensor:
    return load(torch.device("cpu"), torch.float32).run("whole", TOKEN_IDS, [LENGTH])


# As far as each dtype's own rounding carries through the network, on the processor too.
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.2), (torch.float16, 0.03)], ids=str
)
@pytest.mark.parametrize("pieces", [[LENGTH], [1] * 9 + [70, 41], [32, 64, 24]], ids=["whole", "decodes", "pieces"])
def test_logits_are_those_of_the_processor(
    pieces: list[int], dtype: torch.dtype, tolerance: float, device: torch.device, truth: torch.Tensor
):
    got = load(device, dtype).run("whole", TOKEN_IDS, pieces).cpu()
    assert float((got - truth).abs().mean()) < tolerance


def test_sequences_beside_each_other_change_no_winner(device: torch.device, truth: torch.Tensor):
    runner = load(device, torch.float32)
    mates = [(f"mate {index}", TOKEN_IDS[index : index + 40]) for index in range(6)]
    got = runner.step([*mates, ("subject", TOKEN_IDS), *[(f"late {name}", ids) for name, ids in mates]])[6].cpu()
    torch.testing.assert_close(got, truth, rtol=0, atol=2e-3)
