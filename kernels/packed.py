"""A weight of a product as a backend holds it. Knows no op."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PackedLinear(Protocol):
    """A weight in the backend's own layout, with its bias. It replaces the tensor that it was made from."""

    in_features: int
    out_features: int
    """Of the product: of a gated weight half its rows."""
    is_table: bool
    """Whether `Backend.embedding` can take rows from it, so that a tied table need not be held twice."""
    is_partial: bool
    """Whether other ranks hold the rest of its inner dimension."""

    layout: str
    """How it is held, in words."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        ...

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Returns copies of the weight [rows, in_features] that rows are multiplied by, and of the bias [rows]."""
        ...
