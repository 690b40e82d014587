"""What the benchmarks of throughput ask for: so many requests at once, of random ids, each answered to its full length.

Everything starts together and is measured until the last answer is whole; this is how the peers are run too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Ids below are bytes and marks in the models of benchmarks/models.py.
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

    def fresh(self) -> Iterator[Workload]:
        """Batches of the same size for ever, each with other prompts than all before."""
        seed = self.seed
        while True:
            yield replace(self, seed=seed)
            seed += 1
