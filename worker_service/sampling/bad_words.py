"""Finds the tokens that would complete a bad word: a run of token ids that may not appear in the output.

Knows no tensors and no batch. The prompt does not count: a word begins and ends in the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from worker_service.step import Array, no_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NONE = no_ids()


class BadWords:
    """The bad words of a sequence, keyed by the ids before their last one. Never changes, so forks share it."""

    def __init__(self, sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
        """Takes sequences of at least one id; one with an id beyond the vocabulary can never complete."""
        last_token_ids: dict[bytes, set[int]] = {}
        for token_ids in sequences:
            if max(token_ids) < vocab_size:
                last_token_ids.setdefault(_key(token_ids[:-1]), set()).add(token_ids[-1])
        self._last_token_ids = {key: np.array(sorted(last), np.int64) for key, last in last_token_ids.items()}
        self._lengths = sorted({len(key) // _NONE.itemsize for key in last_token_ids})

    def __bool__(self) -> bool:
        return bool(self._lengths)

    def completing(self, output_token_ids: npt.NDArray[np.integer[Any]]) -> Array:
        """Finds the tokens that would complete a word after this output: int64 [any], some perhaps twice."""
        num_tokens = len(output_token_ids)
        found = [
            self._last_token_ids.get(_key(output_token_ids[num_tokens - length :]), _NONE)
            for length in self._lengths
            if length <= num_tokens
        ]
        return np.concatenate(found) if found else _NONE


def _key(token_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    return np.asarray(token_ids, np.int64).tobytes()
