"""The bytes of blocks that a sequence holds in a model most of whose layers have a window, beside those that it needs.

    python benchmarks/memory/windows.py [--tokens 8192] [--step 2048] [--write]

Drives the scheduler's core, which decides what is held, over networks of the shapes of Gemma 3 and gpt-oss: a prompt of
all tokens but the last 256, which are decoded. Needed are the keys and values that the next query sees. One group that
keeps everything is what a worker on a GPU has.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kit import record
from blockyard.capacity.replica_plan import block_bytes
from blockyard.contract.parallel import ALONE
from blockyard.model_config.decoder_config import Attention, DecoderConfig, Head, Layer, Mlp, Norm
from blockyard.model_config.kv_groups import KvGroups
from blockyard.model_config.share import Share
from scheduler_service.core.scheduler import CoreConfig, Scheduler
from scheduler_service.core.sequence import Group
from scheduler_service.core.values import GroupSpec, SchedulerOutput, StepResult

BLOCK_SIZE = 32
NUM_DECODED = 256


@dataclass(frozen=True)
class Shape:
    """Layers of which one in `every` sees everything, the others a window."""

    num_layers: int
    every: int
    window: int
    num_kv_heads: int
    head_dim: int


SHAPES = {
    "gemma-3-270m": Shape(18, 6, 512, 1, 256),
    "gemma-3-1b": Shape(26, 6, 512, 1, 256),
    "gemma-3-4b": Shape(34, 6, 1024, 4, 256),
    "gemma-3-27b": Shape(62, 6, 1024, 16, 128),
    "gpt-oss-20b": Shape(24, 2, 128, 8, 64),
}


def make_network(shape: Shape) -> DecoderConfig:
    """Makes the part of a network that blocks depend on."""
    attention = Attention(
        num_heads=shape.num_kv_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, scale=1
    )
    layer = Layer(mixer=attention, feed=Mlp(inner_features=1024), norm=Norm())
    windowed = replace(layer, mixer=replace(attention, window=shape.window))
    return DecoderConfig(
        dtype_name="bfloat16",
        vocab_size=1024,
        hidden_size=1024,
        max_model_len=131_072,
        layers=tuple(layer if (i + 1) % shape.every == 0 else windowed for i in range(shape.num_layers)),
        rotaries=(),
        final_norm=Norm(),
        head=Head(),
    )


def measure_held(windows: tuple[int, ...], num_tokens: int, num_batched: int) -> tuple[int, int]:
    """Returns the most blocks that are held while a prompt is prefilled, and while it decodes."""
    config = CoreConfig(
        block_size=BLOCK_SIZE,
        num_device_blocks=1 + num_tokens * len(windows),
        num_host_blocks=0,
        max_model_len=num_tokens,
        max_num_seqs=1,
        max_num_batched_tokens=num_batched,
        max_steps_in_flight=3,
        kv_windows=windows,
    )
    scheduler, in_flight = Scheduler(config), deque[SchedulerOutput]()
    spec = GroupSpec("request", "gateway", tuple(range(num_tokens - NUM_DECODED)), 1, NUM_DECODED, 0, frozenset())
    scheduler.adopt([Group(spec, 1, config.fit(spec), 0.0)])
    most = {"prefill": 0, "decode": 0}
    num_computed = 0
    while scheduler.has_unfinished():
        while (step := scheduler.schedule()) is not None:
            in_flight.append(step)
        step = in_flight.popleft()
        num_computed += sum(step.num_new_tokens)
        is_sampled = num_computed >= len(spec.prompt_token_ids)
        ids = step.sequence_ids if is_sampled else ()
        # What the answer gives back was held until it came; with the first token the prefill is over.
        phase = "decode" if num_computed > len(spec.prompt_token_ids) else "prefill"
        stats = scheduler.stats()
        most[phase] = max(most[phase], stats.num_device_blocks - stats.num_free_device_blocks)
        scheduler.update(StepResult(step.step_id, ids, (7,) * len(ids)))
    return most["prefill"], most["decode"]


def measure(name: str, num_tokens: int, num_batched: int) -> dict[str, Any]:
    """Measures one shape: bytes as shares of those needed."""
    network = make_network(SHAPES[name])
    share = Share.of(network, ALONE)
    layer_bytes = (
        block_bytes(network, share, BLOCK_SIZE, KvGroups((0,), (0,) * network.num_layers)) // network.num_layers
    )
    needed = sum(min(window or num_tokens, num_tokens) for window in network.windows) * layer_bytes / BLOCK_SIZE
    result: dict[str, Any] = {"model": name, "tokens": num_tokens, "needed_mib": round(needed / 2**20, 1)}
    for label, groups in (("one_group", KvGroups.of(network, "cuda")), ("groups", KvGroups.of(network, "cpu"))):
        held_bytes = block_bytes(network, share, BLOCK_SIZE, groups)
        prefill, decode = measure_held(groups.windows, num_tokens, num_batched)
        result[label] = groups.num_groups
        result[f"{label}_prefill"] = round(prefill * held_bytes / needed, 3)
        result[f"{label}_decode"] = round(decode * held_bytes / needed, 3)
    return result


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of the sequence")
    parser.add_argument("--step", type=int, default=2048, help="max_num_batched_tokens")
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/windows.json")
    options = parser.parse_args()
    results = [measure(name, options.tokens, options.step) for name in SHAPES]
    for result in results:
        print("  ".join(f"{name} {value}" for name, value in result.items()))
    if options.write:
        record.append("windows", results)


if __name__ == "__main__":
    main()
