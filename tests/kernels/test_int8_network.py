"""A whole network in int8: any schedule gives the same bits, replayed or not, and logits near those of its weights."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from blockyard_kernels.select import get_backend
from tests.kit.kernels.backends import INSTRUCTION_SETS, build_kernels
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from worker_service.models.loader import load_model

if TYPE_CHECKING:
    from torch import Tensor

CPU = torch.device("cpu")
LENGTH = 300
DTYPES = [torch.bfloat16, torch.float32]

each_instruction_set = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def random_ids(length: int, seed: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(VOCAB_SIZE) for _ in range(length)]


TOKEN_IDS = random_ids(LENGTH, 1)


def load(name: str, dtype: torch.dtype, instruction_set: str) -> StepRunner:
    build_kernels()
    return StepRunner.load(tiny_model(name), dtype, get_backend(CPU, dtype, instruction_set, "int8"))


def beside_others(runner: StepRunner, pieces: list[int], num_mates: int) -> Tensor:
    """The subject's logits, its pieces computed among those of others, in an order shuffled for each step."""
    chooser = random.Random(num_mates)
    logits: list[Tensor] = []
    start = 0
    for length in pieces:
        work: list[tuple[object, list[int]]] = [("subject", TOKEN_IDS[start : start + length])]
        work += [(mate, random_ids(chooser.choice([1, 1, 2, 9, 20]), mate)) for mate in range(num_mates)]
        chooser.shuffle(work)
        results = runner.step(work)
        logits.append(results[[key for key, _ in work].index("subject")])
        start += length
    return torch.cat(logits)


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("name", ["llama_tied", "qwen2_window"])
def test_schedules_do_not_matter(name: str, dtype: torch.dtype, instruction_set: str):
    runner = load(name, dtype, instruction_set)
    expected = runner.run("whole", TOKEN_IDS, [LENGTH])
    assert torch.equal(runner.run("pieces", TOKEN_IDS, [1, 16, 130, 3, 100, *[1] * 10, 40]), expected)
    for num_mates in (1, 11):
        assert torch.equal(beside_others(runner, [200, 31, *[1] * 9, 60], num_mates), expected)
        runner.drop_all()


@each_instruction_set
@each_dtype
def test_logits_are_near_those_of_the_weights(dtype: torch.dtype, instruction_set: str):
    exact = StepRunner.load(tiny_model("llama"), torch.float32, get_backend(CPU, torch.float32, "reference"))
    expected = exact.run("whole", TOKEN_IDS, [LENGTH])
    got = load("llama", dtype, instruction_set).run("whole", TOKEN_IDS, [LENGTH])
    assert (got - expected).norm() / expected.norm() < 0.05


@each_instruction_set
def test_a_tied_model_holds_its_table_beside_the_bytes(instruction_set: str):
    build_kernels()
    folder = tiny_model("llama_tied")
    loaded = {
        quantization: load_model(
            folder, torch.bfloat16, CPU, lambda done_bytes, total_bytes: None, instruction_set, quantization
        )
        for quantization in ("none", "int8")
    }
    assert loaded["int8"].quantization == "int8"
    # Outputs, inputs and leaves of the four products of each of the two layers.
    layer = [(128, 64, 1), (64, 64, 4), (320, 64, 1), (64, 160, 4)]
    num_weights = 2 * sum(rows * width for rows, width, _ in layer)
    num_scales = 2 * sum(rows * leaves for rows, _, leaves in layer) + VOCAB_SIZE
    saved = loaded["none"].parameter_bytes - loaded["int8"].parameter_bytes
    assert saved == num_weights - VOCAB_SIZE * 64 - 8 * num_scales


def test_the_fingerprint_tells_it_apart():
    folder, dtype = tiny_model("llama"), torch.bfloat16
    prints = {
        StepRunner.load(folder, dtype, get_backend(CPU, dtype, "auto", quantization)).model.fingerprint()
        for quantization in ("none", "int8")
    }
    assert len(prints) == 2
