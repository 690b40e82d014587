"""What our products cost in accuracy where a checkpoint comes quantized: teacher-forced, against its own numbers.

    python benchmarks/kernels/quantized_accuracy.py [--num-rows 96] [--write]

The demo model is quantized to the nearest levels, with its rows of 688 inputs left as they are, which no group divides.
What is compared is what the kernels make of that checkpoint, and what transformers make of the numbers that it stands
for, in float32: rounding a weight is the checkpoint's cost, rounding activations is ours. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels.int8_accuracy import DEMO_MODEL, Divergence, Reader, held_out_text, token_rows
from benchmarks.kit import record
from benchmarks.kit.figures import round_figures
from tests.kit.kernels.quantized_models import write_quantized

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("w8a8", "w4a16", "w4a16_asymmetric")
LEFT = ("down_proj",)


@torch.inference_mode()
def measure(name: str, rows: Tensor, home: Path) -> dict[str, Any]:
    """Compares both over rows of token ids [rows, length + 1], each read without what came before it."""
    quantized, plain = write_quantized(DEMO_MODEL, name, home, LEFT)
    reader = Reader(quantized, torch.bfloat16, "none", max_len=rows.shape[1])
    truth = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    divergence, nats = Divergence(), [0.0, 0.0]
    for row in rows:
        expected = truth(row[None, :-1]).logits[0].log_softmax(1)
        found = torch.cat(list(reader.read(row[:-1])))
        divergence.add(found, expected)
        for index, logprobs in enumerate((found, expected)):
            nats[index] -= logprobs.gather(1, row[1:, None]).double().sum().item()
    ours, theirs = (math.exp(total / rows[:, 1:].numel()) for total in nats)
    return {
        "kernels": reader.loaded.backend.name,
        "weights_bytes": reader.loaded.parameter_bytes,
        "perplexity": ours,
        "perplexity_of_its_numbers": theirs,
        "ratio": ours / theirs,
        **divergence.summary(),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=1000, help="tokens of a row")
    parser.add_argument("--num-rows", type=int, default=96, help="rows at most")
    parser.add_argument("--write", action="store_true", help="keep this run in results/")
    options = parser.parse_args()
    rows = token_rows(DEMO_MODEL, held_out_text(DEMO_MODEL), options.length, options.num_rows)
    with tempfile.TemporaryDirectory() as home:
        formats = {name: measure(name, rows, Path(home)) for name in FORMATS}
    results = round_figures({"num_tokens": rows[:, 1:].numel(), "formats": formats})
    print(json.dumps(results, indent=2))
    if options.write:
        record.append("quantized_accuracy", results)


if __name__ == "__main__":
    main()
