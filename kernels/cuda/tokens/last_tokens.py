"""The tokens that rows of the batch sampled last, where the host does not know them yet, in Triton."""
# Triton's functions are in a language of their own, of which pyright sees the syntax, and calls take more and other
# arguments than their parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.cuda import launch_table

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit(do_not_specialize=["num_tokens"])
def _take(token_ids, last_tokens, result, num_tokens, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_tokens
    known = tl.load(token_ids + places, inside, 0)
    last = tl.load(last_tokens - 1 - known, inside & (known < 0), 0)
    tl.store(result + places, tl.maximum(tl.where(known < 0, last, known), 0), inside)


@triton.jit(do_not_specialize=["num_rows"])
def _put(last_tokens, rows, token_ids, num_rows, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < num_rows
    tl.store(last_tokens + tl.load(rows + places, inside, 0), tl.load(token_ids + places, inside, 0), inside)


def take_last_tokens(token_ids: Tensor, last_tokens: Tensor, result: Tensor | None = None) -> Tensor:
    """Replaces ids that are not known, each by the token that a row sampled last.

    Args:
        token_ids: int32 or int64 [T], -1 - row where one is not known.
        last_tokens: int64 [rows].
        result: what is written, [T] of the same dtype, which may be `token_ids`; None: a new tensor.

    Returns:
        [T], 0 in the place of a row's -1: a row that failed has no token, and nobody asks what comes of this one.
    """
    result = token_ids.new_empty(len(token_ids)) if result is None else result
    if len(token_ids):
        launch = launch_table.LAST_TOKENS
        grid = (triton.cdiv(len(token_ids), launch.block),)
        _take[grid](token_ids, last_tokens, result, len(token_ids), **launch.options)
    return result


def put_last_tokens(last_tokens: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Writes the tokens int64 [R] of rows int64 [R], no two of which are one, into a table int64 [any]."""
    if len(rows):
        launch = launch_table.LAST_TOKENS
        _put[(triton.cdiv(len(rows), launch.block),)](last_tokens, rows, token_ids, len(rows), **launch.options)
