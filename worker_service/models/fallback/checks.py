"""Checks whether a network gives a sequence the same bits under every schedule: alone, beside others, in pieces."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from kernels.ops import AttentionBatch, Backend, kv_pool_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    # (token ids [T], batch, pool) -> logits [T, vocab_size].
    Compute = Callable[[Tensor, AttentionBatch, Tensor], Tensor]

LENGTHS = (19, 33, 52, 70)
PIECES = (3, 7, 11, 16)
NUM_DECODED = 6
BLOCK_SIZE = 16

Work = list[tuple[int, int, int]]
"""The work of a step: (index of a sequence, first token, end)."""


class BatchChecks:
    """Four sequences of random tokens, and the pool of their KV."""

    def __init__(
        self, backend: Backend, vocab_size: int, max_length: int, format_: tuple[int, int, int, torch.dtype]
    ) -> None:
        """`format_`: the number of layers, the number of KV heads, head_dim, and the dtype of the pool."""
        layers, heads, head_dim, dtype = format_
        chooser = random.Random(4)
        lengths = [min(length, max_length) for length in LENGTHS]
        self.sequences = [
            torch.tensor([chooser.randrange(vocab_size) for _ in range(length)], device=backend.device)
            for length in lengths
        ]
        places, self._tables = iter(range(sum(-(-length // BLOCK_SIZE) for length in lengths))), list[list[int]]()
        for length in lengths:
            self._tables.append([next(places) for _ in range(-(-length // BLOCK_SIZE))])
        num_blocks = sum(map(len, self._tables))
        shape = kv_pool_shape(num_blocks, layers, heads, BLOCK_SIZE, head_dim)
        self.pool = torch.zeros(shape, dtype=dtype, device=backend.device)
        self._backend = backend

    def step(self, work: Work, window: int | None) -> tuple[Tensor, AttentionBatch]:
        counts, ends = [end - start for _, start, end in work], [end for _, _, end in work]
        tables = [self._tables[index] for index, _, _ in work]
        batch = self._backend.plan_attention(counts, ends, tables, BLOCK_SIZE, window)
        return torch.cat([self.sequences[index][start:end] for index, start, end in work]), batch

    def first_difference(self, compute: Compute, window: int | None) -> str:
        """Returns the first schedule under which a row differs from the same row computed alone; empty: none."""
        whole = self._run(list(self._alone()), compute, window)
        for name, steps in self._schedules():
            got = self._run(steps, compute, window)
            if not all(torch.equal(rows, whole[index]) for index, rows in got.items()):
                return name
        return ""

    def _run(self, steps: Sequence[Work], compute: Compute, window: int | None) -> dict[int, Tensor]:
        rows: dict[int, list[Tensor]] = {}
        for work in steps:
            parts = compute(*self.step(work, window), self.pool).split([end - start for _, start, end in work])
            for (index, _, _), part in zip(work, parts, strict=True):
                rows.setdefault(index, []).append(part)
        return {index: torch.cat(parts) for index, parts in rows.items()}

    def _alone(self) -> Iterator[Work]:
        for index, sequence in enumerate(self.sequences):
            yield [(index, 0, len(sequence))]

    def _schedules(self) -> Iterator[tuple[str, list[Work]]]:
        whole = [piece for (piece,) in self._alone()]
        yield "together", [whole]
        yield "in pieces", _cut([(index, 0, end, PIECES[index]) for index, _, end in whole])
        prompts = [(index, 0, max(1, end - NUM_DECODED)) for index, _, end in whole]
        decodes = _cut([(index, first, end, 1) for (index, _, first), (_, _, end) in zip(prompts, whole, strict=True)])
        yield "decoded", [prompts, *decodes]
        index, _, end = whole[-1]
        yield "in pieces alone", _cut([(index, 0, end, PIECES[1])])


def _cut(sequences: Sequence[tuple[int, int, int, int]]) -> list[Work]:
    """Cuts (index, first token, end, length of a piece) into steps; each step has the next piece of every sequence."""
    steps: list[Work] = []
    for index, start, end, length in sequences:
        for number, first in enumerate(range(start, end, length)):
            if number == len(steps):
                steps.append([])
            steps[number].append((index, first, min(first + length, end)))
    return steps
