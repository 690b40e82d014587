"""How far two ways of holding weights predict apart."""

import math
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import int8_accuracy
from benchmarks.kernels.int8_accuracy import DEMO_MODEL, Divergence, held_out_text, measure, token_rows


def logprobs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_the_same_predictions_do_not_diverge():
    divergence = Divergence()
    divergence.add(logprobs([0.5, 0.25, 0.25]), logprobs([0.5, 0.25, 0.25]))
    assert divergence.summary() == {"kl_mean": 0, "kl_p99": 0, "kl_max": 0, "top1_agreement": 1}


def test_divergence_is_weighted_by_what_counts_as_true():
    divergence = Divergence()
    divergence.add(logprobs([0.5, 0.5], [0.9, 0.1]), logprobs([0.25, 0.75], [0.9, 0.1]))
    divergence.add(logprobs([0.1, 0.9]), logprobs([0.9, 0.1]))
    first = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    second = 0.8 * math.log(9)
    summary = divergence.summary()
    assert summary["kl_mean"] == pytest.approx((first + second) / 3, rel=1e-5)
    assert summary["kl_max"] == pytest.approx(second, rel=1e-5)
    # Of equal ones the first counts as the likeliest.
    assert summary["top1_agreement"] == pytest.approx(1 / 3)


def test_rows_follow_one_another_with_one_token_in_common():
    rows = token_rows(DEMO_MODEL, ["def add(first, second):\n    return first + second\n"] * 20, 16, 9)
    assert rows.shape == (9, 17)
    assert torch.equal(rows[1:, 0], rows[:-1, -1])
    # Every document begins with a mark.
    assert rows[0, 0] == 0
    assert (rows == 0).sum() > 3


def test_too_short_a_text_is_refused():
    with pytest.raises(SystemExit, match="too few for a row of 1024"):
        token_rows(DEMO_MODEL, ["short"], 1024, 1)


def test_the_text_is_what_the_corpus_holds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "corpus", sys)
    (tmp_path / "corpus.py").write_text(
        "from dataclasses import dataclass\n\n\n"
        "@dataclass(frozen=True)\nclass Corpus:\n    held_out: list[str]\n\n\n"
        "def load():\n    return Corpus(['a document'])\n"
    )
    assert held_out_text(tmp_path) == ["a document"]


def test_the_demo_model_predicts_nearly_the_same_in_int8(monkeypatch: pytest.MonkeyPatch):
    # Pieces of a row that do not divide it.
    monkeypatch.setattr(int8_accuracy, "NUM_ROWS_AT_ONCE", 40)
    rows = token_rows(DEMO_MODEL, [Path(int8_accuracy.__file__).read_text()], 150, 3)
    results = measure(DEMO_MODEL, rows)
    assert results["num_tokens"] == 450
    assert set(results["loss_nats"]) == {"float32", "bfloat16", "int8", "int8 KV"}
    assert all(1.5 < loss < 5 for loss in results["loss_nats"].values())
    assert results["perplexity"]["int8"] == pytest.approx(math.exp(results["loss_nats"]["int8"]))
    int8, bfloat16 = (results["against"][f"{name} against float32"] for name in ("int8", "bfloat16"))
    assert 0 < bfloat16["kl_mean"] < int8["kl_mean"] < 0.01
    assert 0.9 < int8["top1_agreement"] < bfloat16["top1_agreement"] <= 1
    assert abs(int8["perplexity_change"]) < 0.02
    kv_alone = results["against"]["int8 KV against bfloat16"]
    assert 0 < kv_alone["kl_mean"] < int8["kl_mean"]
    assert abs(kv_alone["perplexity_change"]) < 0.005
    assert results["weights_bytes"]["int8"] < results["weights_bytes"]["bfloat16"]
