"""How near to the ideal decoders of other families decode, beside a Llama of like size, in one run.

    python benchmarks/kernels/family_speed.py [--concurrency 1 8] [--rounds 15] [--num-threads 1] [--write]

The models take turns, a captured step of the CPU kernels each, so that what else the machine does meets all of them.
The ideal reads each weight once, and the keys and values of each sequence: what is compared is how many of these bytes
a step reads in a second, so that the machine's bandwidth is in no figure. A step's time is the sum of each op's best
over the rounds: what else runs makes the others slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kernels import ceilings
from benchmarks.kernels.phases import CONTEXT, Profile, Workload, name_of
from benchmarks.kit import record
from benchmarks.kit.figures import round_figures
from benchmarks.kit.ideal import ITEM_BYTES

if TYPE_CHECKING:
    from benchmarks.kit.ideal import Shape
    from blockyard_kernels.cpu.library import Op

_SIZES: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
_FEW_WIDE_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256}
LLAMA = "llama"
MODELS: dict[str, dict[str, Any]] = {
    LLAMA: {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        **_FEW_WIDE_HEADS,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
    },
}


def load(name: str, num_threads: int, max_sequences: int) -> Profile:
    """Loads a model with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**_SIZES, **MODELS[name]}))
        return Profile(Path(folder), num_threads, max_sequences, load_format="random")


def bytes_of(shape: Shape, workload: Workload) -> int:
    """Returns what a step of decodes must read."""
    weights = shape.num_layer_weights + shape.num_head_weights
    return ITEM_BYTES["bfloat16"] * (weights + workload.num_sequences * workload.length * shape.num_kv_elements)


def compare(profiles: dict[str, Profile], workload: Workload, num_rounds: int) -> dict[str, Any]:
    """Returns for each model its step, what it reads in a second, that beside Llama's, and where its time goes."""
    inputs = {
        name: workload.inputs(profile.shape.vocab_size, profile.num_kv_groups) for name, profile in profiles.items()
    }
    rounds: dict[str, list[list[tuple[Op, float]]]] = {name: [] for name in profiles}
    for _ in range(1 + num_rounds):
        for name, profile in profiles.items():
            rounds[name].append(profile.replay(inputs[name]))
    measured: dict[str, dict[str, Any]] = {}
    for name, profile in profiles.items():
        # The first round warms up.
        spent = [[seconds for _, seconds in ops] for ops in rounds[name][1:]]
        best = [min(times) for times in zip(*spent, strict=True)]
        by_op = defaultdict[str, float](float)
        for (op, _), seconds in zip(rounds[name][0], best, strict=True):
            by_op[name_of(op)] += 1e3 * seconds
        measured[name] = {
            "milliseconds": 1e3 * sum(best),
            "median_milliseconds": 1e3 * statistics.median(map(sum, spent)),
            "bytes_per_second": bytes_of(profile.shape, workload) / sum(best),
            "op_milliseconds": dict(sorted(by_op.items(), key=lambda item: -item[1])),
        }
    for each in measured.values():
        each["beside_llama"] = each["bytes_per_second"] / measured[LLAMA]["bytes_per_second"]
    return measured


def report(results: dict[str, Any]) -> str:
    """A table for each step."""
    lines = [f"bfloat16, {results['num_threads']} threads, kernels {results['kernels']}"]
    for step, models in results["steps"].items():
        lines.append(f"\n{step}")
        for name, measured in models.items():
            lines.append(
                f"  {name:10}{measured['milliseconds']:9.2f} ms, {measured['bytes_per_second'] / 1e9:.1f} GB/s, "
                f"{measured['beside_llama']:.2f} of Llama's; median {measured['median_milliseconds']:.2f} ms"
            )
            lines.append("".join(f"    {op} {spent:.2f}" for op, spent in measured["op_milliseconds"].items()))
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="requests at once")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num-threads", type=int, default=ceilings.usable_processors())
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/family_speed.json")
    options = parser.parse_args()
    profiles = {name: load(name, options.num_threads, max(options.concurrency)) for name in MODELS}
    steps = {f"decode, {number} requests": Workload(number, 1, CONTEXT) for number in options.concurrency}
    results = round_figures(
        {
            "num_threads": options.num_threads,
            "kernels": profiles[LLAMA].kernels,
            "steps": {name: compare(profiles, workload, options.rounds) for name, workload in steps.items()},
        }
    )
    print(report(results))
    if options.write:
        record.append("family_speed", results)


if __name__ == "__main__":
    main()
