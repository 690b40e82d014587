"""Vectors and scores of real models through all services: the same bits alone, among others, and after a loss."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import tokenizers
import torch
import transformers

import blockyard
from blockyard import Client
from tests.integration.pooling.harness import WORDS, write_tokenizer
from tests.kit.kernels.pooling_models import pooling_model
from tests.kit.processes.status import scheduler_status
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = [" ".join(WORDS[(place * 7 + step * 3) % 90] for step in range(1 + place % 6)) for place in range(256)]

LONG_TEXTS = [" ".join(WORDS[(place * 7 + step * 3) % 90] for step in range(20 + place % 40)) for place in range(128)]


def model(name: str) -> Path:
    folder = pooling_model(name)
    write_tokenizer(folder)
    return folder


def test_a_script_asks_for_vectors_and_scores() -> None:
    """Pairs are tokenized by the tokenizer's template, with token types: the scores are transformers' own."""
    folder = model("bert_reranker")
    network = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_device_blocks": 100}
    with blockyard.LLM(str(folder), **settings) as llm:
        assert llm.model.task == "score"
        scores = llm.score("w1 w2", TEXTS[:16])
        assert [llm.score("w1 w2", [text])[0] for text in TEXTS[:16:5]] == scores[::5]
        for text, score in zip(TEXTS, scores, strict=False):
            pair = tokenizer.encode("w1 w2", text)
            with torch.no_grad():
                logits = network(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits
            assert score == pytest.approx(torch.sigmoid(logits)[0, 0].item(), abs=1e-5)


def test_vectors_have_their_bits_alone_among_others_in_pieces_preempted_and_after_a_killed_worker(
    tmp_path: Path,
) -> None:
    # Most prompts come in pieces, and three or four have room at a time.
    flags = ["--dtype", "float32", "--policy", "priority", "--num-device-blocks", "9", "--num-host-blocks", "20"]
    flags += ["--block-size", "16", "--max-model-len", "100", "--max-num-batched-tokens", "24", "--debug-integrity"]
    flags += ["--preemption-mode", "swap"]
    with System(model("llama_mean"), tmp_path, flags) as system, Client(system.grpc_target) as client:
        undisturbed = client.embed(LONG_TEXTS).vectors
        assert [client.embed([text]).vectors[0] for text in LONG_TEXTS[:16:5]] == undisturbed[:16:5]
        with ThreadPoolExecutor(2) as threads:
            patient = threads.submit(client.embed, LONG_TEXTS, priority=9)
            while not scheduler_status(system).replicas[0].num_swapped_in_blocks:
                # It comes first, and those that run give way.
                assert client.embed(LONG_TEXTS[:8], priority=0).vectors == undisturbed[:8]
                assert not patient.done()
            system.services["worker"].stop(signal.SIGKILL)
            assert not patient.done()
            system.start_service("worker")
            assert patient.result().vectors == undisturbed
        assert "the worker was lost" in system.log("scheduler")
