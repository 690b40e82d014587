"""Reads a rank's parts of a checkpoint's tensors, and packs them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, cast

import torch

from blockyard.model_config.fields import unusable
from blockyard_kernels.arena import Arena, keep
from blockyard_kernels.shapes import PLAIN_LINEAR, LinearSpec
from worker_service.models.layers import NormLayer
from worker_service.models.projections import (
    WHOLE,
    Cut,
    ModuleNames,
    Projection,
    ProjectionRows,
    concatenate,
    take,
)
from worker_service.models.quantized.reading import QuantizedReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from blockyard.model_config import decoder_config
    from blockyard.model_config.share import Share
    from blockyard.model_config.stored_weights import StoredWeights
    from blockyard_kernels.mixture.ops import ExpertShape, ExpertWeights, PackedExperts
    from blockyard_kernels.ops import Backend
    from blockyard_kernels.packed import PackedLinear, WeightRows
    from worker_service.models.model_config import ModelConfig
    from worker_service.models.weight_files import Weights


class PartReader:
    """Reads a rank's parts of tensors, under the names of the architecture's checkpoints, and packs them."""

    def __init__(self, config: ModelConfig, backend: Backend, files: Weights, share: Share, arena: Arena) -> None:
        self._config = config
        self._arena = arena
        self._backend = backend
        self._files = files
        self._share = share
        self._names = ModuleNames.find(config.names, files)
        stored = config.stored
        self._quantized = QuantizedReader(stored, files, config.dtype) if stored is not None else None
        self._has_found_two = False
        # Whether the current tensors belong to another stage: they count in the digest, but are not read.
        self._passes_over = False

    def _pack(self, weights: WeightRows, bias: Tensor | None = None, spec: LinearSpec = PLAIN_LINEAR) -> PackedLinear:
        """Packs a weight. For a weight of another stage the result is a placeholder that the caller drops."""
        if self._passes_over:
            return cast("PackedLinear", None)
        return self._backend.pack_linear(weights, bias, spec, self._arena)

    def _pack_router(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        if self._passes_over:
            return cast("PackedLinear", None)
        assert self._backend.mixture is not None, "it has all ops"
        return self._backend.mixture.pack_router(weight, bias, self._arena)

    def _pack_experts(self, experts: Iterable[ExpertWeights], shape: ExpertShape) -> PackedExperts:
        if self._passes_over:
            deque(experts, maxlen=0)
            return cast("PackedExperts", None)
        assert self._backend.mixture is not None, "it has all ops"
        return self._backend.mixture.pack_experts(experts, shape, self._arena)

    def _norm(self, name: str, norm: decoder_config.Norm, width: int) -> NormLayer:
        dtype = torch.float32 if norm.is_held_wide else self._config.dtype
        weight = self._norm_tensor(f"{name}.weight", width, dtype, norm.offset) if norm.has_weight else None
        bias = self._norm_tensor(f"{name}.bias", width, dtype) if norm.has_bias else None
        return NormLayer(norm.kind, norm.epsilon, weight, bias)

    def _norm_tensor(self, name: str, width: int, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
        tensor = self._read(name, width).to(dtype)
        return self._keep(tensor + offset if offset and not tensor.is_meta else tensor)

    def _weight(self, module: ProjectionRows) -> Tensor:
        stored = self._read(f"{module.name}.weight", *module.stored_shape, part=module.stored_part)
        return module.arrange(stored.t().contiguous() if module.is_transposed else stored)

    def _weights(self, modules: tuple[ProjectionRows, ...]) -> WeightRows:
        """Reads weights of the same input, quantized if the checkpoint is."""
        reader = self._quantized
        are_quantized = {reader is not None and self._is_quantized(reader.stored, module.name) for module in modules}
        if len(are_quantized) > 1:
            names = ", ".join(module.name for module in modules)
            raise unusable(f"{names} are computed as one product, and config.json has only some of them quantized")
        if reader is None or not are_quantized.pop():
            return [self._weight(module) for module in modules]
        if self._passes_over:
            reader.pass_over(modules)
            return []
        return reader.read(modules)

    def _is_quantized(self, stored: StoredWeights, module: str) -> bool:
        return (module != self._names.head or stored.has_head) and stored.covers(module)

    def _bias(self, modules: Sequence[ProjectionRows]) -> Tensor:
        read = (self._read(f"{module.name}.bias", module.out_features, part=(module.parts,)) for module in modules)
        return concatenate([module.arrange(bias) for module, bias in zip(modules, read, strict=True)]).clone()

    def _keep(self, tensor: Tensor) -> Tensor:
        """Copies a tensor into the arena, since a tensor that was read may be a view of a mapped file."""
        return tensor if self._passes_over else keep(self._arena, tensor)

    def _read(
        self, name: str, *shape: int, part: Sequence[Sequence[slice]] = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        """Returns a part of a tensor in a dtype (None: the model's dtype), possibly a view of the mapped file.

        It is a meta tensor if another stage has it, or if the source fills the packed memory itself.
        """
        dtype = dtype or self._config.dtype
        if self._passes_over:
            self._files.pass_over(name, shape)
            return take(torch.empty(shape, dtype=dtype, device="meta"), part)
        tensor = self._read_part(name, shape, part)
        if (tensor.dtype is torch.uint8) is not (dtype is torch.uint8) and not tensor.is_meta:
            raise unusable(f"{name} is stored as {tensor.dtype}: the weights do not belong to their config.json")
        return tensor if tensor.is_meta else tensor.to(self._backend.device, dtype)

    def _read_part(self, name: str, shape: tuple[int, ...], part: Sequence[Sequence[slice]]) -> Tensor:
        tensor = self._files.read(name, shape)
        return take(tensor, part) if tuple(tensor.shape) == shape else tensor

    def _linear(
        self, modules: tuple[ProjectionRows, ...], *, bias: bool, spec: LinearSpec = PLAIN_LINEAR
    ) -> Projection:
        """Reads projections of the same input and packs this rank's outputs as one."""
        weights = self._weights(modules)
        return Projection(self._pack(weights, self._bias(modules) if bias else None, spec), modules)

    def _row_parallel(self, name: str, inputs: Cut, leaves: int, *, bias: bool) -> Projection:
        """Reads a projection back to the hidden size, and packs this rank's inputs of it, with the whole bias."""
        hidden, is_transposed = self._config.hidden_size, self._config.names.are_transposed
        module = ProjectionRows(name, hidden, inputs.size, WHOLE, inputs.part, is_transposed=is_transposed)
        weights = self._weights((module,))
        added = self._read(name + ".bias", hidden).clone() if bias else None
        return Projection(self._pack(weights, added, LinearSpec(leaves=leaves, partial=self._share.is_cut)), (module,))

    def _rows(self, name: str, size: int, parts: tuple[slice, ...], order: Tensor | None = None) -> ProjectionRows:
        is_transposed = self._config.names.are_transposed
        return ProjectionRows(name, size, self._config.hidden_size, parts, order=order, is_transposed=is_transposed)
