"""Names of a checkpoint's modules, and the rows and columns of them that a packed weight holds.

Knows names, shapes and indices; reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from torch import Tensor

    from blockyard.model_config.names import Names
    from blockyard_kernels.ops import PackedLinear

WHOLE = (slice(None),)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The names of one checkpoint's modules, without ".weight" and ".bias"."""

    names: Names
    prefix: str
    head: str

    @classmethod
    def find(cls, names: Names, files: Container[str]) -> ModuleNames:
        """Returns the naming scheme of a checkpoint, or the first known scheme if none matches."""
        prefix = next((p for p in names.prefixes if f"{p}{names.embedding}.weight" in files), names.prefixes[0])
        head = next((name for name in names.heads if f"{name}.weight" in files), names.heads[0])
        return cls(names, prefix, head)

    @property
    def embedding(self) -> str:
        return self.prefix + self.names.embedding

    @property
    def positions(self) -> str:
        return self.prefix + self.names.positions

    @property
    def token_types(self) -> str:
        return self.prefix + self.names.token_types

    @property
    def embedding_norm(self) -> str:
        return self.prefix + self.names.embedding_norm

    @property
    def final_norm(self) -> str:
        return self.prefix + self.names.final_norm

    def layer(self, index: int) -> str:
        """Returns the prefix of the names of a layer's modules."""
        return self.prefix + self.names.layer.format(index)


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a dimension that has `count` units of equally many features: a range of units."""

    count: int
    units: range
    unit: int = 1

    @property
    def size(self) -> int:
        return self.count * self.unit

    @property
    def num_features(self) -> int:
        """The features that the rank has."""
        return len(self.units) * self.unit

    @property
    def part(self) -> slice:
        return slice(self.units.start * self.unit, self.units.stop * self.unit)


@dataclass(frozen=True, slots=True, eq=False)
class ProjectionRows:
    """The part of one module of a checkpoint that a rank has: some outputs, and some inputs of each."""

    name: str
    """The module's name in the whole network."""
    out_features: int
    in_features: int
    parts: tuple[slice, ...] = WHOLE
    """The outputs, in the order in which they are stored."""
    columns: slice = field(default_factory=lambda: slice(None))
    order: Tensor | None = None
    """[outputs] int64: for each packed row its index in `parts`; None: packed rows have the order of `parts`."""
    is_transposed: bool = False
    """Whether the weight is stored as [inputs, outputs]."""

    @property
    def num_rows(self) -> int:
        return sum(len(range(self.out_features)[part]) for part in self.parts)

    @property
    def stored_shape(self) -> tuple[int, int]:
        shape = self.out_features, self.in_features
        return (shape[1], shape[0]) if self.is_transposed else shape

    @property
    def stored_part(self) -> tuple[tuple[slice, ...], ...]:
        """The part of the stored weight that this rank has, for each dimension."""
        part = self.parts, (self.columns,)
        return (part[1], part[0]) if self.is_transposed else part

    def arrange(self, rows: Tensor) -> Tensor:
        """Reorders this rank's rows from stored order to packed order."""
        return rows if self.order is None else rows[self.order.to(rows.device)]

    def restore(self, rows: Tensor) -> Tensor:
        """Reorders packed rows to stored order."""
        return rows if self.order is None else rows[self.order.argsort().to(rows.device)]

    def take(self, outputs: Tensor) -> Tensor:
        """Takes this rank's rows, in packed order, of a tensor that has a row for each output."""
        return self.arrange(take(outputs, (self.parts,)))


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A packed weight, and the modules whose rows it holds, in order."""

    packed: PackedLinear
    modules: tuple[ProjectionRows, ...]


def take(tensor: Tensor, part: Sequence[Sequence[slice]]) -> Tensor:
    """Takes parts of a tensor along each of its first dimensions and concatenates them; a view if each has one part."""
    for dim, slices in enumerate(part):
        index = (slice(None),) * dim
        pieces = [tensor[(*index, piece)] for piece in slices]
        tensor = concatenate(pieces, dim)
    return tensor


def concatenate(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenates tensors. Meta tensors only by their sizes, since torch would load its compiler for them (1.6 s)."""
    if len(pieces) == 1:
        return pieces[0]
    if not pieces[0].is_meta:
        return torch.cat(list(pieces), dim)
    shape = list(pieces[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    return pieces[0].new_empty(shape)


def stacked_parts(cuts: Sequence[Cut]) -> tuple[slice, ...]:
    """Returns a rank's parts of a tensor that has the rows of some dimensions one after another."""
    joined, start = list[slice](), 0
    for cut in cuts:
        piece = slice(start + cut.part.start, start + cut.part.stop)
        start += cut.size
        if joined and joined[-1].stop == piece.start:
            joined[-1] = slice(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)


def halves_order(num_heads: int, head_dim: int, num_rotated: int) -> Tensor:
    """Returns the order that turns interleaved rotary pairs (2i, 2i + 1) into pairs (i, i + R / 2) of a head."""
    within = torch.arange(head_dim)
    within[:num_rotated] = torch.cat([torch.arange(0, num_rotated, 2), torch.arange(1, num_rotated, 2)])
    return (torch.arange(num_heads)[:, None] * head_dim + within).flatten()


def parts_order(sizes: Sequence[int], num_groups: int) -> Tensor:
    """Returns the order that turns rows grouped by head (such as q, k, v of each) into all first parts, all second.

    `sizes`: the rows of each part in one group.
    """
    groups = torch.arange(num_groups * sum(sizes)).view(num_groups, -1)
    return torch.cat([part.flatten() for part in groups.split(list(sizes), dim=1)])
