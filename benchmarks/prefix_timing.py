"""How much a shared prefix cache tells one tenant about another's prompts: the time to the first token of a prompt that
another tenant has sent before, beside that of a new prompt of the same length, in a whole system.

    python benchmarks/prefix_timing.py [--model llama-135m] [--tokens 1024] [--rounds 20] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.kit import models, record
from benchmarks.kit.figures import number, round_figures, spread_of
from benchmarks.kit.ideal import Shape
from benchmarks.kit.whole_system import WholeSystem
from benchmarks.kit.worker_alone import Settings
from blockyard import AsyncClient


async def first_token_seconds(client: AsyncClient, prompt: list[int]) -> float:
    """The seconds from the call to its only token."""
    begin = time.perf_counter()
    await client.generate(prompt, max_tokens=1)
    return time.perf_counter() - begin


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Has one tenant send prompts, and another one the same prompts and new ones, in turn."""
    settings = Settings(options.folder, num_device_blocks=options.tokens // 16 * 8, max_num_seqs=4)
    draw, vocab_size = random.Random(1), Shape.read(Path(options.folder)).vocab_size
    guessed, new = [], []
    async with WholeSystem(settings) as system:
        victim, attacker = (AsyncClient(system.grpc_address, tenant=name) for name in ("victim", "attacker"))
        async with victim, attacker:
            for _ in range(options.rounds):
                secret, other = ([draw.randrange(vocab_size) for _ in range(options.tokens)] for _ in range(2))
                await victim.generate(secret, max_tokens=1)
                new.append(await first_token_seconds(attacker, other))
                guessed.append(await first_token_seconds(attacker, secret))
    return {
        "num_prompt_tokens": options.tokens,
        "new_milliseconds": spread_of([seconds * 1e3 for seconds in new]),
        "guessed_milliseconds": spread_of([seconds * 1e3 for seconds in guessed]),
        "new_over_guessed": spread_of(new, guessed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-135m", help="a name of benchmarks/kit/models.py")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--write", action="store_true", help="add this run to benchmarks/results/prefix_timing.json")
    options = parser.parse_args()
    options.folder = str(models.make_model(options.model))
    results = round_figures(asyncio.run(measure(options)))
    for name in ("new_milliseconds", "guessed_milliseconds", "new_over_guessed"):
        print(f"{name:24}{number(results[name], 1)}")
    if options.write:
        record.append("prefix_timing", results)


if __name__ == "__main__":
    main()
