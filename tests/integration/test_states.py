"""The prefix cache of models with states, through the real services."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from blockyard import Client
from tests.kit.kernels.families import VOCAB_SIZE, family_model
from tests.kit.kernels.tiny_models import save_tokenizer
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.client.results import GenerationOptions

SNAPSHOT_TOKENS, NUM_NEW = 256, 100
# Each text of the others takes the blocks of the one before.
FLAGS = ("--max-model-len", "4608", "--block-size", "32", "--num-device-blocks", "200", "--num-host-blocks", "0")


def make_long_model(name: str, folder: Path) -> Path:
    """Copies a model, which may be as long as the test's texts from then on."""
    shutil.copytree(family_model(name), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("name", ["qwen3_next", "granite_hybrid"])
def test_a_second_turn_computes_little_and_says_what_it_would_say_without_a_cache(name: str, tmp_path: Path) -> None:
    options: GenerationOptions = {"max_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True, "logprobs": 2}
    options["return_token_ids"] = True
    flags = [*FLAGS, "--state-snapshot-tokens", str(SNAPSHOT_TOKENS)]
    texts = [[(7919 * place + 31 * number) % VOCAB_SIZE for place in range(4200)] for number in range(3)]
    model = make_long_model(name, tmp_path / "model")
    with System(model, tmp_path / "logs", flags) as system, Client(system.grpc_target) as client:
        first = client.generate(texts[0], **options).choices[0]
        second = [*texts[0], *first.token_ids, *texts[1][:NUM_NEW]]
        found, anew = (client.generate(second, cache_salt=salt, **options).choices[0] for salt in ("", "another"))
        assert len(second) - found.usage.num_cached_tokens <= SNAPSHOT_TOKENS + NUM_NEW
        assert anew.usage.num_cached_tokens == 0
        for text in texts[1:]:
            client.generate(text, max_tokens=1)
        evicted = client.generate(second, **options).choices[0]
        assert evicted.usage.num_cached_tokens == 0
    for answer in (found, evicted):
        assert (answer.token_ids, answer.logprobs) == (anew.token_ids, anew.logprobs)
