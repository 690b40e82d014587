"""What `--quantization int8` and `--kv-cache-dtype int8` cost in accuracy: the same text, teacher-forced.

    python benchmarks/kernels/int8_accuracy.py [--model FOLDER] [--text FILE] [--write]

The demo model reads files of Python's library that were held out when it was trained; another model reads any text.
Every row of the text begins without context, as in training. Prints JSON; the bits, and so the figures, are those of
the instruction set.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kit import record
from benchmarks.kit.figures import round_figures
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.models.loader import load_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

    from worker_service.models.loader import RunnableModel

DEMO_MODEL = ROOT / "models" / "demo"
BLOCK_SIZE = 32
# Rows whose logits are held at once: a vocabulary may be large.
NUM_ROWS_AT_ONCE = 128

VARIANTS = {
    "float32": (torch.float32, "none", "auto"),
    "bfloat16": (torch.bfloat16, "none", "auto"),
    "int8": (torch.bfloat16, "int8", "auto"),
    "int8 KV": (torch.bfloat16, "none", "int8"),
}
"""Dtype, quantization and dtype of KV of what is compared."""
PAIRS = (
    *(("bfloat16", "float32"), ("int8", "float32"), ("int8", "bfloat16")),
    *(("int8 KV", "float32"), ("int8 KV", "bfloat16")),
)
"""What is held against what."""


@dataclass(slots=True)
class Divergence:
    """How far the predictions of one variant are from another's, token by token."""

    divergences: list[Tensor] = field(default_factory=list["Tensor"])
    num_agreed: int = 0

    def add(self, logprobs: Tensor, truth: Tensor) -> None:
        """Compares log probabilities [R, vocabulary] with those that count as the truth."""
        self.divergences.append((truth.exp() * (truth - logprobs)).sum(1))
        self.num_agreed += int((logprobs.argmax(1) == truth.argmax(1)).sum())

    def summary(self) -> dict[str, float]:
        """The divergence of Kullback and Leibler in nats, and how often both find the same token the likeliest."""
        values = torch.cat(self.divergences)
        return {
            "kl_mean": values.mean().item(),
            "kl_p99": values.quantile(0.99).item(),
            "kl_max": values.max().item(),
            "top1_agreement": self.num_agreed / len(values),
        }


class Reader:
    """One variant of a model, which reads rows of text."""

    def __init__(
        self, model: Path, dtype: torch.dtype, quantization: str, kv_cache_dtype: str = "auto", *, max_len: int
    ) -> None:
        cpu, kinds = torch.device("cpu"), {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
        self.loaded: RunnableModel = load_model(model, dtype, cpu, lambda done, total: None, **kinds)
        num_blocks = -(-max_len // BLOCK_SIZE)
        self._pool = allocate_pool(BlockFormat.of(self.loaded.model, BLOCK_SIZE), num_blocks, cpu)
        self._block_table = list(range(num_blocks))

    def read(self, token_ids: Tensor) -> Iterator[Tensor]:
        """Returns log probabilities of what comes after each token: [some, vocabulary] float32, one after another."""
        backend, model, length = self.loaded.backend, self.loaded.model, len(token_ids)
        window = self.loaded.config.sliding_window
        batch = backend.plan_attention([length], [length], [self._block_table], BLOCK_SIZE, window)
        hidden = model.forward(token_ids, batch, self._pool)
        for rows in hidden.split(NUM_ROWS_AT_ONCE):
            yield model.compute_logits(rows).log_softmax(1)


@torch.inference_mode()
def measure(model: Path, rows: Tensor) -> dict[str, Any]:
    """Compares the variants over rows of token ids [rows, length + 1], each read without what came before it."""
    readers = {name: Reader(model, *variant, max_len=rows.shape[1]) for name, variant in VARIANTS.items()}
    divergences = {pair: Divergence() for pair in PAIRS}
    nats = dict.fromkeys(VARIANTS, 0.0)
    for row in rows:
        targets = row[1:].split(NUM_ROWS_AT_ONCE)
        pieces = zip(targets, *(reader.read(row[:-1]) for reader in readers.values()), strict=True)
        for target, *logprobs in pieces:
            by_name = dict(zip(readers, logprobs, strict=True))
            for name in VARIANTS:
                nats[name] -= by_name[name].gather(1, target[:, None]).double().sum().item()
            for (name, truth), divergence in divergences.items():
                divergence.add(by_name[name], by_name[truth])
    loss = {name: total / rows[:, 1:].numel() for name, total in nats.items()}
    return {
        "num_tokens": rows[:, 1:].numel(),
        "kernels": {name: reader.loaded.backend.name for name, reader in readers.items()},
        "weights_bytes": {name: reader.loaded.parameter_bytes for name, reader in readers.items()},
        "loss_nats": loss,
        "perplexity": {name: math.exp(value) for name, value in loss.items()},
        "against": {
            f"{name} against {truth}": {
                **divergence.summary(),
                "perplexity_change": math.exp(loss[name] - loss[truth]) - 1,
            }
            for (name, truth), divergence in divergences.items()
        },
    }


def held_out_text(model: Path) -> list[str]:
    """The documents that the demo model was not trained on: files of the running interpreter's library."""
    specification = importlib.util.spec_from_file_location("corpus", model / "corpus.py")
    assert specification is not None
    assert specification.loader is not None
    corpus = importlib.util.module_from_spec(specification)
    # A dataclass looks its module up by name.
    sys.modules["corpus"] = corpus
    specification.loader.exec_module(corpus)
    return corpus.load().held_out


def token_rows(model: Path, documents: Iterable[str], length: int, num_rows: int) -> Tensor:
    """Encodes documents side by side and cuts them into rows [at most num_rows, length + 1] int64.

    A row's last token is the next one's first, as in training.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    token_ids = np.concatenate([encoding.ids for encoding in tokenizer.encode_batch(list(documents))])
    num_rows = min(num_rows, (len(token_ids) - 1) // length)
    if num_rows < 1:
        raise SystemExit(f"the text has {len(token_ids)} tokens, too few for a row of {length}")
    starts = np.arange(num_rows)[:, None] * length
    return torch.from_numpy(token_ids[starts + np.arange(length + 1)].astype(np.int64))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="a model's folder; default: the demo model")
    parser.add_argument("--text", type=Path, help="a file; default: what the demo model was not trained on")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--num-rows", type=int, default=96, help="rows at most")
    parser.add_argument("--write", action="store_true", help="keep this run in results/")
    options = parser.parse_args()
    documents = [options.text.read_text()] if options.text else held_out_text(DEMO_MODEL)
    rows = token_rows(options.model, documents, options.length, options.num_rows)
    results = round_figures(measure(options.model, rows))
    print(json.dumps(results, indent=2))
    if options.write:
        record.append("int8_accuracy", results)


if __name__ == "__main__":
    main()
