"""What encoders have beside decoders' parts: taken away, their numbers are others; and the types of a pair's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers

from blockyard.model_config.decoder_config import Encoder, Learned
from tests.kernels.test_pooling import KERNELS, TEXTS, alone, executor_of, pooling_of
from tests.kit.kernels.pooling_models import pooling_model
from tests.kit.kernels.step_runner import StepRunner
from worker_service.models.builder import build_decoder
from worker_service.models.model_config import read_config
from worker_service.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.kernels.backends import Kernels
    from worker_service.models.model_config import ModelConfig

SECOND_FROM = 25
TOKEN_IDS = TEXTS[0]


@pytest.mark.parametrize("kernels", KERNELS, ids=str)
@torch.no_grad()
def test_the_second_text_of_a_pair_has_its_own_type(kernels: Kernels) -> None:
    executor, pooling = executor_of("bert_reranker", kernels), pooling_of("bert_reranker")
    model = transformers.BertForSequenceClassification.from_pretrained(
        pooling_model("bert_reranker"), attn_implementation="eager"
    )
    types = (torch.arange(len(TOKEN_IDS)) >= SECOND_FROM).long()
    expected = model.eval()(torch.tensor([TOKEN_IDS]), token_type_ids=types[None]).logits[0].sigmoid().numpy()
    found = alone(executor, TOKEN_IDS, replace(pooling, second_from=SECOND_FROM), 1)
    assert np.abs(found - expected).max() <= 1e-5
    assert np.abs(found - alone(executor, TOKEN_IDS, pooling, 2)).max() > 1e-3


def without_window(config: ModelConfig) -> ModelConfig:
    layers = (replace(layer, mixer=replace(layer.mixer, window=None)) for layer in config.layers)
    return replace(config, layers=tuple(layers))


TAKEN_AWAY: dict[tuple[str, str], Callable[[ModelConfig], ModelConfig]] = {
    ("modernbert", "a window"): without_window,
    ("modernbert", "a norm behind the embedding"): lambda config: replace(config, encoder=Encoder()),
    ("bert", "token types"): lambda config: replace(
        config, encoder=Encoder(embedding_norm=config.encoder.embedding_norm if config.encoder else None)
    ),
    ("roberta", "the first row of positions"): lambda config: replace(
        config, learned=Learned(num_positions=129, first_row=1)
    ),
}


@pytest.mark.parametrize(("name", "what"), TAKEN_AWAY)
def test_nothing_is_there_for_nothing(name: str, what: str) -> None:
    kernels, folder = KERNELS[0], pooling_model(name)
    config = read_config(folder, torch.float32)

    def rows(config: ModelConfig) -> torch.Tensor:
        model = build_decoder(config, kernels.backend, WeightFiles(folder, lambda done_bytes, total_bytes: None))
        runner = StepRunner(model, kernels.backend, num_blocks=8)
        batch = kernels.backend.plan_attention([len(TOKEN_IDS)], [len(TOKEN_IDS)], [[0, 1]], 32)
        return model.forward(torch.tensor(TOKEN_IDS), batch, runner.pool)

    assert (rows(TAKEN_AWAY[name, what](config)) - rows(config)).abs().max() > 1e-2
