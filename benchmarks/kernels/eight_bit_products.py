"""Which products may be held in 8 bits, and how: a model's predictions beside those in bfloat16, product by product.

    python benchmarks/kernels/eight_bit_products.py [--num-rows 8] [--length 400] [--how WORD ...]

A word has a letter for each kind of product: head, query-key-value, output, gate-up, down. Products are computed as
`blockyard_kernels.reference` defines, of the demo model, on text that it was not trained on. Prints the mean divergence
from bfloat16 in nats, the same as a multiple of int8's (`iiiii`), and how often the same token is the likeliest.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels.int8_accuracy import DEMO_MODEL, Divergence, held_out_text, token_rows
from blockyard_kernels.reference import fp8, int8
from blockyard_kernels.reference.backend import ReferenceBackend
from tests.kit.kernels.quantized_reference import QuantizedReference
from tests.kit.kernels.step_runner import StepRunner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

WORDS = "iiiii -iiii jjjjj wwwww -wwww 88888 -8888 -888w -8w8w -8www 8---- -8--- --8-- ---8- ----8"


def _dense(hidden: Tensor, weight: Tensor, bias: Tensor | None, leaves: int) -> Tensor:
    result = torch.mm(hidden.float(), weight.float().T)
    return result if bias is None else result + bias.float()


def _weights_int8(hidden: Tensor, weight: Tensor, bias: Tensor | None, leaves: int) -> Tensor:
    levels, scales = int8.quantize_rows(weight)
    return _dense(hidden, levels * scales[:, None], bias, leaves)


def _both_fp8(hidden: Tensor, weight: Tensor, bias: Tensor | None, leaves: int) -> Tensor:
    values, scales = fp8.quantize_rows(hidden)
    return fp8.linear_fp8(values.float() * scales[:, None], weight, bias)


HOW = {"-": _dense, "i": int8.linear_int8, "j": _weights_int8, "w": fp8.linear_fp8, "8": _both_fp8}
"""In bfloat16; in int8, or its weights alone; weights in e4m3 alone, or what they are multiplied by too."""


def measure(words: Iterable[str], rows: Tensor) -> dict[str, dict[str, float]]:
    """Holds each word against bfloat16, over rows of token ids [rows, length + 1], each without what came before it.

    Returns:
        For each word what `Divergence.summary` says.
    """
    divergences = {word: Divergence() for word in words}
    backends = {word: QuantizedReference(*(HOW[letter] for letter in word)) for word in divergences}
    readers = {word: StepRunner.load(DEMO_MODEL, torch.bfloat16, backend) for word, backend in backends.items()}
    plain = StepRunner.load(DEMO_MODEL, torch.bfloat16, ReferenceBackend(torch.device("cpu")))
    for number, row in enumerate(rows[:, :-1].tolist()):
        truth = plain.run(number, row, [len(row)]).log_softmax(1)
        for word, reader in readers.items():
            divergences[word].add(reader.run(number, row, [len(row)]).log_softmax(1), truth)
    return {word: divergence.summary() for word, divergence in divergences.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=400, help="tokens of a row")
    parser.add_argument("--num-rows", type=int, default=8, help="rows at most")
    parser.add_argument("--how", nargs="+", default=WORDS.split(), help="words")
    options = parser.parse_args()
    rows = token_rows(DEMO_MODEL, held_out_text(DEMO_MODEL), options.length, options.num_rows)
    summaries = measure(["iiiii", *options.how], rows)
    base = summaries["iiiii"]["kl_mean"]
    for word, found in summaries.items():
        mean, agreement = found["kl_mean"], found["top1_agreement"]
        print(f"{word}  {mean:.5f} nats  {mean / base:.2f} of int8  {agreement:.1%} agree")


if __name__ == "__main__":
    main()
