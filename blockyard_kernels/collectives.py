"""The collective operations of a group's ranks. Knows no transport.

Float addition is not associative, so a product is summed over its leaves as a binary tree (`add_leaves`). Each rank
computes the sum of a subtree, and `Collectives.add` adds these sums along the rest of the tree: the result has the same
bits for every number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


class Collectives(Protocol):
    """Collective operations of the ranks that share a model. All ranks call them in the same order with equal shapes.

    One thread uses them; only `abort` and `is_broken` may be used from any thread. An operation blocks until its result
    can be used, or is queued on the device behind earlier work. It raises BlockyardError GROUP_BROKEN if the group is
    broken or the step's time limit has passed. After waiting for a result on a device, check `is_broken`: an aborted
    operation raises nothing and leaves arbitrary values in its buffers.
    """

    @property
    def rank(self) -> int:
        """The index of this rank, below `size`."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks; a power of two if `add` is used."""
        ...

    @property
    def is_broken(self) -> bool:
        """Whether the group has failed or was aborted and cannot be used any more."""
        ...

    def add(self, rows: Tensor) -> None:
        """All-reduces (sums) `rows`, float32 [T, W], in place. All ranks get the same bits.

        The sums are added along the tree of `add_leaves`, as fewer ranks with more leaves each would add them.
        """

    def add_bits(self, rows: Tensor) -> None:
        """All-reduces `rows` [T, W] in place, where each element is nonzero on at most one rank. Keeps every bit.

        It adds bit patterns as integers, since a float sum would turn -0.0 into +0.0. For dtypes of 2 or 4 bytes.
        """

    def gather(self, rows: Tensor, to: int = 0) -> Tensor | None:
        """Concatenates all ranks' `rows` [T, W] in rank order: [T, size * W] at rank `to`, None at the other ranks."""
        ...

    def exchange_best(
        self, values: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], finite: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Finds the likeliest token of each row over slices of the vocabulary.

        Args:
            values: [R], the largest logit of this rank's slice.
            ids: [R], the id of that logit's token in the whole vocabulary, below 2**31; the lowest id on ties.
            finite: [R], whether all logits of the slice are finite numbers.

        Returns:
            The tokens [R] with the largest values, the lowest id on ties, and whether all logits of each row are
            finite. The token of a row that is not finite is arbitrary. All ranks get the same result.
        """
        ...

    def broadcast(self, array: npt.NDArray[np.int32], root: int = 0) -> npt.NDArray[np.int32]:
        """Returns rank `root`'s array [n] at all ranks. The other ranks pass an array of the same length."""
        ...

    def send(self, rows: Tensor, rank: int) -> None:
        """Sends `rows` to another rank, which must call `receive`. The caller may overwrite `rows` afterwards."""

    def receive(self, rows: Tensor, rank: int) -> None:
        """Fills `rows` with the rows that another rank sends."""

    def abort(self, reason: str) -> None:
        """Breaks the group: new operations fail, and a waiting operation ends as soon as the transport allows.

        May be called from any thread, and more than once.
        """


@dataclass(frozen=True, slots=True)
class Ranks:
    """The groups of one rank: `world` holds all ranks of the model, `stage` the ranks of this pipeline stage.

    The ranks of a stage share its layers. Rank numbers are consecutive within a stage and grow from stage to stage.
    """

    world: Collectives
    stage: Collectives

    def receive(self, rows: Tensor) -> None:
        """Fills `rows` with the rows that the previous pipeline stage sends."""
        self.world.receive(rows, self.world.rank - self.stage.size)

    def send(self, rows: Tensor) -> None:
        """Sends `rows` to the next pipeline stage."""
        self.world.send(rows, self.world.rank + self.stage.size)

    def broadcast_end(self, array: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Broadcasts the array [n] of the last stage's first rank. The other ranks pass an array of the same length."""
        return self.world.broadcast(array, self.world.size - self.stage.size)
