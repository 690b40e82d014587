"""Our logits against those of transformers on the same files: teacher-forced, and the winners of greedy decoding."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from tests.kit.kernels.backends import BEST, KERNELS, REFERENCE, Kernels, in_dtype
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.tiny_models import RECIPES, VOCAB_SIZE, tiny_model

DEMO = Path(__file__).parents[2] / "models" / "demo"
LENGTH = 700
NUM_PROMPTS = 20
NUM_GENERATED = 64
NAMES = [name for name in RECIPES if name != "llama_sharded"] + ["demo"]


def folder_of(name: str) -> Path:
    return DEMO if name == "demo" else tiny_model(name)


@cache
def reference(name: str, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=dtype)
    return model.eval()


@cache
@torch.no_grad()
def reference_logits(name: str, token_ids: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return reference(name, dtype)(torch.tensor([token_ids])).logits[0].float()


def random_ids(length: int, seed: int) -> tuple[int, ...]:
    chooser = random.Random(seed)
    return tuple(chooser.randrange(VOCAB_SIZE) for _ in range(length))


def load(name: str, kernels: Kernels) -> StepRunner:
    return StepRunner.load(folder_of(name), kernels.dtype, kernels.backend)


@pytest.mark.parametrize("kernels", in_dtype(KERNELS, torch.float32), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_float32_logits_are_those_of_transformers(name: str, kernels: Kernels):
    token_ids = random_ids(LENGTH, 0)
    got = load(name, kernels).run("whole", token_ids, [LENGTH])
    torch.testing.assert_close(got, reference_logits(name, token_ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernels", in_dtype(KERNELS, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_half_float_logits_are_as_good_as_those_of_transformers(name: str, kernels: Kernels):
    token_ids = random_ids(LENGTH // 2, 1)
    expected = reference_logits(name, token_ids)
    theirs = (reference_logits(name, token_ids, kernels.dtype) - expected).abs().mean()
    ours = (load(name, kernels).run("whole", token_ids, [len(token_ids)]) - expected).abs().mean()
    assert ours <= 1.5 * theirs, (float(ours), float(theirs))


@pytest.mark.parametrize("kernels", [Kernels(name, torch.float32) for name in sorted({REFERENCE, BEST})], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_decoding_picks_the_winners_of_transformers(name: str, kernels: Kernels):
    """Generates in one batch, then asks the reference about all that was generated: each id must be its winner too.

    A difference is allowed only where the reference's two best lie within 1e-3.
    """
    lengths = [1, 2, 3, LENGTH, *random.Random(2).sample(range(4, LENGTH), NUM_PROMPTS - 4)]
    sequences = {index: [*random_ids(length, index)] for index, length in enumerate(lengths)}
    runner = load(name, kernels)
    pending = {index: list(token_ids) for index, token_ids in sequences.items()}
    for _ in range(NUM_GENERATED):
        logits = runner.step(list(pending.items()))
        pending = {index: [int(rows[-1].argmax())] for index, rows in zip(pending, logits, strict=True)}
        for index, chosen in pending.items():
            sequences[index] += chosen
    for index, length in enumerate(lengths):
        best, ids = reference_logits(name, tuple(sequences[index][:-1]))[length - 1 :].topk(2)
        differs = ids[:, 0] != torch.tensor(sequences[index][length:])
        assert (best[differs, 0] - best[differs, 1] < 1e-3).all(), f"prompt {index} of {length} ids"
        assert differs.sum() <= 2
