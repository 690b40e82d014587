"""Any way of running gives the tokens of running alone, through the scheduler's core and a worker on the device.

To the bit where the backend promises that. Where it promises nothing, every answer is whole, and most are the same.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from blockyard.model_files import resolve_model
from blockyard_kernels.select import KernelChoice
from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from tests.kit.oracles.device_oracle import WAYS, Answers, OracleWorker, Run, Way, differences, make_requests

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

# What a GPU is to run chooses nothing on a processor: there both were the same run.
KERNELS = ["reference"] if os.environ.get("BLOCKYARD_TEST_DEVICE") == "cpu" else ["reference", "triton"]


@pytest.mark.parametrize("kernels", KERNELS)
async def test_any_way_gives_the_tokens_of_running_alone(kernels: str, device: torch.device, tmp_path: Path):
    model = resolve_model("", "main", "config")
    adapters = [make_tiny_adapter(tmp_path / name, model, seed) for seed, name in enumerate("abc")]
    choice = KernelChoice(cpu="reference", gpu=kernels, batch_invariant=True)
    async with OracleWorker(device.type, "", torch.float32, kernels=choice, adapters=adapters) as worker:
        assert worker.is_batch_invariant or kernels == "reference"
        specs = make_requests(worker.vocab_size, 8, 12, worker.loras)
        truth = await worker.run_alone(specs)
        assert len({tuple(ids) for answer in truth.values() for ids in answer}) > len(specs) // 2
        pieces: dict[str, int] = {}
        for way in WAYS:
            run = await worker.run(specs, way)
            wrong = differences(run.answers, truth)
            assert [len(ids) for ids in _all(run.answers)] == [len(ids) for ids in _all(truth)]
            assert len(wrong) <= (0 if worker.is_batch_invariant else len(truth) // 2), (way.name, wrong)
            assert_it_did_happen(way, run)
            pieces[way.name] = run.num_prefill_pieces
        assert pieces["chunks"] > pieces["batch"]


def _all(answers: Answers) -> list[list[int]]:
    return [ids for request_id in sorted(answers) for ids in answers[request_id]]


def assert_it_did_happen(way: Way, run: Run) -> None:
    assert (run.num_kills > 0) == (way.name == "kill")
    assert (run.num_swapped_blocks > 0) == (way.name == "swap")
    assert (run.num_preemptions > 0) == (way.name in ("swap", "preempt"))
