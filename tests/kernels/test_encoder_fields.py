"""Each field of an encoder's config.json taken out, turned over or changed, and of a head's: the numbers are those of
transformers, or the field is refused by name. None is passed over.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers

from blockyard.errors import BlockyardError, Reason
from blockyard_kernels.select import get_backend
from tests.kernels.test_family_fields import cases, expected
from tests.kit.kernels.pooling_models import RECIPES
from tests.kit.kernels.step_runner import StepRunner
from worker_service.models.model_config import read_config
from worker_service.pooling.head import finish
from worker_service.pooling.rows import PooledRows

if TYPE_CHECKING:
    from pathlib import Path

    from worker_service.pooling.rows import Floats

MULTI_LABEL = "multi_label_classification"
TOKEN_IDS = torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(0)).tolist()
SMALL = {
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "n_layers": 2,
    "hidden_size": 32,
    "dim": 32,
    "intermediate_size": 48,
    "hidden_dim": 48,
    "max_position_embeddings": 64,
}
# Fields that make no difference to a decoder's tokens, and do to these numbers.
HEADS = ("id2label", "num_labels", "problem_type", "pad_token_id")
OTHERS: dict[str, list[Any]] = {
    "hidden_act": ["gelu_new", "relu"],
    "activation": ["silu", "relu"],
    "hidden_activation": ["gelu_new", "silu"],
    "classifier_activation": ["relu", "tanh"],
    "classifier_pooling": ["cls", "mean", "last"],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention"]],
    "local_attention": [8],
    "sliding_window": [6],
    "global_attn_every_n_layers": [1],
    "rope_parameters": [{"full_attention": {"rope_type": "default", "rope_theta": 300.0}}],
    "position_embedding_type": ["relative_key"],
    "is_causal": [True],
    "id2label": [{"0": "a"}, {"0": "a", "1": "b", "2": "c", "3": "d"}],
    "problem_type": ["regression", "single_label_classification", MULTI_LABEL],
    "type_vocab_size": [1, 0],
    "pad_token_id": [0, 5, None],
    "norm_bias": [True],
}


def label(model: Any) -> torch.Tensor:
    """What transformers makes of the text, and its pipelines of that."""
    logits, problem = model(torch.tensor([TOKEN_IDS])).logits[0], model.config.problem_type
    if len(logits) == 1 or problem == MULTI_LABEL:
        return logits.sigmoid()
    return logits if problem == "regression" else logits.softmax(0)


@torch.no_grad()
def compute(folder: Path) -> Floats:
    """What our network and what stands behind it make of the text."""
    backend = get_backend(torch.device("cpu"), torch.float32, "reference")
    model = StepRunner.load(folder, torch.float32, backend).model
    runner, head = StepRunner(model, backend, num_blocks=2), model.pooling
    assert head is not None
    plan = backend.plan_attention([len(TOKEN_IDS)], [len(TOKEN_IDS)], [[0, 1]], 32)
    rows = PooledRows(head.rule.rows)
    rows.add(model.forward(torch.tensor(TOKEN_IDS), plan, runner.pool))
    numbers = head.multiply(backend, rows.finish()).numpy()
    return finish(head.rule, numbers[0])


def check(name: str, folder: Path) -> str | None:
    """Compares one configuration; returns what is wrong with it, None where there was nothing to compare."""
    try:
        read_config(folder, None)
    except BlockyardError as error:
        return None if error.reason is Reason.MODEL_NOT_LOADED and error.violations else f"{name}: {error.message}"
    numbers = expected(folder, label)
    if numbers is None:
        return None
    got = compute(folder)
    if got.shape != numbers.shape:
        return f"{name}: {got.shape} instead of {numbers.shape}"
    worst = np.abs(got - numbers.numpy()).max()
    return "" if worst <= 1e-5 else f"{name}: {worst:.1e}"


# All readers and all heads.
@pytest.mark.parametrize(
    "recipe", ["bert_reranker", "xlm_roberta_reranker", "distilbert_classifier", "modernbert_classifier"]
)
def test_a_field_counts_as_in_transformers_or_is_refused(recipe: str, tmp_path: Path) -> None:
    made = RECIPES[recipe]
    config = getattr(transformers, made.config)(**{name: SMALL.get(name, value) for name, value in made.fields.items()})
    config.architectures = [made.architecture]
    found: list[str | None] = []
    for name, changed in cases(json.loads(config.to_json_string(use_diff=False)), OTHERS, HEADS):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        found.append(check(name, tmp_path))
    assert not any(found), [problem for problem in found if problem]
    assert found.count("") > 10
