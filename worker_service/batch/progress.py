"""The progress of sequences: the record of a row, and the same as a value. csrc/decode_loop.h mirrors the record."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PROGRESS = np.dtype(
    [
        # Known ids: prompt and output.
        ("num_tokens", np.int64),
        # Tokens whose KV exists.
        ("num_computed_tokens", np.int64),
        ("num_blocks", np.int64),
        # Whether a stop token was sampled or the row failed: such a row computes nothing more.
        ("ended", np.bool_),
    ],
    align=True,
)


@dataclass(slots=True)
class RowProgress:
    """The progress of one sequence: the fields of a record PROGRESS."""

    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_blocks: int = 0
    ended: bool = False

    def record(self) -> tuple[int, int, int, bool]:
        return self.num_tokens, self.num_computed_tokens, self.num_blocks, self.ended
