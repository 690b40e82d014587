"""Compiles the kernels of all later steps at start, so that no step waits for a compiler.

Triton compiles a kernel when it is first launched, and again for each other class of its arguments: other tiles, a
number that is 1 or a multiple of 16, an address that is not a multiple of 16. The launch table and the kernels
determine the classes; this module runs steps of each class, which all write to block 0. Compiled kernels are kept for
the next start in the folder TRITON_CACHE_DIR.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from triton import knobs

from blockyard_kernels.cuda.launch_table import first_row_counts
from blockyard_kernels.lora import LoraRows
from blockyard_kernels.sampling import Choices, SamplingOps

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import Tensor

    from blockyard_kernels.capture import CaptureSizes
    from blockyard_kernels.ops import AttentionBatch, Backend, PackedLinear

log = logging.getLogger(__name__)


class Compilations:
    """Counts the kernels that are compiled or read from the cache after this object was made."""

    def __init__(self) -> None:
        self.num_compiled = 0
        self.num_read = 0
        self._begin = time.perf_counter()

    def __call__(self, *, cache_hit: bool, **_: Any) -> None:
        """See `triton.knobs.CompilationListener`."""
        self.num_read += cache_hit
        self.num_compiled += not cache_hit

    def tell(self, event: str) -> None:
        seconds = time.perf_counter() - self._begin
        log.info("%s: %d kernels compiled, %d from the cache, %.1f s", event, self.num_compiled, self.num_read, seconds)


@contextmanager
def counting_compilations() -> Generator[Compilations]:
    """Counts the compilations within the context, and logs them at its end."""
    before, found = knobs.compilation.listener, Compilations()
    knobs.compilation.listener = found
    try:
        yield found
    finally:
        knobs.compilation.listener = before
    found.tell("warm-up ended")


def warm_up(
    backend: Backend,
    forward: Callable[[Tensor, AttentionBatch], Tensor],
    head: PackedLinear | None,
    sizes: CaptureSizes,
) -> None:
    """Computes a step of each class, and samples with each kind of parameters. Arguments as for `Backend.capture`."""
    with counting_compilations() as found:
        for num_tokens in sorted({min(count, sizes.max_num_tokens) for count in first_row_counts()}):
            if sizes.num_lora_slots:
                _compute(backend, forward, sizes, num_tokens, LoraRows(np.zeros(num_tokens, np.int32)))
            hidden = _compute(backend, forward, sizes, num_tokens)
            found.tell(f"warm-up, a step of {num_tokens} tokens")
            if head is not None:
                logits = backend.linear(hidden[: sizes.max_num_seqs], head, wide=True)
                if num_tokens == 1:
                    _sample(backend.sampling, logits)
                    found.tell("warm-up, sampling")


def _compute(
    backend: Backend,
    forward: Callable[[Tensor, AttentionBatch], Tensor],
    sizes: CaptureSizes,
    num_tokens: int,
    lora: LoraRows | None = None,
) -> Tensor:
    """Computes `num_tokens` tokens in as few sequences as possible, with tables so wide that attention may be split."""
    num_seqs = -(-num_tokens // sizes.max_length)
    lens = np.full(num_seqs, num_tokens // num_seqs)
    lens[: num_tokens % num_seqs] += 1
    tables = np.zeros((num_seqs, -(-sizes.max_length // sizes.block_size)), np.int32)
    batch = backend.plan_attention(lens, lens, tables, sizes.block_size, sizes.sliding_window)
    return forward(torch.zeros(num_tokens, dtype=torch.int64, device=backend.device), replace(batch, lora=lora))


def _sample(ops: SamplingOps, logits: Tensor) -> None:
    """Chooses greedily, without filters and with filters, takes last tokens, and computes log probabilities."""
    zeros, ones = np.zeros(1, np.int64), np.ones(1, np.float32)
    for temperature, top_k in ((0, 0), (1, 0), (1, 2)):
        asked = temperature * ones, zeros + top_k, ones, 0 * ones, zeros, zeros, zeros
        token_ids = ops.launch_choose(logits, Choices(*asked))
    ops.launch_finite_rows(logits)
    ops.apply_masks(logits, np.zeros(1, np.int64), np.full((1, -(-logits.shape[1] // 32)), 2**32 - 1, np.uint32))
    ops.put_last_tokens(token_ids, torch.zeros_like(token_ids), ops.take_last_tokens(token_ids, token_ids))
    for given, num_best in ((zeros, 0), (zeros, 1), (None, 1)):
        ops.token_logprobs(logits, zeros, given, num_best)
