"""Executes a backend's ops at once, or records them into a plan, which is replayed as a whole.

Owns the thread team, the current recording, the plans made so far, and the ranks for collective operations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from blockyard_kernels.cpu.library import Executor, Inputs, Joint, Kind, Op, Rows, op_array
from blockyard_kernels.cpu.plan import CapturedPlan, Recording, meet

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    from blockyard_kernels.capture import CaptureSizes
    from blockyard_kernels.collectives import Ranks
    from blockyard_kernels.lora import LoraRows
    from blockyard_kernels.ops import AttentionBatch

_INPUTS = "inputs"


class OpStream:
    """Executes or records the ops of one backend. All rows have one element type."""

    def __init__(self, executor: Executor, element_type: int) -> None:
        self.executor = executor
        self._type = element_type
        self._recording: Recording | None = None
        self._ranks: Ranks | None = None
        self._plans = WeakSet[CapturedPlan]()

    def set_executor(self, executor: Executor) -> None:
        """Sets the thread team, also for existing plans."""
        self.executor = executor
        for plan in self._plans:
            plan.executor = executor

    def join(self, ranks: Ranks) -> None:
        """Sets the ranks, also for existing plans."""
        self._ranks = ranks
        for plan in self._plans:
            plan.ranks = ranks

    def make(self, kind: Kind | Joint, **fields: Any) -> Op:
        return Op(kind=kind, type=self._type, rows=Rows.TOKENS, **fields)

    def emit(self, op: Op, *results: Tensor, batch: AttentionBatch | None = None, lora: LoraRows | None = None) -> None:
        """Records an op, or executes it: over the rows of `batch` if given, else over the rows of its first result."""
        if self._recording is not None:
            # A replayed plan has the block tables of all KV groups, a batch only those of its own group.
            op.kv_group = batch.kv_group if batch is not None else 0
            self._recording.ops.append(op)
            self._recording.results.extend(results)
            return
        if batch is not None:
            inputs = batch.work_lists.get(_INPUTS)
            if inputs is None:
                inputs = batch.work_lists[_INPUTS] = _batch_inputs(batch)
            self.executor.run(op_array([op]), inputs[0])
        # Not len(): on a tensor it takes longer than the rest of a small op.
        elif num_rows := results[0].shape[0]:
            op.rows = Rows.CHOSEN
            slots = None if lora is None else lora.slots.ctypes.data
            self.executor.run(op_array([op]), Inputs(num_chosen=num_rows, lora_slots=slots))

    def meet(self, joint: Joint, rows: Tensor, always: int = 0) -> None:
        """Records or runs a collective operation on rows.

        `always`: the features of a row that are needed even if no row has a LoRA adapter; 0: all. See `plan._Segment`.
        """
        if self._recording is not None:
            op = self.make(joint, out_features=rows.shape[1], low_rank_offset=always)
            if joint is not Joint.RECEIVE:
                op.input = rows.data_ptr()
            if joint is not Joint.SEND:
                op.output = rows.data_ptr()
            self._recording.ops.append(op)
            if joint is Joint.RECEIVE:
                self._recording.results.append(rows)
        else:
            meet(self._ranks, joint, rows)

    def record(
        self,
        recording: Recording,
        forward: Callable[[], Tensor],
        head: Callable[[Tensor], Op | None],
        sizes: CaptureSizes,
    ) -> CapturedPlan:
        """Records the ops that `forward` emits, followed by the op, if any, that `head` makes for the hidden rows."""
        self._recording = recording
        try:
            hidden = forward()
        finally:
            self._recording = None
        plan = CapturedPlan(recording, head(hidden), sizes, self.executor, self._ranks)
        self._plans.add(plan)
        return plan


def _batch_inputs(batch: AttentionBatch) -> tuple[Inputs, tuple[npt.NDArray[Any], ...]]:
    """Returns the inputs of a batch, and the arrays to which they point, which must stay alive."""
    tables = np.ascontiguousarray(batch.block_tables, np.int32)
    fixed = np.ascontiguousarray(batch.fixed_tables, np.int32)
    arrays = (np.ascontiguousarray(batch.num_new_tokens), np.ascontiguousarray(batch.seq_lens), tables, fixed)
    inputs = Inputs(
        num_sequences=len(batch.seq_lens),
        num_new_tokens=arrays[0].ctypes.data,
        seq_lens=arrays[1].ctypes.data,
        block_tables=tables.ctypes.data,
        table_stride=tables.shape[1],
        positions=batch.positions.data_ptr(),
        fixed_tables=fixed.ctypes.data if fixed.size else None,
        fixed_stride=fixed.shape[1],
    )
    return inputs, arrays
