"""Networks that are not like Llama on the GPU backend's own kernels, as graphs, against the reference."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from blockyard_kernels.capture import CaptureSizes
from blockyard_kernels.select import get_backend
from tests.kernels.test_families import TAKEN_AWAY
from tests.kit.kernels.families import VOCAB_SIZE, family_model
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.strict_graphs import StrictRecording
from tests.kit.kernels.triton_interpreter import DEVICE, IS_INTERPRETED
from worker_service.models.builder import build_decoder
from worker_service.models.model_config import ModelConfig, read_config
from worker_service.models.weight_files import WeightFiles

from blockyard_kernels.cuda import graphs  # isort: skip
from blockyard_kernels.cuda.backend import CudaBackend  # isort: skip

if TYPE_CHECKING:
    from blockyard_kernels.ops import Backend

# Each has something that none before it has.
NAMES = ("gemma2", "gemma3", "olmo2", "cohere", "gpt2", "gpt_neox", "stablelm", "granite", "nemotron")
TOKEN_IDS = random.Random(5).choices(range(VOCAB_SIZE), k=23)
WINDOW, BLOCK_SIZE = 7, 8


def small(config: ModelConfig) -> ModelConfig:
    """Two layers, which are of both kinds where there are two, and windows shorter than the texts."""
    attentions = (layer.mixer for layer in config.layers[:2])
    kept = [replace(each, window=each.window and WINDOW) for each in attentions]
    layers = (replace(layer, mixer=each) for layer, each in zip(config.layers[:2], kept, strict=True))
    return replace(config, layers=tuple(layers))


def load(name: str, config: ModelConfig, backend: Backend) -> StepRunner:
    files = WeightFiles(family_model(name), lambda done_bytes, total_bytes: None)
    return StepRunner(build_decoder(config, backend, files), backend, block_size=BLOCK_SIZE)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_reference_in_pieces_and_beside_others(name: str, monkeypatch: pytest.MonkeyPatch):
    # One size of mixes, with room for logits of all rows.
    monkeypatch.setattr(graphs, "TOKEN_MULTIPLE", 16)
    monkeypatch.setattr(graphs, "MIXED_SEQUENCES", (16,))
    config = small(read_config(family_model(name), torch.float32))
    truth = get_backend(torch.device("cpu"), torch.float32, "reference")
    expected = load(name, config, truth).run("whole", TOKEN_IDS, [len(TOKEN_IDS)])
    backend = CudaBackend(DEVICE)
    backend.record = StrictRecording if IS_INTERPRETED else backend.record
    runner = load(name, config, backend)
    # Padding writes to block 0, which is nobody's.
    runner._free.remove(0)
    runner.model.reserve_positions(32)
    sizes = CaptureSizes(16, 4, BLOCK_SIZE, config.sliding_window, max_length=32)
    runner._captured = runner.model.capture(runner.pool, sizes)
    got = runner.step([("other", TOKEN_IDS[:4]), ("subject", TOKEN_IDS[:12])])[1:]
    got += runner.step([("subject", TOKEN_IDS[12:21]), ("other", [7])])[:1]
    got += [runner.step([("subject", [token_id]), ("other", [8])])[0] for token_id in TOKEN_IDS[21:]]
    assert runner.num_replayed == 4
    largest = float(expected.abs().max())
    found = torch.cat(got).cpu()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * largest)
    for (family, what), change in TAKEN_AWAY.items():
        if family == name:
            without = load(name, change(config), truth).run("whole", TOKEN_IDS, [len(TOKEN_IDS)])
            assert (without - found).abs().max() > 1e-3 * largest, what
