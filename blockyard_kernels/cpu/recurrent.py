"""The ops of layers with a state: see `blockyard_kernels.recurrent.ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from blockyard_kernels.cpu.library import Kind
from blockyard_kernels.cpu.rows import address_of
from blockyard_kernels.recurrent.ops import RecurrentKind

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from blockyard_kernels.cpu.op_stream import OpStream
    from blockyard_kernels.ops import AttentionBatch
    from blockyard_kernels.recurrent.ops import RecurrentShape, RecurrentWeights, StateBatch


class CpuRecurrentOps:
    """See `blockyard_kernels.recurrent.ops.RecurrentOps`."""

    def __init__(self, ops: OpStream) -> None:
        self._ops = ops
        # Recorded ops hold addresses of these arrays.
        self._places: dict[tuple[int, ...], npt.NDArray[np.int64]] = {}

    def gate(self, rows: Tensor, gates: Tensor) -> Tensor:
        rows = rows.contiguous()
        output = torch.empty_like(rows)
        op = self._ops.make(
            Kind.GATE,
            input=rows.data_ptr(),
            # Buffers of a plan are known by their beginnings.
            residual=gates.untyped_storage().data_ptr(),
            low_rank_stride=gates.stride(0),
            low_rank_offset=gates.storage_offset(),
            output=output.data_ptr(),
            in_features=rows.shape[1],
            out_features=gates.shape[1],
        )
        self._ops.emit(op, output)
        return output

    def mix(
        self,
        rows: Tensor,
        weights: RecurrentWeights,
        batch: StateBatch,
        kv_pool: Tensor,
        places: tuple[int, ...],
        shape: RecurrentShape,
    ) -> Tensor:
        rows = rows.contiguous()
        state = {"pool": kv_pool.data_ptr(), "block_stride": kv_pool[0].nbytes, "places": self._address(places)}
        mixed = self._convolve(rows, weights, batch, shape, state)
        if shape.kind is RecurrentKind.SHORT_CONV:
            return mixed
        is_scan = shape.kind is RecurrentKind.MAMBA2
        results = torch.empty(len(rows), shape.out_features, dtype=torch.float32 if is_scan else rows.dtype)
        gates = {
            "residual": rows.data_ptr(),
            "low_rank_stride": rows.shape[1],
            "low_rank_offset": shape.conv_features,
            "query_norm": address_of(weights.norm),
            "epsilon": shape.epsilon,
        }
        op = self._ops.make(
            Kind.MIX,
            input=mixed.data_ptr(),
            input_stride=shape.conv_features,
            output=results.data_ptr(),
            num_heads=shape.num_value_heads,
            num_kv_heads=shape.num_key_heads,
            head_dim=shape.value_dim,
            key_dim=shape.key_dim,
            decay_log=address_of(weights.decay_log),
            step_bias=address_of(weights.step_bias),
            skip=address_of(weights.skip),
            **gates,
            **state,
        )
        self._ops.emit(op, results, batch=cast("AttentionBatch", batch))
        if not is_scan:
            return results
        normed = torch.empty(len(rows), shape.out_features, dtype=rows.dtype)
        op = self._ops.make(
            Kind.GATED_NORM,
            input=results.data_ptr(),
            in_features=shape.out_features,
            num_heads=shape.num_key_heads,
            output=normed.data_ptr(),
            **gates,
        )
        self._ops.emit(op, normed)
        return normed

    def _convolve(
        self,
        rows: Tensor,
        weights: RecurrentWeights,
        batch: StateBatch,
        shape: RecurrentShape,
        state: dict[str, int],
    ) -> Tensor:
        """Convolves rows -> [T, F]. `state`: the fields of an op that say where the state lies."""
        mixed = rows.new_empty(len(rows), shape.conv_features)
        op = self._ops.make(
            Kind.CONVOLVE,
            input=rows.data_ptr(),
            input_stride=rows.shape[1],
            output=mixed.data_ptr(),
            out_features=shape.conv_features,
            weight=weights.conv.data_ptr(),
            bias=address_of(weights.conv_bias),
            group=shape.conv_width,
            wide=shape.kind is RecurrentKind.SHORT_CONV,
            **state,
        )
        self._ops.emit(op, mixed, batch=cast("AttentionBatch", batch))
        return mixed

    def _address(self, places: tuple[int, ...]) -> int:
        array = self._places.get(places)
        if array is None:
            array = self._places[places] = np.array(places, np.int64)
        return array.ctypes.data
