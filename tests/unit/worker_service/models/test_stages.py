"""Stages of a network: each loads the layers that are its own, and knows that the weights are the others' too."""

from __future__ import annotations

import pytest
import torch

from blockyard.contract.parallel import Parallel
from tests.kit.kernels.tiny_models import tiny_model
from worker_service.models.loader import RunnableModel, load_model


def load(name: str, parallel: Parallel, load_format: str = "auto") -> RunnableModel:
    cpu = torch.device("cpu")
    return load_model(
        tiny_model(name), torch.float32, cpu, lambda done, total: None, load_format=load_format, parallel=parallel
    )


@pytest.mark.parametrize("load_format", ["auto", "random"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_stages_hold_the_network_between_them(name: str, load_format: str):
    whole = load(name, Parallel(), load_format)
    stages = [load(name, Parallel(1, 2, rank), load_format) for rank in (0, 1)]
    assert {stage.weights_digest for stage in stages} == {whole.weights_digest}
    assert {stage.model_digest for stage in stages} == {whole.model_digest}
    assert max(stage.parameter_bytes for stage in stages) < whole.parameter_bytes
    # A table that is embedding and head is held by both ends.
    held = sum(stage.parameter_bytes for stage in stages) - whole.parameter_bytes
    config = whole.config
    table = config.vocab_size * config.hidden_size * config.dtype.itemsize if config.head.is_tied else 0
    assert 0 <= held <= table + 64 * config.hidden_size * config.dtype.itemsize
