"""What the benchmarks of throughput ask for: so many requests at once, of random ids, each answered to its full length.

Everything starts together and is measured until the last answer is whole; this is how the peers are run too. Standard
library only: the peers' scripts run it in environments of their own.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

# Ids below are bytes and marks in the models of benchmarks/kit/models.py.
FIRST_TOKEN_ID = 300


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch of requests. The same seed gives the same prompts, another one gives prompts that share no prefix."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    vocab_size: int
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return self.num_requests * self.num_output_tokens

    def prompts(self) -> list[list[int]]:
        """The prompts' token ids."""
        draws = random.Random(f"{self.seed} {self.num_requests} {self.num_prompt_tokens}")
        ids = range(FIRST_TOKEN_ID, self.vocab_size)
        return [draws.choices(ids, k=self.num_prompt_tokens) for _ in range(self.num_requests)]


class FreshWorkloads:
    """Gives batches, no two of which have a prompt in common: no prefix cache helps anyone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._seeds = itertools.count()

    def of(self, num_requests: int, num_prompt_tokens: int, num_output_tokens: int) -> Iterator[Workload]:
        """Batches of one size, for ever."""
        for seed in self._seeds:
            yield Workload(num_requests, num_prompt_tokens, num_output_tokens, self._vocab_size, seed)


async def measure_rate(
    workloads: Iterator[Workload], run: Callable[[Workload], Awaitable[float]], seconds: float
) -> float:
    """Runs one batch after another until they have taken so long together, at least one; returns tokens a second."""
    total, num_tokens = 0.0, 0
    while not num_tokens or total < seconds:
        workload = next(workloads)
        total += await run(workload)
        num_tokens += workload.num_tokens
    return num_tokens / total
