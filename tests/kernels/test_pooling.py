"""Vectors, scores and labels of every kind against transformers, and against themselves under other schedules."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from blockyard.contract.models import Task
from blockyard.contract.pooling import Pooling, PoolingKind
from blockyard.contract.sampling import SamplingParams
from tests.kit.kernels.backends import BEST, REFERENCE, Kernels
from tests.kit.kernels.pooling_models import RECIPES, VOCAB_SIZE, pooling_model
from tests.unit.worker_service.executor import Epoch, make_executor, new_sequence
from worker_service.models.loader import load_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from worker_service.models.loader import RunnableModel
    from worker_service.step import StepOutput
    from worker_service.steps.step_executor import StepExecutor

    Floats = npt.NDArray[np.float32]

ENCODERS = [name for name in RECIPES if "bert" in name]
TEXTS = [random.Random(seed).choices(range(3, VOCAB_SIZE), k=length) for seed, length in enumerate((60, 1, 17, 33, 8))]
NO_YES = (41, 17)
NUM_BLOCKS = 8
KERNELS = [Kernels(name, torch.float32) for name in dict.fromkeys((REFERENCE, BEST))]


def pooling_of(name: str) -> Pooling:
    """What the gateway would ask for."""
    rule = load(name, KERNELS[0]).config.pooling
    assert rule is not None
    ids = NO_YES if rule.kind is PoolingKind.LABEL_LOGITS else ()
    return Pooling(rule.kind, ids, rule.normalise)


@cache
def load(name: str, kernels: Kernels) -> RunnableModel:
    # It is built first, where it is not yet.
    assert kernels.backend.is_complete
    task = Task.SCORE if name == "qwen3_reranker" else Task.UNSPECIFIED
    folder, device = pooling_model(name), torch.device("cpu")
    return load_model(folder, kernels.dtype, device, lambda done_bytes, total_bytes: None, kernels.name, task=task)


def executor_of(name: str, kernels: Kernels) -> StepExecutor:
    return make_executor(load(name, kernels), max_model_len=64)


def start(index: int, token_ids: Sequence[int], pooling: Pooling, sequence_id: int = 0) -> Any:
    blocks = range(1 + index * NUM_BLOCKS, 1 + (index + 1) * NUM_BLOCKS)
    return new_sequence(sequence_id or index + 1, token_ids, blocks, SamplingParams(), pooling=pooling)


def pooled(result: StepOutput) -> dict[int, Floats]:
    return dict(zip(result.pooled.sequence_ids, result.pooled.values, strict=True))


def alone(executor: StepExecutor, token_ids: Sequence[int], pooling: Pooling, epoch: int) -> Floats:
    steps = Epoch(executor, epoch)
    result = steps.execute(new_sequences=(start(0, token_ids, pooling),), work=[(1, len(token_ids))])
    assert not result.sequence_ids
    return pooled(result)[1]


@cache
@torch.no_grad()
def expected(name: str, text: int) -> Floats:
    """What transformers computes, and sentence-transformers after it."""
    recipe, folder, ids = RECIPES[name], pooling_model(name), torch.tensor([TEXTS[text]])
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    if recipe.mode:
        rows = transformers.AutoModel.from_pretrained(folder, **how).eval()(ids).last_hidden_state[0]
        vector = {"lasttoken": rows[-1], "cls": rows[0], "mean": rows.mean(0)}[recipe.mode]
        if recipe.dense:
            weights = load_file(folder / "2_Dense" / "model.safetensors")
            vector = torch.tanh(weights["linear.weight"] @ vector + weights["linear.bias"])
        return torch.nn.functional.normalize(vector, dim=0).numpy()
    model = getattr(transformers, recipe.architecture).from_pretrained(folder, **how).eval()
    logits = model(ids).logits[0]
    if recipe.architecture.endswith("ForCausalLM"):
        return logits[-1, list(NO_YES)].softmax(0).numpy()
    sigmoid = len(logits) == 1 or recipe.fields.get("problem_type") == "multi_label_classification"
    return (logits.sigmoid() if sigmoid else logits.softmax(0)).numpy()


@pytest.mark.parametrize("kernels", KERNELS, ids=str)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_those_of_transformers_and_the_same_bits_beside_others(name: str, kernels: Kernels) -> None:
    executor, pooling = executor_of(name, kernels), pooling_of(name)
    whole = [alone(executor, token_ids, pooling, epoch) for epoch, token_ids in enumerate(TEXTS, 1)]
    for text, values in enumerate(whole):
        assert np.abs(values - expected(name, text)).max() <= 1e-5
    steps = Epoch(executor, 10)
    everything = [start(index, token_ids, pooling) for index, token_ids in enumerate(reversed(TEXTS))]
    work = [(index + 1, len(token_ids)) for index, token_ids in enumerate(reversed(TEXTS))]
    together = pooled(steps.execute(new_sequences=tuple(everything), work=work))
    assert all(np.array_equal(together[len(whole) - index], values) for index, values in enumerate(whole))
    refused = steps.answer(new_sequences=(start(7, TEXTS[0], pooling, 20),), work=[(20, 30)]).refusal
    assert refused is not None
    assert "in pieces" in str(refused.violations)


@pytest.mark.parametrize("kernels", KERNELS, ids=str)
@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ENCODERS])
def test_numbers_are_those_of_transformers_and_the_same_bits_under_any_schedule(name: str, kernels: Kernels) -> None:
    executor, pooling = executor_of(name, kernels), pooling_of(name)
    subject = TEXTS[0]
    whole = [alone(executor, token_ids, pooling, epoch) for epoch, token_ids in enumerate(TEXTS, 1)]
    for text, values in enumerate(whole):
        assert np.abs(values - expected(name, text)).max() <= 1e-5
    steps = Epoch(executor, 10)
    everything = [start(index, token_ids, pooling) for index, token_ids in enumerate(TEXTS)]
    work = [(index + 1, len(token_ids)) for index, token_ids in enumerate(TEXTS)]
    together = pooled(steps.execute(new_sequences=tuple(everything), work=work))
    assert all(np.array_equal(together[index + 1], values) for index, values in enumerate(whole))
    # In pieces; begun anew in the middle, as after a preemption; beside others.
    finished = tuple(range(1, 6))
    steps.execute(new_sequences=(start(0, subject, pooling, 11),), work=[(11, 20)], finished_sequence_ids=finished)
    again = (start(0, subject, pooling, 12), start(1, TEXTS[3], pooling, 13))
    first = steps.execute(new_sequences=again, work=[(12, 7), (13, 33)], finished_sequence_ids=(11,))
    assert pooled(first).keys() == {13}
    pieces = [steps.execute(work=[(12, count)]) for count in (1, 30, 22)]
    assert [result.pooled.sequence_ids for result in pieces] == [(), (), (12,)]
    assert np.array_equal(pooled(pieces[-1])[12], whole[0])
