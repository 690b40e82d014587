"""The tensors of a network by their names in transformers' checkpoints, wherever they come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Weights(Protocol):
    """Tensors by name: from a folder's files, or random."""

    def __contains__(self, name: str) -> bool:
        """Returns whether there is such a tensor."""
        ...

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """Returns a tensor of this shape, or this rank's part of it; it may be shared: copy what is to stay.

        One on "meta" others fill.
        """
        ...

    def pass_over(self, name: str, shape: Sequence[int]) -> None:
        """Takes note of a tensor that another stage reads."""
        ...
