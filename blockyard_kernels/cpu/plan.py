"""A network's step as a plan: its ops are recorded once, their results are placed in one arena, and it is replayed.

While a network is recorded, its ops return placeholder tensors of one row, which are never computed. This module prunes
the last layer to the rows whose logits are needed, and lays out the arena. It knows ops only by their fields. A plan
has several segments if other ranks hold parts of the network: a collective operation follows each segment but the last.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard_kernels.arena import ALIGNMENT
from blockyard_kernels.capture import CaptureSizes, StepInputs, StepOutputs
from blockyard_kernels.cpu.decode_loop import CpuDecodeLoop, PlanInputs
from blockyard_kernels.cpu.huge_pages import allocate_huge
from blockyard_kernels.cpu.library import Executor, Inputs, Joint, Kind, Op, Rows, Scheme, op_array
from blockyard_kernels.cpu.packed import ELEMENT_TYPES
from blockyard_kernels.launching import take_last_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt
    from torch import Tensor

    from blockyard_kernels.collectives import Ranks
    from blockyard_kernels.decoding import DecodeLoop

# Fields of an op that may point into a row of another op's result.
_READ = ("input", "residual", "low_rank", "expert_ids", "expert_weights", "expert_places")
_WRITTEN = ("output", "total")
# Ops that mix the rows of a sequence.
_MIXERS = (Kind.ATTENTION, Kind.CONVOLVE, Kind.MIX)
_JOINTS = frozenset(Joint)
_DTYPES = {number: dtype for dtype, number in ELEMENT_TYPES.items()}


@dataclass(eq=False)
class Recording:
    """The recorded ops in order, and the placeholder tensors of their results."""

    token_ids: Tensor
    positions: Tensor
    ops: list[Op] = field(default_factory=list[Op])
    results: list[Tensor] = field(default_factory=list["Tensor"])


@dataclass(slots=True)
class _Buffer:
    """An intermediate result between two ops. `address` is the address of the placeholder tensor."""

    address: int
    row_bytes: int
    first_op: int
    last_op: int
    place: int = 0


@dataclass(slots=True)
class _Segment:
    """A run of ops, and the collective operation on rows [rows, width] of the arena that follows it, if any."""

    ops: ctypes.Array[Op]
    joint: Joint | None = None
    of_chosen: bool = False
    buffer: Tensor | None = None
    """The arena's memory for these rows, one after another."""
    widths: tuple[int, int] = (0, 0)
    """Numbers per row in a step without and with LoRA adapters. The numbers of adapters lie behind all rows' sums."""


class CapturedPlan:
    """See `blockyard_kernels.capture.CapturedStep`. The backend replaces `executor` and `ranks` when its own change."""

    def __init__(
        self,
        recording: Recording,
        head: Op | None,
        sizes: CaptureSizes,
        executor: Executor,
        ranks: Ranks | None = None,
    ) -> None:
        self._sizes = sizes
        self._max_rows = max(sizes.max_num_tokens, sizes.max_num_seqs)
        self._token_ids = np.zeros(self._max_rows, np.int64)
        self._positions = np.zeros(self._max_rows, np.int64)
        self._vocab_size = head.out_features if head else 0
        self.executor = executor
        self.ranks = ranks
        # Without a head no row is pruned: the next pipeline stage reads all rows.
        ops = _prune([*recording.ops, head], recording) if head else recording.ops
        self._arena = _lay_out(ops, recording, self._max_rows)
        inputs = {
            recording.token_ids.data_ptr(): _address(self._token_ids),
            recording.positions.data_ptr(): _address(self._positions),
        }
        for op in ops:
            if op.indices is not None:
                op.indices = inputs[op.indices]
        self._segments = list(self._cut(ops))
        self._quantized_bytes = self._max_rows * max(map(_quantized_row_bytes, ops))

    @property
    def num_bytes(self) -> int:
        """Bytes of the arena, and of the executor's quantized rows and cuts of attention.

        The system allocates them as they are first used.
        """
        return self._arena.nbytes + self._quantized_bytes + self.executor.attention_bytes

    def decode_loop(self) -> DecodeLoop | None:
        [segment, *others] = self._segments
        if others or segment.joint is not None or not self._vocab_size:
            return None
        inputs = _address(self._token_ids), _address(self._positions)
        plan = PlanInputs(
            ctypes.addressof(segment.ops), len(segment.ops), *inputs, self._sizes.max_num_tokens, self._vocab_size
        )
        return CpuDecodeLoop(self.executor.library, plan, self)

    def takes(self, step: StepInputs) -> bool:
        return len(step.token_ids) <= self._sizes.max_num_tokens and len(step.chosen) <= self._max_rows

    def replay(self, step: StepInputs, *, with_logits: bool) -> StepOutputs:
        num_chosen = len(step.chosen) if self._vocab_size else 0
        token_ids = step.token_ids
        if step.last_tokens is not None:
            token_ids = take_last_tokens(torch.from_numpy(token_ids), step.last_tokens).numpy()
        self._token_ids[: len(token_ids)] = token_ids
        logits = torch.empty(num_chosen, self._vocab_size) if with_logits else None
        best, finite = np.empty(num_chosen, np.int64), np.empty(num_chosen, np.bool_)
        best_values = np.empty(num_chosen, np.float32)
        fixed = step.fixed_tables
        inputs = Inputs(
            len(step.seq_lens),
            _address(step.num_new_tokens),
            _address(step.seq_lens),
            _address(step.block_tables),
            step.block_tables.strides[0] // 4,
            num_chosen,
            _address(step.chosen),
            None if logits is None else logits.data_ptr(),
            _address(best),
            _address(best_values),
            _address(finite),
            _address(self._positions),
            None if step.lora is None else _address(step.lora.slots),
            None if fixed is None else _address(fixed),
            0 if fixed is None else fixed.strides[0] // 4,
        )
        for segment in self._segments:
            self.executor.run(segment.ops, inputs)
            if segment.joint is not None and segment.buffer is not None:
                num_rows = num_chosen if segment.of_chosen else len(step.token_ids)
                width = segment.widths[step.lora is not None]
                meet(self.ranks, segment.joint, segment.buffer[: num_rows * width].view(num_rows, width))
        return StepOutputs(best, best_values, finite, logits)

    def _cut(self, ops: list[Op]) -> Iterator[_Segment]:
        """Cuts the ops into segments at the collective operations."""
        some: list[Op] = []
        for op in ops:
            if op.kind not in _JOINTS:
                some.append(op)
                continue
            joint = Joint(op.kind)
            dtype = torch.float32 if joint is Joint.ADD else _DTYPES[op.type]
            place = op.output if op.input is None else op.input
            begin, row_bytes = place - self._arena.data_ptr(), op.out_features * dtype.itemsize
            buffer = self._arena[begin : begin + self._max_rows * row_bytes].view(dtype)
            widths = op.low_rank_offset or op.out_features, op.out_features
            yield _Segment(op_array(some), joint, op.rows == Rows.CHOSEN, buffer, widths)
            some = []
        yield _Segment(op_array(some))

    def phase_seconds(self) -> list[tuple[Op, float]]:
        """Returns the op and the seconds of each phase of the last segment that was replayed, in order."""
        ops = self._segments[-1].ops
        return [(ops[op], seconds) for op, seconds in self.executor.phase_seconds()]


