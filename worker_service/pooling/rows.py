"""The rows of one sequence, whose pieces are computed one after another: they are kept, or added up, until pooled.

Sums are computed in the order of the tokens, in float32, so that the boundaries of pieces change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.contract.pooling import Pooling, PoolingKind

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    Floats = npt.NDArray[np.float32]


# torch divides by at least this length.
SHORTEST = np.float32(1e-12)


class PooledRows:
    """The rows of a sequence that are kept until it is pooled. Rows come in the order of the tokens."""

    def __init__(self, kind: PoolingKind) -> None:
        """`kind`: LAST, FIRST, MEAN or TOKENS."""
        self._kind = kind
        self._num_tokens = 0
        self._total: Floats | None = None
        self._kept: list[Tensor] = []

    def add(self, hidden: Tensor) -> None:
        """Takes rows [n, hidden_size], n >= 1; keeps copies."""
        match self._kind:
            case PoolingKind.MEAN:
                rows = hidden.float().cpu().numpy()
                if self._total is None:
                    self._total = np.zeros(rows.shape[1], np.float32)
                for row in rows:
                    self._total += row
            case PoolingKind.TOKENS:
                self._kept.append(hidden.clone())
            case PoolingKind.FIRST:
                self._kept = self._kept or [hidden[:1].clone()]
            case _:
                self._kept = [hidden[-1:].clone()]
        self._num_tokens += len(hidden)

    def finish(self) -> Tensor:
        """Returns the pooled row [1, hidden_size], or all rows for TOKENS; float32 for MEAN."""
        if self._total is not None:
            return torch.from_numpy(self._total / np.float32(self._num_tokens))[None]
        return torch.cat(self._kept)


@dataclass(frozen=True, slots=True, eq=False)
class PoolingRequest:
    """The pooling parameters of a sequence, and its rows so far."""

    pooling: Pooling
    rows: PooledRows


def normalise(rows: Floats) -> Floats:
    """Divides each row by its L2 norm, whose squares are added in order; a row of zeros stays zero.

    Args:
        rows: [n, width]; not changed.
    """
    lengths: Floats = np.sqrt(np.add.accumulate(rows * rows, axis=1)[:, -1:])
    return np.divide(rows, np.maximum(lengths, SHORTEST), dtype=np.float32)
