"""Names of a checkpoint's modules, and the rows and columns of them that a packed weight is made of.

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
    from kernels.ops import PackedLinear

WHOLE = (slice(None),)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """The names of one checkpoint's modules, without ".weight" and ".bias"."""

    names: Names
    prefix: str
    head: str

    @classmethod
    def find(cls, names: Names, files: Container[str]) -> ModuleNames:
        """Finds how a checkpoint names its modules; where it has none of them, as the first that are known."""
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
        """Returns what the names of a layer's modules begin with."""
        return self.prefix + self.names.layer.format(index)


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of some dimension: a range of `count` units of so many features each."""

    count: int
    units: range
    unit: int = 1

    @property
    def size(self) -> int:
        """Features of the whole."""
        return self.count * self.unit

    @property
    def part(self) -> slice:
        """This rank's features."""
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
    """[outputs] int64: for each row as it is packed its place among the parts; None: that order."""
    is_transposed: bool = False
    """Whether the weight is stored as [inputs, outputs]."""

    @property
    def num_rows(self) -> int:
        """Outputs that this rank has."""
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
        """Brings this rank's rows, as they are stored, into the order in which they are packed."""
        return rows if self.order is None else rows[self.order.to(rows.device)]

    def restore(self, rows: Tensor) -> Tensor:
        """Brings packed rows into the order in which they are stored."""
        return rows if self.order is None else rows[self.order.argsort().to(rows.device)]

    def take(self, outputs: Tensor) -> Tensor:
        """Takes of something that has a row for each output this rank's, as they are packed."""
        return self.arrange(take(outputs, (self.parts,)))


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A packed weight, and the modules whose rows it holds, in order."""

    packed: PackedLinear
    modules: tuple[ProjectionRows, ...]


def take(tensor: Tensor, part: Sequence[Sequence[slice]]) -> Tensor:
    """Takes parts of a tensor, one after another, for each of its first dimensions: a view, where each has one."""
    for dim, slices in enumerate(part):
        index = (slice(None),) * dim
        pieces = [tensor[(*index, piece)] for piece in slices]
        tensor = concatenate(pieces, dim)
    return tensor


def concatenate(pieces: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenates tensors: those without numbers by their sizes alone, since torch would load its compiler (1.6 s)."""
    if len(pieces) == 1:
        return pieces[0]
    if not pieces[0].is_meta:
        return torch.cat(list(pieces), dim)
    shape = list(pieces[0].shape)
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    return pieces[0].new_empty(shape)


def join(slices: Sequence[slice]) -> tuple[slice, ...]:
    """Joins neighbours."""
    joined: list[slice] = []
    for piece in slices:
        if joined and joined[-1].stop == piece.start:
            joined[-1] = slice(joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)


def halves_order(num_heads: int, head_dim: int, num_rotated: int) -> Tensor:
    """Orders rows whose rotated pairs stand side by side so that a pair is half of the rotated numbers apart."""
    within = torch.arange(head_dim)
    within[:num_rotated] = torch.cat([torch.arange(0, num_rotated, 2), torch.arange(1, num_rotated, 2)])
    return (torch.arange(num_heads)[:, None] * head_dim + within).flatten()


def thirds_order(num_heads: int, head_dim: int) -> Tensor:
    """Orders rows of which each head's queries, keys and values stand together: all queries, all keys, all values."""
    return torch.arange(num_heads * 3 * head_dim).view(num_heads, 3, head_dim).transpose(0, 1).flatten()
