"""Unpacks levels, scales and zero points from a checkpoint's tensors. Knows no files.

AWQ has the layout of AutoAWQ's gemm kernels, GPTQ of its own kernels, and compressed-tensors of its own library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blockyard.model_config.fields import unusable
from blockyard.model_config.stored_weights import Packing, StoredWeights
from blockyard_kernels.packed import QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


PER_WORD = 8
MIDDLE = 8
"""The offset that compressed-tensors adds to signed levels of four bits."""
# The columns of a word in AWQ's order, by its half bytes from the lowest on.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
ONE_LESS = (Packing.GPTQ,)


def unpack(
    stored: StoredWeights, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor], dtype: torch.dtype
) -> QuantizedWeight:
    """Makes a weight from a module's tensors.

    Args:
        stored: the format of the tensors.
        module: the module's name, for messages.
        shape: the shape of the weight [outputs, inputs].
        parts: the tensors by the suffixes of their names.
        dtype: the dtype of the rows that the weight multiplies.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, if the tensors do not have the format `stored`.
    """
    scales = parts[_scales_name(stored)].float()
    if not scales.isfinite().all():
        raise unusable(f"{module} has scales that are not finite: download the model again")
    if stored.packing is Packing.BYTES:
        return QuantizedWeight(dtype, parts["weight"], scales.clone())
    levels, zeros = _levels_and_zeros(stored, module, shape, parts)
    if stored.packing is not Packing.WORDS:
        scales = scales.T
    order = _order(stored, module, shape[1], parts)
    if order is not None:
        levels = levels[:, order]
    copies = shape[1] // stored.held_group(shape[1]) // scales.shape[1]
    held_scales, held_zeros = (each.repeat_interleave(copies, 1) for each in (scales, zeros))
    return QuantizedWeight(dtype, levels, held_scales, held_zeros, order)


def empty(stored: StoredWeights, shape: tuple[int, int], dtype: torch.dtype) -> QuantizedWeight:
    levels = torch.empty(shape, dtype=torch.uint8, device="meta")
    if stored.packing is Packing.BYTES:
        return QuantizedWeight(dtype, levels, torch.empty(shape[0], 1, device="meta"))
    groups = shape[0], shape[1] // stored.held_group(shape[1])
    scales, zeros = torch.empty(groups, device="meta"), torch.empty(groups, dtype=torch.uint8, device="meta")
    order = torch.empty(shape[1], dtype=torch.int64, device="meta") if stored.is_ordered else None
    return QuantizedWeight(dtype, levels, scales, zeros, order)


def _scales_name(stored: StoredWeights) -> str:
    return "weight_scale" if stored.packing in (Packing.BYTES, Packing.WORDS) else "scales"


def _levels_and_zeros(
    stored: StoredWeights, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns levels [outputs, inputs] and zero points [outputs, groups of the checkpoint], both uint8."""
    match stored.packing:
        case Packing.WORDS:
            levels = halves(parts["weight_packed"])
            if stored.is_symmetric:
                zeros = torch.full_like(parts["weight_scale"], MIDDLE, dtype=torch.uint8)
            else:
                zeros = halves(parts["weight_zero_point"].T)[:, : shape[0]].T
        case Packing.AWQ:
            by_input, by_group = (
                halves(parts[name]).unflatten(1, (-1, PER_WORD))[..., AWQ_ORDER].flatten(1)
                for name in ("qweight", "qzeros")
            )
            levels, zeros = by_input.T, by_group.T
        case _:
            levels, zeros = halves(parts["qweight"].T), halves(parts["qzeros"])[:, : shape[0]].T
            if stored.packing in ONE_LESS:
                if (zeros == 15).any():
                    # Readers disagree on this value: some read 16, others 0, others carry into the next zero point.
                    raise unusable(
                        f"{module} has zero points of 16 or 0, which readers of GPTQ's first format do not agree on: "
                        "convert the model to gptq_v2"
                    )
                zeros = zeros + 1
    return levels.contiguous(), zeros


def halves(words: Tensor) -> Tensor:
    """Splits words [rows, words] int32 into 4-bit numbers, the lowest bits first -> [rows, 8 * words] uint8."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)


def _order(stored: StoredWeights, module: str, in_features: int, parts: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the inputs in the order of their groups, or None if they are in this order already."""
    found = parts.get("g_idx", parts.get("weight_g_idx"))
    group = stored.group or in_features
    plain = torch.arange(in_features) // group
    if found is None:
        return None
    groups = found.long()
    if not stored.is_ordered:
        if not torch.equal(groups, plain):
            raise unusable(f"{module} has a g_idx of its own, though config.json says that inputs are in order")
        return None
    if not torch.equal(groups.sort().values, plain):
        raise unusable(f"{module} has a g_idx whose groups are not of {group} inputs each")
    return groups.argsort(stable=True)
