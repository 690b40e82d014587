"""Weights that are made: the same from the same names, on any device, spread so that activations keep their size."""

from __future__ import annotations

import hashlib
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import safetensors.torch
import torch

from blockyard.capacity.weights import count_elements
from blockyard.contract.workers import CachePlan
from blockyard.errors import BlockyardError
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.tiny_models import RECIPES, tiny_model
from worker_service.models import random_weights
from worker_service.models.loader import RunnableModel, load_model
from worker_service.models.random_weights import random_tensor
from worker_service.worker import Worker

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")


def load(folder: Path, load_format: str = "random", dtype: torch.dtype | None = None) -> RunnableModel:
    return load_model(folder, dtype, CPU, lambda done_bytes, total_bytes: None, "reference", "none", load_format)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder that has no weights."""
    shutil.copy(tiny_model("llama") / "config.json", tmp_path)
    return tmp_path


def test_a_folder_needs_no_weights(bare: Path, caplog: pytest.LogCaptureFixture):
    first, second = load(bare), load(bare)
    assert "the weights are random: answers are meaningless" in caplog.messages
    assert first.model.fingerprint() == second.model.fingerprint()
    assert first.weights_digest == second.weights_digest
    assert first.weights_digest != load(bare, dtype=torch.bfloat16).weights_digest
    with pytest.raises(BlockyardError, match=r"has no model\.safetensors"):
        load(bare, "auto")


def count_stored(path: Path) -> int:
    """Counts the numbers in a file."""
    return sum(tensor.numel() for tensor in safetensors.torch.load_file(path).values())


@pytest.mark.parametrize("name", RECIPES)
def test_every_network_can_be_made_and_its_size_is_known(name: str):
    folder = tiny_model(name)
    made, read = load(folder), load(folder, "auto")
    assert made.parameter_bytes == read.parameter_bytes
    assert count_elements(made.config) == sum(map(count_stored, folder.glob("*.safetensors")))
    assert made.model.fingerprint() != read.model.fingerprint()


def test_progress_ends_at_the_whole(bare: Path):
    told: list[tuple[int, int]] = []
    load_model(bare, None, CPU, lambda done, total: told.append((done, total)), load_format="random")
    done, totals = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}


def words_of(counter: int, key: int) -> list[int]:
    """Philox4x32-10 as its authors wrote it, in whole numbers of any size."""
    c, k = [counter & 0xFFFFFFFF, counter >> 32, 0, 0], [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        first, second = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [second >> 32 ^ c[1] ^ k[0], second & 0xFFFFFFFF, first >> 32 ^ c[3] ^ k[1], first & 0xFFFFFFFF]
        k = [k[0] + 0x9E3779B9 & 0xFFFFFFFF, k[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return c


def test_values_are_halves_of_philox_words(monkeypatch: pytest.MonkeyPatch):
    key = int.from_bytes(hashlib.sha256(b"0 name").digest()[:8])
    halves = [half for counter in range(3) for word in words_of(counter, key) for half in (word & 0xFFFF, word >> 16)]
    # The variance of whole numbers below 2**16 is a twelfth of 2**32, near enough.
    expected = (np.array(halves, np.float32) - 32767.5) * np.float32(0.5 * 12**0.5 / 2**16)
    got = random_tensor("0 name", (4, 5), 0.5, torch.float32, CPU)
    assert got.flatten().tolist() == expected[:20].tolist()
    monkeypatch.setattr(random_weights, "PIECE", 2)
    assert torch.equal(random_tensor("0 name", (4, 5), 0.5, torch.float32, CPU), got), "whatever is made at once"


def test_values_spread_as_asked():
    values = random_tensor("wide", (300, 400), 0.25, torch.float32, CPU)
    assert abs(float(values.mean())) < 0.002
    assert float(values.std()) == pytest.approx(0.25, rel=0.01)
    assert float(values.abs().max()) <= 0.25 * 3**0.5


def test_logits_are_finite_and_neither_flat_nor_huge(bare: Path):
    loaded = load(bare, dtype=torch.bfloat16)
    got = StepRunner(loaded.model, loaded.backend).run("whole", range(100), [100])
    assert bool(got.isfinite().all())
    assert 0.1 < float(got.std()) < 10


async def test_a_worker_serves_them_and_says_another_name(bare: Path):
    async def name_of(load_format: str, folder: Path) -> str:
        worker = Worker(num_threads=1)
        worker.start()
        await worker.init_device("cpu", torch.float32, "")
        await worker.load_model(str(folder), "main", lambda done, total: None, "none", load_format)
        facts = await worker.initialize_cache(CachePlan(16, 20, 0, 64, 32, 4))
        assert await worker.stop(10)
        return facts.determinism_id

    assert await name_of("random", bare) == await name_of("random", bare)
    assert await name_of("random", bare) != await name_of("auto", tiny_model("llama"))
