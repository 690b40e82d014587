"""The sampling ops in C++, with mirrors of the structures in csrc/sampling.h.

Owns only the arrays of a call, which releases the GIL while it runs.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from blockyard_kernels.launching import put_last_tokens, take_last_tokens
from blockyard_kernels.sampling import Choices, Flags, Integers, TokenLogprobs

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from blockyard_kernels.cpu.library import Executor

# Bytes per thread and token of the vocabulary: 8 for a candidate, in a vector that grows by doubling.
SCRATCH_BYTES = 25


class _Choices(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("temperatures", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("sequence_indexes", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
    )


class _Wanted(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("vocab_size", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("num_best", ctypes.c_int64),
        ("candidates", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
    )


class _Masks(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("vocab_size", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
    )


class CpuSampling:
    """See `blockyard_kernels.sampling.SamplingOps`. `executor` is the current thread team."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor

    def finite_rows(self, logits: Tensor) -> Flags:
        finite = np.empty(len(logits), np.bool_)
        self.executor.find_finite_rows(_address(logits), (len(logits), logits.shape[1]), finite.ctypes.data)
        return finite

    def launch_finite_rows(self, logits: Tensor) -> Tensor:
        """Like `finite_rows`: the flags are ready at once."""
        return torch.from_numpy(self.finite_rows(logits))

    def launch_choose(self, logits: Tensor, choices: Choices) -> Tensor:
        """Like `choose`: the ids are ready at once."""
        return torch.from_numpy(self.choose(logits, choices))

    def apply_masks(self, logits: Tensor, rows: Integers, words: npt.NDArray[np.uint32]) -> None:
        size = logits.shape[1]
        places, bits = _column(rows, np.int64), _column(words, np.uint32)
        if bits.shape != (len(places), -(-size // 32)):
            raise ValueError(f"words {bits.shape} for {len(places)} rows of {size} tokens")
        self.executor.apply_masks(_Masks(_address(logits), size, len(places), places.ctypes.data, bits.ctypes.data))

    def choose(self, logits: Tensor, choices: Choices) -> Integers:
        token_ids = np.empty(len(logits), np.int64)
        columns = (
            _column(choices.temperatures, np.float32),
            _column(choices.top_k, np.int64),
            _column(choices.top_p, np.float32),
            _column(choices.min_p, np.float32),
            _column(choices.seeds, np.int64),
            _column(choices.positions, np.int64),
            _column(choices.sequence_indexes, np.int64),
        )
        addresses = (column.ctypes.data for column in (*columns, token_ids))
        self.executor.choose(_Choices(_address(logits), len(logits), logits.shape[1], *addresses))
        return token_ids

    take_last_tokens = staticmethod(take_last_tokens)
    put_last_tokens = staticmethod(put_last_tokens)

    def token_logprobs(
        self, logits: Tensor, rows: Integers, token_ids: Integers | None, num_best: int
    ) -> TokenLogprobs:
        """Computes log probabilities of tokens of some rows, and of the best of each."""
        width = num_best + (token_ids is not None)
        candidates = np.empty((len(rows), width), np.int64)
        logprobs = np.empty((len(rows), width), np.float32)
        ranks = np.empty(0 if token_ids is None else len(rows), np.int64)
        places = _column(rows, np.int64)
        chosen = None if token_ids is None else _column(token_ids, np.int64)
        self.executor.token_logprobs(
            _Wanted(
                _address(logits),
                logits.shape[1],
                len(rows),
                places.ctypes.data,
                None if chosen is None else chosen.ctypes.data,
                num_best,
                candidates.ctypes.data,
                logprobs.ctypes.data,
                ranks.ctypes.data,
            )
        )
        return TokenLogprobs(candidates, logprobs, ranks)

    def choose_bytes(self, num_rows: int, vocab_size: int) -> int:
        return self.executor.num_threads * vocab_size * SCRATCH_BYTES

    def token_logprobs_bytes(self, num_rows: int, vocab_size: int) -> int:
        return self.executor.num_threads * vocab_size * SCRATCH_BYTES


def _address(logits: Tensor) -> int:
    if not logits.is_contiguous():
        raise ValueError("logits must be contiguous")
    return logits.data_ptr()


def _column(values: npt.NDArray[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(values, dtype)
