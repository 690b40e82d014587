"""The tokens that a grammar leaves possible, as bits, in Triton."""
# Triton functions are not plain Python: pyright understands only their syntax, and calls take other arguments than the
# parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from blockyard_kernels.cuda import launch_table

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit(do_not_specialize=["size", "num_words"])
def _mask(logits, rows, words, size, num_words, BLOCK: tl.constexpr):
    place, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_ids = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = token_ids < size
    word = tl.load(words + place * num_words + token_ids // 32, inside, 0)
    is_masked = ((word >> (token_ids % 32)) & 1) == 0
    tl.store(logits + tl.load(rows + place) * size + token_ids, float("-inf"), inside & is_masked)


def apply_masks(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Sets the logits of masked tokens of some rows to -inf, in place, and allocates nothing.

    Args:
        logits: float32 [R, vocabulary].
        rows: int64 [n], distinct.
        words: int32 [n, vocabulary / 32, rounded up]: bit t % 32 of word t / 32 is set if token t stays possible.
    """
    size, launch = logits.shape[1], launch_table.MASKS
    grid = (len(rows), triton.cdiv(size, launch.block))
    _mask[grid](logits, rows, words, size, words.shape[1], **launch.options)
