"""Reads a rank's part of modules that a checkpoint has quantized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from blockyard.model_config.fields import unusable
from blockyard.model_config.stored_weights import Packing, StoredWeights
from worker_service.models.projections import ProjectionRows, concatenate, take
from worker_service.models.quantized.unpacking import PER_WORD, empty, unpack
from worker_service.models.weight_files import Numbers, Weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from blockyard_kernels.packed import QuantizedWeight


@dataclass(frozen=True, slots=True)
class QuantizedReader:
    stored: StoredWeights
    files: Weights
    dtype: torch.dtype
    """The dtype of the rows that the weights multiply."""

    def pass_over(self, modules: Sequence[ProjectionRows]) -> None:
        """Takes note of modules that another stage reads."""
        for module in modules:
            for part, shape, _ in self._tensors(module):
                self.files.pass_over(f"{module.name}.{part}", shape)

    def read(self, modules: Sequence[ProjectionRows]) -> QuantizedWeight:
        """Reads this rank's rows of modules of the same input, one module after another.

        Raises:
            BlockyardError: MODEL_NOT_LOADED, if tensors are missing or damaged, or have different formats.
        """
        weights = [self._read_one(module) for module in modules]
        first, names = weights[0], ", ".join(module.name for module in modules)
        if not all(_equal(each.order, first.order) for each in weights):
            raise unusable(f"{names} are computed as one product, and differ in g_idx: take a model without desc_act")
        zeros = [each.zeros for each in weights if each.zeros is not None]
        return replace(
            first,
            levels=concatenate([each.levels for each in weights]),
            scales=concatenate([each.scales for each in weights]),
            zeros=concatenate(zeros) if zeros else None,
        )

    def _read_one(self, module: ProjectionRows) -> QuantizedWeight:
        name, shape = module.name, (module.out_features, module.in_features)
        parts = {part: self.files.read(f"{name}.{part}", size, kind) for part, size, kind in self._tensors(module)}
        if all(tensor.is_meta for tensor in parts.values()):
            whole = empty(self.stored, shape, self.dtype)
        else:
            self._check_shape(module, parts.pop("weight_shape", None))
            self._check_zeros(module, parts.pop("weight_zero_point", None) if self.stored.is_symmetric else None)
            whole = unpack(self.stored, name, shape, parts, self.dtype)
        return self._cut(whole, module)

    def _check_shape(self, module: ProjectionRows, told: Tensor | None) -> None:
        shape = [module.out_features, module.in_features]
        if told is not None and told.tolist() != shape:
            raise unusable(f"{module.name}.weight_shape is {told.tolist()}, not {shape}: download the model again")

    def _check_zeros(self, module: ProjectionRows, zeros: Tensor | None) -> None:
        if zeros is not None and zeros.any():
            raise unusable(f"{module.name} has zero points, though config.json says that its weights are symmetric")

    def _cut(self, whole: QuantizedWeight, module: ProjectionRows) -> QuantizedWeight:
        """Takes this rank's outputs and inputs; the inputs are whole groups."""
        inputs = range(module.in_features)[module.columns]
        first, last = (place // whole.group for place in (inputs.start, inputs.stop))
        rows = whole.map_rows(lambda tensor: module.arrange(take(tensor, (module.parts,))))
        is_whole = len(inputs) == module.in_features
        if is_whole:
            return rows
        groups = slice(first, last) if self.stored.packing is not Packing.BYTES else slice(None)
        zeros = None if rows.zeros is None else rows.zeros[:, groups]
        return replace(rows, levels=rows.levels[:, module.columns], scales=rows.scales[:, groups], zeros=zeros)

    def _tensors(self, module: ProjectionRows) -> Iterator[tuple[str, tuple[int, ...], Numbers]]:
        """Lists a module's tensors: the suffixes of their names, their shapes, and the kind of their numbers."""
        stored, outputs, inputs = self.stored, module.out_features, module.in_features
        groups, words = inputs // (stored.group or inputs), -(-outputs // PER_WORD)

        def has(part: str) -> bool:
            return f"{module.name}.{part}" in self.files

        match stored.packing:
            case Packing.BYTES:
                yield "weight", (outputs, inputs), Numbers.BYTES
                yield "weight_scale", (outputs, 1), Numbers.SCALES
                if has("weight_zero_point"):
                    yield "weight_zero_point", (outputs, 1), Numbers.BYTES
            case Packing.WORDS:
                yield "weight_packed", (outputs, inputs // PER_WORD), Numbers.WORDS
                yield "weight_scale", (outputs, groups), Numbers.SCALES
                if not stored.is_symmetric:
                    yield "weight_zero_point", (words, groups), Numbers.ZEROS
                elif has("weight_zero_point"):
                    yield "weight_zero_point", (outputs, groups), Numbers.BYTES
                if has("weight_shape"):
                    yield "weight_shape", (2,), Numbers.PLACES
                if stored.is_ordered or has("weight_g_idx"):
                    yield "weight_g_idx", (inputs,), Numbers.PLACES
            case Packing.AWQ:
                yield "qweight", (inputs, outputs // PER_WORD), Numbers.WORDS
                yield "qzeros", (groups, outputs // PER_WORD), Numbers.ZEROS
                yield "scales", (groups, outputs), Numbers.SCALES
            case _:
                yield "qweight", (inputs // PER_WORD, outputs), Numbers.WORDS
                yield "qzeros", (groups, words), Numbers.ZEROS
                yield "scales", (groups, outputs), Numbers.SCALES
                if stored.is_ordered or has("g_idx"):
                    yield "g_idx", (inputs,), Numbers.PLACES


def _equal(order: Tensor | None, other: Tensor | None) -> bool:
    if order is None or other is None:
        return order is other
    return order.is_meta or torch.equal(order, other)
