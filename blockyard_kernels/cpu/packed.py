"""Packs weights in panels, in the order in which a product streams them. See csrc/linear.h."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard_kernels.arena import Arena, keep

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from blockyard_kernels.cpu.library import Executor
    from blockyard_kernels.shapes import LinearSpec

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1}
WORD_BYTES = 4


class CpuLinear:
    """A weight packed in panels, with its bias. Its rows may come in parts, which are copied.

    For a weight on the device "meta" it only takes the memory, which the caller fills.
    """

    def __init__(
        self, executor: Executor, arena: Arena, weights: Sequence[Tensor], bias: Tensor | None, spec: LinearSpec
    ) -> None:
        self.num_rows, self.in_features = sum(len(part) for part in weights), weights[0].shape[1]
        self.leaves = spec.leaves
        self.is_gated, self.is_partial = spec.gated, spec.partial
        self.activation, self.logits = spec.activation, spec.logits
        self.out_features = self.num_rows // 2 if spec.gated else self.num_rows
        self.dtype = weights[0].dtype
        self.layout = f"panels of {str(self.dtype).removeprefix('torch.')}"
        self.bias = None if bias is None else keep(arena, bias)
        self.is_table = not spec.gated
        num_words, rest = divmod(self.in_features * self.dtype.itemsize, WORD_BYTES)
        if rest:
            raise ValueError(f"in_features must be even in {self.dtype}, not {self.in_features}")
        check_leaves(self.in_features, self.leaves, WORD_BYTES // self.dtype.itemsize)
        self._width = executor.panel_columns
        self.weight = arena.take(count_columns(self.num_rows, self._width) * num_words * WORD_BYTES)
        if not weights[0].is_meta:
            parts = [part if part.stride(1) == 1 else part.contiguous() for part in weights]
            columns = panel_columns(row_addresses(parts), self._width, gated=spec.gated)
            executor.pack(columns, num_words, self.weight.data_ptr())

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Returns copies of the weight [num_rows, in_features] and the bias [num_rows]."""
        shape = self.in_features, self._width, self.num_rows
        rows = panel_rows(self.weight.view(self.dtype), *shape, gated=self.is_gated)
        return rows, None if self.bias is None else self.bias.clone()


def check_leaves(in_features: int, leaves: int, values_per_word: int) -> None:
    """Checks that each of several leaves consists of whole words.

    Raises:
        ValueError: a leaf ends within a word.
    """
    multiple = leaves * values_per_word
    if leaves > 1 and in_features % multiple:
        raise ValueError(f"in_features must be a multiple of {multiple} in {leaves} leaves, not {in_features}")


def row_addresses(parts: Sequence[Tensor]) -> npt.NDArray[np.uintp]:
    """Returns the address of each row of a weight in parts."""
    return np.concatenate(
        [
            part.data_ptr() + np.arange(len(part), dtype=np.uintp) * np.uintp(part.stride(0) * part.itemsize)
            for part in parts
        ]
    )


def count_columns(num_rows: int, width: int) -> int:
    """Returns the number of columns of all panels: `num_rows`, rounded up to whole panels."""
    return -(-num_rows // width) * width


def panel_columns(rows: npt.NDArray[np.uintp], width: int, *, gated: bool) -> npt.NDArray[np.uintp]:
    """Returns the rows in the order of panel columns, panel by panel; a column without a row is 0.

    The first half of a gated weight's rows are gates, the second half ups; a panel has equally many of both.
    """
    sides = rows.reshape(2 if gated else 1, -1)
    width_of_side = width // len(sides)
    num_panels = -(-sides.shape[1] // width_of_side)
    padded = np.zeros((len(sides), num_panels * width_of_side), np.uintp)
    padded[:, : sides.shape[1]] = sides
    return padded.reshape(len(sides), num_panels, width_of_side).transpose(1, 0, 2).ravel()


def panel_rows(panels: Tensor, row_size: int, width: int, num_rows: int, *, gated: bool) -> Tensor:
    """Returns the columns of panels in the order of the rows: the inverse of `panel_columns`.

    Args:
        panels: [any], as `Executor.pack` lays them out; an element is at most one word.
        row_size: elements of a row.
        width: columns of a panel.
        num_rows: rows, gates and ups together.
        gated: whether the first half of the rows are gates, the second half ups.

    Returns:
        [num_rows, row_size]: a copy.
    """
    num_sides, per_word = (2 if gated else 1), WORD_BYTES // panels.itemsize
    num_words = -(-row_size // per_word)
    words = panels.view(-1, num_words, num_sides, width // num_sides, per_word)
    ordered = words.permute(2, 0, 3, 1, 4).clone(memory_format=torch.contiguous_format)
    sides = ordered.view(num_sides, -1, num_words * per_word)
    return sides[:, : num_rows // num_sides, :row_size].reshape(num_rows, row_size)
