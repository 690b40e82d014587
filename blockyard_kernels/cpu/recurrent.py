"""The ops of layers with a state: see `blockyard_kernels.recurrent.ops`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.model_config.recurrent import RecurrentKind
from blockyard_kernels.cpu.library import Kind
from blockyard_kernels.cpu.rows import address_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from blockyard.model_config.state import StateUnits
    from blockyard_kernels.cpu.op_stream import OpStream
    from blockyard_kernels.ops import AttentionBatch
    from blockyard_kernels.recurrent.ops import RecurrentShape, RecurrentWeights


class CpuRecurrentOps:
    """See `blockyard_kernels.recurrent.ops.RecurrentOps`."""

    def __init__(self, ops: OpStream) -> None:
        self._ops = ops
        # Recorded ops hold addresses of these arrays.
        self._places: dict[StateUnits, npt.NDArray[np.int64]] = {}

    def mix(
        self,
        rows: Tensor,
        weights: RecurrentWeights,
        batch: AttentionBatch,
        kv_pool: Tensor,
        units: StateUnits,
        shape: RecurrentShape,
    ) -> Tensor:
        rows, features = rows.contiguous(), shape.conv_features
        mixed = rows.new_empty(len(rows), features)
        places = self._find_places(units)
        state = {"pool": kv_pool.data_ptr(), "block_stride": kv_pool.stride(0), "places": places.ctypes.data}
        op = self._ops.make(
            Kind.CONVOLVE,
            input=rows.data_ptr(),
            input_stride=rows.shape[1],
            output=mixed.data_ptr(),
            out_features=features,
            weight=weights.conv.data_ptr(),
            bias=address_of(weights.conv_bias),
            group=shape.conv_width,
            wide=shape.kind is RecurrentKind.SHORT_CONV,
            **state,
        )
        self._ops.emit(op, mixed, batch=batch)
        if shape.kind is RecurrentKind.SHORT_CONV:
            return mixed
        results = torch.empty(len(rows), shape.out_features, dtype=rows.dtype)
        op = self._ops.make(
            Kind.MIX,
            input=mixed.data_ptr(),
            input_stride=features,
            residual=rows.data_ptr(),
            low_rank_stride=rows.shape[1],
            low_rank_offset=features,
            output=results.data_ptr(),
            num_heads=shape.num_value_heads,
            num_kv_heads=shape.num_key_heads,
            head_dim=shape.value_dim,
            key_dim=shape.key_dim,
            query_norm=address_of(weights.norm),
            decay_log=address_of(weights.decay_log),
            step_bias=address_of(weights.step_bias),
            epsilon=shape.epsilon,
            **state,
        )
        self._ops.emit(op, results, batch=batch)
        return results

    def _find_places(self, units: StateUnits) -> npt.NDArray[np.int64]:
        places = self._places.get(units)
        if places is None:
            places = self._places[units] = np.array([units.tail, *units.heads], np.int64)
        return places
