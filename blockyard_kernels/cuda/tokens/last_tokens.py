"""The tokens that rows sampled last and that the host does not know yet, in Triton."""
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
    """Replaces placeholder ids by the tokens that rows sampled last.

    Args:
        token_ids: int32 or int64 [T]; -1 - row is the placeholder for that row's last token.
        last_tokens: int64 [rows]: the last token of each row, -1 if its sampling failed.
        result: the output, [T] of the same dtype, which may be `token_ids`; None: a new tensor.

    Returns:
        [T]. A last token of -1 becomes 0; the result of a failed row is not used.
    """
    result = token_ids.new_empty(len(token_ids)) if result is None else result
    if len(token_ids):
        launch = launch_table.LAST_TOKENS
        grid = (triton.cdiv(len(token_ids), launch.block),)
        _take[grid](token_ids, last_tokens, result, len(token_ids), **launch.options)
    return result


def put_last_tokens(last_tokens: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Writes `token_ids` int64 [R] to the distinct rows `rows` int64 [R] of `last_tokens` int64 [any]."""
    if len(rows):
        launch = launch_table.LAST_TOKENS
        _put[(triton.cdiv(len(rows), launch.block),)](last_tokens, rows, token_ids, len(rows), **launch.options)