def meet(ranks: Ranks | None, joint: Joint, rows: Tensor) -> None:
    assert ranks is not None, "a share of a model, and no group"
    match joint:
        case Joint.ADD:
            ranks.stage.add(rows)
        case Joint.ADD_BITS:
            ranks.stage.add_bits(rows)
        case Joint.RECEIVE:
            ranks.receive(rows)
        case Joint.SEND:
            ranks.send(rows)


def _address(array: npt.NDArray[np.generic]) -> int:
    return array.__array_interface__["data"][0]


def _quantized_row_bytes(op: Op) -> int:
    """Counts the bytes of a quantized row: its values, at most two cache lines of padding, and its scales."""
    row_bytes = op.in_features + 2 * ALIGNMENT
    match op.scheme:
        case Scheme.INT8:
            return (row_bytes + 4) * max(1, op.top_k)
        case Scheme.INT4:
            # For each group a scale and the sum of the levels, of 4 bytes each.
            return row_bytes + op.in_features // op.group * 8
        case _:
            return 0


def _prune(ops: list[Op], recording: Recording) -> list[Op]:
    """Restricts the ops after the last one that mixes rows to the chosen rows: nothing reads what others become.

    Results of earlier ops are gathered first.
    """
    last = max(index for index, op in enumerate(ops) if op.kind in _MIXERS)
    earlier = {address for op in ops[: last + 1] for address in _addresses(op, (*_READ, *_WRITTEN))}
    gathered: dict[int, int] = {}
    rest: list[Op] = []
    for op in ops[last + 1 :]:
        op.rows = Rows.CHOSEN
        for name in _READ:
            address = getattr(op, name)
            if address in earlier:
                if address not in gathered:
                    rest.append(_gather(address, op, recording))
                    gathered[address] = rest[-1].output
                setattr(op, name, gathered[address])
        rest.append(op)
    return [*ops[: last + 1], *rest]


def _gather(address: int, reader: Op, recording: Recording) -> Op:
    source = next(result for result in recording.results if result.data_ptr() == address)
    rows = torch.empty_like(source)
    recording.results.append(rows)
    width = source.shape[-1]
    return Op(
        kind=Kind.EMBEDDING,
        type=reader.type,
        rows=Rows.CHOSEN,
        weight=address,
        output=rows.data_ptr(),
        out_features=width,
        scale=1.0,
    )


def _addresses(op: Op, names: tuple[str, ...]) -> list[int]:
    return [address for name in names if (address := getattr(op, name)) is not None]


def _lay_out(ops: list[Op], recording: Recording, max_rows: int) -> Tensor:
    """Places the buffers in an arena so that live buffers do not overlap, and writes their addresses into the ops."""
    row_bytes = {result.data_ptr(): result.nbytes for result in recording.results}
    buffers: dict[int, _Buffer] = {}
    for index, op in enumerate(ops):
        for address in _addresses(op, (*_READ, *_WRITTEN, "weight")):
            if address in row_bytes:
                buffer = buffers.setdefault(address, _Buffer(address, row_bytes[address], index, index))
                buffer.last_op = index
    num_bytes = _place(list(buffers.values()), max_rows)
    arena = allocate_huge(num_bytes)
    for op in ops:
        for name in (*_READ, *_WRITTEN, "weight"):
            address = getattr(op, name)
            if address in buffers:
                setattr(op, name, arena.data_ptr() + buffers[address].place)
    return arena


def _place(buffers: list[_Buffer], max_rows: int) -> int:
    """Places the buffers in order, each at the lowest free offset; returns the size of the arena in bytes."""
    placed: list[_Buffer] = []
    end = 0
    for buffer in buffers:
        size = _size(buffer, max_rows)
        living = sorted((each for each in placed if each.last_op >= buffer.first_op), key=lambda each: each.place)
        place = 0
        for other in living:
            if place + size <= other.place:
                break
            place = max(place, other.place + _size(other, max_rows))
        buffer.place = place
        placed.append(buffer)
        end = max(end, place + size)
    return end


def _size(buffer: _Buffer, max_rows: int) -> int:
    return -(-buffer.row_bytes * max_rows // ALIGNMENT) * ALIGNMENT
