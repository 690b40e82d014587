"""Random steps of swaps, copies and compute over small pools, and what they come to if all is done in order."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockyard_kernels.blocks import copy_blocks, swap_blocks
from blockyard_kernels.launching import upload

if TYPE_CHECKING:
    import numpy.typing as npt

BLOCK_SIZE = 8
NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 9, 5
NUM_STEPS = 40

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Rows:
    """See `blockyard_kernels.cuda.swap.StepRows`."""

    num_new_tokens: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int32]


@dataclass(frozen=True)
class TraceStep:
    """The transfers of a step, and its sequences."""

    out: Pairs
    into: Pairs
    copy: Pairs
    rows: Rows

    def transfers(self) -> tuple[Pairs, Pairs, Pairs]:
        """Out, in, and copies."""
        return self.out, self.into, self.copy


class Pools:
    """Small pools of numbers, and what steps have read of them."""

    def __init__(self, device: torch.device, width: int = 1) -> None:
        """`width`: numbers of a slot; all are the same, and the more there are the longer swaps take."""
        shape = (1, 2, 1, BLOCK_SIZE, width)
        numbers = torch.arange(NUM_DEVICE_BLOCKS, dtype=torch.int64).view(-1, 1, 1, 1, 1, 1).repeat(1, *shape)
        self.device = numbers.to(device)
        self.host = -numbers[:NUM_HOST_BLOCKS]
        self.seen: list[torch.Tensor] = []

    def compute(self, rows: Rows) -> None:
        """Reads all tokens of each sequence and writes its new ones, slot by slot, which depend on what was read."""
        slots = self.device[:, 0, 0, 0]
        for new, length, table in zip(rows.num_new_tokens, rows.seq_lens, rows.block_tables, strict=True):
            places = np.arange(length)
            blocks, offsets, weights = (
                upload(column, slots.device)
                for column in (table[places // BLOCK_SIZE].astype(np.int64), places % BLOCK_SIZE, places + 1)
            )
            total = (slots[blocks, offsets].amax(dim=1) * weights).sum() % 999_983
            self.seen.append(total)
            values = total + weights[:new]
            slots[blocks[length - new :], offsets[length - new :]] = values[:, None].expand(-1, slots.shape[-1])

    def all(self) -> tuple[Any, ...]:
        """Everything, to be compared."""
        edges = [pool[..., [0, -1]].tolist() for pool in (self.device, self.host)]
        return *edges, [int(each) for each in self.seen]


def _make_pairs(chooser: random.Random, num_sources: int, num_destinations: int) -> Pairs:
    count = chooser.choice((0, 0, 0, 1, 2, 3))
    return list(
        zip(chooser.sample(range(num_sources), count), chooser.sample(range(num_destinations), count), strict=True)
    )


def make_trace(seed: int) -> list[TraceStep]:
    """Steps that name any block at any time: doing them in order is what they mean."""
    chooser = random.Random(seed)
    steps: list[TraceStep] = []
    for _ in range(NUM_STEPS):
        tables = [chooser.sample(range(NUM_DEVICE_BLOCKS), 3) for _ in range(chooser.choice((0, 1, 1, 2)))]
        lens = [chooser.randint(1, 3 * BLOCK_SIZE) for _ in tables]
        new = [1 if chooser.random() < 0.6 else chooser.randint(1, length) for length in lens]
        rows = Rows(np.array(new, np.int64), np.array(lens, np.int64), np.array(tables, np.int32).reshape(-1, 3))
        steps.append(
            TraceStep(
                _make_pairs(chooser, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS),
                _make_pairs(chooser, NUM_HOST_BLOCKS, NUM_DEVICE_BLOCKS),
                _make_pairs(chooser, NUM_DEVICE_BLOCKS, NUM_DEVICE_BLOCKS) if chooser.random() < 0.3 else [],
                rows,
            )
        )
    return steps


def run_in_order(trace: list[TraceStep]) -> tuple[Any, ...]:
    """Does one thing after the other."""
    pools = Pools(torch.device("cpu"))
    for step in trace:
        swap_blocks(pools.device, pools.host, step.out)
        swap_blocks(pools.host, pools.device, step.into)
        copy_blocks(pools.device, step.copy)
        pools.compute(step.rows)
    return pools.all()
