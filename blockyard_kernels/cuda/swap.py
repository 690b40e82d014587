"""Swaps of KV blocks on CUDA streams of their own, in parallel with the steps' compute.

A device runs the work on one stream in order, and several streams in parallel. Therefore work first waits for
unfinished work on other streams with a conflicting block: one of the two writes a block that the other reads or writes.
Work is a step's compute, a swap out to the host, or a swap in to the device. The blocks that a step's compute reads and
writes follow from its lengths and block tables; they are only looked up while a swap is unfinished. Only the device
waits, never the host. Knows no sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from blockyard_kernels.blocks import copy_blocks, swap_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from blockyard_kernels.ops import BlockPairs

Ids = npt.NDArray[np.int64]
"""[n]: block numbers. A host block's number is the number of device blocks plus its own number."""


class StepRows(Protocol):
    """The S sequences that a step computes."""

    @property
    def num_new_tokens(self) -> npt.NDArray[np.int64]:
        """[S]: tokens of each sequence that the step computes."""
        ...

    @property
    def seq_lens(self) -> npt.NDArray[np.int64]:
        """[S]: tokens of each sequence after the step."""
        ...

    @property
    def block_tables(self) -> npt.NDArray[np.integer[Any]]:
        """[S, widest]: block ids in order; entries past a sequence's length are never read."""
        ...


class Event(Protocol):
    """An event recorded on a stream."""

    def query(self) -> bool:
        """Returns whether all work before the event is done."""
        ...


class Stream(Protocol):
    """A queue of device work that runs in order."""

    def wait_event(self, event: Any) -> None:
        """Makes all work that is enqueued later wait for an event, on the device."""

    def record_event(self) -> Event:
        """Returns an event after all work enqueued so far."""
        ...

    def synchronize(self) -> None:
        """Waits until all enqueued work is done."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of a device: of its steps' compute, of swaps from it, and of swaps to it."""

    compute: Stream
    out: Stream
    into: Stream
    enqueue: Callable[[Any, Callable[[], None]], None]
    """Runs a function whose device work is enqueued on a stream."""


def make_streams(pool: Tensor) -> Streams:
    """Makes the streams of a pool's GPU. Steps compute on the calling thread's current stream."""
    device = pool.device
    out, into = torch.cuda.Stream(device), torch.cuda.Stream(device)
    for stream in (out, into):
        # After the pool is freed, torch reuses its memory only when these streams are done with it.
        pool.record_stream(stream)

    def enqueue(stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        with torch.cuda.stream(stream):
            work()

    return Streams(torch.cuda.current_stream(device), out, into, enqueue)


class _Swap:
    def __init__(self, reads: Ids, writes: Ids) -> None:
        self.reads = reads
        self.writes = writes


class _Compute:
    """A step's compute: its block copies, then its network."""

    def __init__(self, rows: StepRows, copy: BlockPairs, block_size: int) -> None:
        self._rows = rows
        self._copy = np.array(copy, np.int64).reshape(-1, 2)
        self._block_size = block_size

    @cached_property
    def reads(self) -> Ids:
        return self._blocks(np.zeros_like(self._rows.seq_lens), self._copy[:, 0])

    @cached_property
    def writes(self) -> Ids:
        first_positions = self._rows.seq_lens - self._rows.num_new_tokens
        return self._blocks(first_positions // self._block_size, self._copy[:, 1])

    def _blocks(self, first: Ids, more: Ids) -> Ids:
        """Returns the blocks of each sequence from its table entry `first` on, and the blocks `more`."""
        tables = self._rows.block_tables
        places, ends = np.arange(tables.shape[1]), -(-self._rows.seq_lens // self._block_size)
        own = tables[(places >= first[:, None]) & (places < ends[:, None])]
        return np.concatenate([own.astype(np.int64), more])


@dataclass(frozen=True, slots=True)
class _Enqueued:
    work: _Swap | _Compute
    stream: Stream
    is_done: Event


class SwapStreams:
    """Enqueues the transfers of each step before its compute. For one thread."""

    def __init__(self, device_pool: Tensor, host_pool: Tensor, streams: Streams) -> None:
        """`host_pool`: should lie in pinned memory, which the device accesses itself; other copies block the host."""
        self._device_pool = device_pool
        self._host_pool = host_pool
        self._streams = streams
        self._block_size = device_pool.shape[4]
        self._num_device_blocks = len(device_pool)
        self._unfinished: list[_Enqueued] = []
        self._last_compute: _Compute | None = None
        self._marks = np.zeros(len(device_pool) + len(host_pool), np.bool_)

    def transfer(self, swap_out: BlockPairs, swap_in: BlockPairs, copy: BlockPairs, rows: StepRows) -> None:
        """Enqueues a step's transfers, with results as if in the order swap_out, swap_in, copy.

        The work that the caller enqueues next on the compute stream counts as the step's compute.

        Args:
            swap_out: pairs of a device block and the host block to which it is copied.
            swap_in: pairs of a host block and the device block to which it is copied.
            copy: pairs of a device block and the device block to which it is copied.
            rows: the sequences of the step; their arrays must not change.

        Raises:
            ValueError: an id is outside its pool.
        """
        streams, on_host = self._streams, self._num_device_blocks
        if self._last_compute is not None:
            # All work on the compute stream by now belongs to the last step or to earlier steps.
            self._unfinished.append(_Enqueued(self._last_compute, streams.compute, streams.compute.record_event()))
        self._unfinished = [each for each in self._unfinished if not each.is_done.query()]
        if swap_out:
            self._swap(streams.out, self._device_pool, self._host_pool, swap_out, (0, on_host))
        if swap_in:
            self._swap(streams.into, self._host_pool, self._device_pool, swap_in, (on_host, 0))
        self._last_compute = _Compute(rows, copy, self._block_size)
        self._wait(streams.compute, self._last_compute)
        if copy:
            streams.enqueue(streams.compute, lambda: copy_blocks(self._device_pool, copy))

    def synchronize(self) -> None:
        """Waits until all transfers and all compute are done."""
        for stream in (self._streams.compute, self._streams.out, self._streams.into):
            stream.synchronize()

    def _swap(
        self, stream: Stream, source: Tensor, destination: Tensor, pairs: BlockPairs, offsets: tuple[int, int]
    ) -> None:
        reads, writes = (np.array(pairs, np.int64) + offsets).T
        swap = _Swap(reads, writes)
        self._wait(stream, swap)
        self._streams.enqueue(stream, lambda: swap_blocks(source, destination, pairs, non_blocking=True))
        self._unfinished.append(_Enqueued(swap, stream, stream.record_event()))

    def _wait(self, stream: Stream, work: _Swap | _Compute) -> None:
        """Makes a stream wait for all unfinished work that conflicts with `work`."""
        for each in self._unfinished:
            if each.stream is not stream and self._conflict(each.work, work):
                stream.wait_event(each.is_done)

    def _conflict(self, first: _Swap | _Compute, second: _Swap | _Compute) -> bool:
        return (
            self._meet(first.writes, second.reads)
            or self._meet(first.writes, second.writes)
            or self._meet(first.reads, second.writes)
        )

    def _meet(self, some: Ids, others: Ids) -> bool:
        self._marks[some] = True
        found = bool(self._marks[others].any())
        self._marks[some] = False
        return found
