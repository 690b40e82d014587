"""The collective operations of a group's ranks. Knows no transport.

Float addition is not associative. A sum over the leaves of a product (`kernels.shapes.add_leaves`) is added as a binary
tree, of which each rank has a subtree; `Collectives.add` goes on where that ends, so that the number of ranks changes
no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


class Collectives(Protocol):
    """The operations of the ranks that share a model, at all of them in the same order with the same shapes.

    For one thread, but for `abort` and `is_broken`. Every operation blocks until its result can be used, or is queued
    where the device runs it behind what came before; each raises BlockyardError GROUP_BROKEN where the group is broken
    or the time of the step is over. On a device, a result counts only if the group is not broken after the wait for it:
    an operation that was aborted leaves anything in its buffers and raises nothing.
    """

    @property
    def rank(self) -> int:
        """The place of this rank, below `size`."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks; a power of two if they add."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether the group is of no use any more."""
        ...

    def add(self, rows: Tensor) -> None:
        """Adds up each rank's `rows`, float32 [T, W], in place and in the tree's order: the same bits on all ranks.

        That is also the order in which fewer ranks with more leaves each add.
        """
        ...

    def add_bits(self, rows: Tensor) -> None:
        """Puts together, in place, `rows` [T, W] of which each element is nonzero on at most one rank: every bit of it.

        Adds bit patterns, since a float sum would turn -0.0 into +0.0. Dtypes of 2 or 4 bytes.
        """
        ...

    def gather(self, rows: Tensor, to: int = 0) -> Tensor | None:
        """Returns the columns [T, size * W] of all ranks' `rows` [T, W] in rank order at rank `to`, None elsewhere."""
        ...

    def exchange_best(
        self, values: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], finite: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Finds the likeliest token of each row over slices of the vocabulary.

        Args:
            values: [R], the largest logit of this rank's slice.
            ids: [R], its token, counted over the whole vocabulary and below 2**31; the lowest on ties.
            finite: [R], whether all logits of the slice are finite numbers.

        Returns:
            The tokens [R] of the largest values, the lowest on ties, and whether all logits are finite; of a row where
            they are not, the token has no meaning. The same at all ranks.
        """
        ...

    def broadcast(self, array: npt.NDArray[np.int32], root: int = 0) -> npt.NDArray[np.int32]:
        """Returns the array [n] of rank `root`; the others' say how long it is."""
        ...

    def send(self, rows: Tensor, rank: int) -> None:
        """Sends rows to another rank, which receives them; `rows` may be used again at once."""
        ...

    def receive(self, rows: Tensor, rank: int) -> None:
        """Fills `rows` with those that another rank sends."""
        ...

    def abort(self, reason: str) -> None:
        """Breaks the group: no operation begins any more, and one that waits ends as soon as the transport allows.

        From any thread; idempotent.
        """
        ...


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a network, as one of them sees them: all of them, and those of its stage, which share its layers.

    A stage's ranks follow those of the stage before.
    """

    world: Collectives
    stage: Collectives

    def receive(self, rows: Tensor) -> None:
        """Fills rows with those of the stage before."""
        self.world.receive(rows, self.world.rank - self.stage.size)

    def send(self, rows: Tensor) -> None:
        """Sends rows to the stage after."""
        self.world.send(rows, self.world.rank + self.stage.size)

    def broadcast_end(self, array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Returns at all ranks the array [n] of the last stage's first; the others' say how long it is."""
        return self.world.broadcast(array, self.world.size - self.stage.size)
