"""Decodes as CUDA graphs: one for each padded number of sequences, which reads its inputs from memory of its own.

A network's step of a small batch is hundreds of launches of a few microseconds each, about as long on the host as on
the device; replayed, it is one. Sizes are captured from the largest to the smallest, which share one pool of memory,
for as long as the start may take, and after that when a step first needs them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kernels.cuda.plan import StepLengths
from kernels.launching import upload
from kernels.ops import AttentionBatch, StepInputs, StepOutputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    from torch import Tensor

    from kernels.ops import CaptureSizes

    Forward = Callable[[Tensor, AttentionBatch], Tensor]
    """From token ids [S] and a batch to logits [S, vocabulary]."""

# The largest graph: beyond, a step is long enough to hide its launches.
MAX_SEQUENCES = 512
# What the start may spend on capturing.
CAPTURE_SECONDS = 20.0


def padded_sizes(most: int) -> Iterator[int]:
    """Yields the numbers of sequences that are captured: the fewer, the closer together."""
    size = 1
    while size < min(most, MAX_SEQUENCES):
        yield size
        size += size if size < 8 else 8 if size < 64 else 16 if size < 256 else 32
    yield min(most, MAX_SEQUENCES)


class Recording:
    """What has been recorded of some work: its output, and how to do it again."""

    def __init__(self, work: Callable[[], Tensor], pool: Any) -> None:
        """Does the work, which compiles its kernels, and records it. `pool`: of the memory of all recordings."""
        work()
        self._graph = torch.cuda.CUDAGraph()
        # gRPC's threads may touch the device meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self.output = work()

    def replay(self) -> None:
        """Enqueues the work, which overwrites the output."""
        self._graph.replay()


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """The inputs of a graph of S sequences, on the device."""

    columns: Tensor
    """[4, S] int64: token ids, positions, slots, and fresh blocks, with block 0 in place of none."""
    lengths: StepLengths

    @classmethod
    def make(cls, size: int, widest: int, device: torch.device) -> _Inputs:
        columns = torch.zeros(4, size, dtype=torch.int64, device=device)
        new, lens = (torch.full((size,), value, dtype=torch.int32, device=device) for value in (1, 0))
        tables = torch.zeros(size, widest, dtype=torch.int32, device=device)
        return cls(columns, StepLengths(new, lens, tables, size, 1))

    def batch(self, sizes: CaptureSizes) -> AttentionBatch:
        """Makes the batch that the network is recorded with; what a graph reads of it lies on the device."""
        size = self.columns.shape[1]
        nothing = np.zeros(size, np.int64)
        _, positions, slots, fresh = self.columns
        lists = {StepLengths: self.lengths}
        tables = np.zeros((size, 1), np.int64)
        return AttentionBatch(
            np.ones(size, np.int64), nothing, tables, positions, slots, fresh, sizes.block_size, sizes.sliding_window,
            lists,
        )  # fmt: skip

    def fill(self, step: StepInputs, block_size: int) -> None:
        """Brings a step's inputs into place; the rest are sequences of no tokens, which write to block 0."""
        count, size = len(step.seq_lens), self.columns.shape[1]
        positions = step.seq_lens - 1
        blocks = step.block_tables[np.arange(count), positions // block_size].astype(np.int64)
        offsets = positions % block_size
        columns = np.zeros((4, size), np.int64)
        columns[1, :count], columns[2, :count] = positions, blocks * block_size + offsets
        # A block is fresh with its first token; a block of one token is full then.
        columns[3, :count] = np.where((offsets == 0) & (block_size > 1), blocks, 0)
        device = self.columns.device
        if isinstance(step.token_ids, np.ndarray):
            columns[0, :count] = step.token_ids
        self.columns.copy_(upload(columns, device))
        if not isinstance(step.token_ids, np.ndarray):
            self.columns[0, :count] = step.token_ids
        lens = np.zeros(size, np.int32)
        lens[:count] = step.seq_lens
        self.lengths.seq_lens.copy_(upload(lens, device))
        self.lengths.block_tables[:count, : step.block_tables.shape[1]] = upload(step.block_tables, device)


class CapturedDecodes:
    """See `kernels.ops.CapturedStep`: takes steps of one new token a sequence. Logits are always made."""

    def __init__(
        self,
        forward: Forward,
        sizes: CaptureSizes,
        device: torch.device,
        record: Callable[[Callable[[], Tensor], Any], Recording] = Recording,
    ) -> None:
        """`record`: makes a recording of some work, in a pool."""
        self._forward = forward
        self._sizes = sizes
        self._device = device
        self._record = record
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._padded = list(padded_sizes(sizes.max_num_seqs))
        self._widest = -(-sizes.max_length // sizes.block_size)
        self._captured: dict[int, tuple[_Inputs, Recording]] = {}
        self.num_bytes = 0

    def capture_ahead(self, seconds: float = CAPTURE_SECONDS) -> None:
        """Captures sizes, the largest first, for so long."""
        begin = time.perf_counter()
        for size in reversed(self._padded):
            if time.perf_counter() - begin > seconds:
                break
            self._find(size)

    def takes(self, step: StepInputs) -> bool:
        """Returns whether all sequences decode, and are few and short enough."""
        count = len(step.num_new_tokens)
        fits = 0 < count <= self._padded[-1] and step.block_tables.shape[1] <= self._widest
        return fits and len(step.chosen) == count and bool((step.num_new_tokens == 1).all())

    def replay(self, step: StepInputs, *, with_logits: bool) -> StepOutputs:
        """Computes a step."""
        count = len(step.num_new_tokens)
        inputs, recording = self._find(next(size for size in self._padded if size >= count))
        inputs.fill(step, self._sizes.block_size)
        recording.replay()
        logits = recording.output[:count]
        if not _is_in_order(step.chosen):
            logits = logits[upload(step.chosen, self._device)]
        return StepOutputs(None, None, None, logits)

    def _find(self, size: int) -> tuple[_Inputs, Recording]:
        if size not in self._captured:
            inputs = _Inputs.make(size, self._widest, self._device)
            before = _reserved_bytes(self._device)
            work = self._record(lambda: self._forward(inputs.columns[0], inputs.batch(self._sizes)), self._pool)
            self.num_bytes += _reserved_bytes(self._device) - before
            self._captured[size] = inputs, work
        return self._captured[size]


def _is_in_order(chosen: npt.NDArray[np.int64]) -> bool:
    return bool((chosen == np.arange(len(chosen))).all())


def _reserved_bytes(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
