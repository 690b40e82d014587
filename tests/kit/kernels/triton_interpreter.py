"""Triton without a GPU: import this before a module of kernels. On a GPU nothing is interpreted.

`tests/conftest.py` decides, before anything can import Triton, which looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16] if IS_INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


def _patch_lang_tensor(tensor: Any, scope: Any, plain: Any = interpreter._patch_lang_tensor) -> None:
    """Lets bounds of loops be numbers of a launch: they are arrays of one element, which numpy 2.4 takes no int of."""
    plain(tensor, scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Adds products one after the other: a library would take another order for another size of a tile.

    Refuses bfloat16, which the interpreter holds as whole numbers (triton #11584).
    """
    assert a.data.dtype.kind == b.data.dtype.kind == "f", f"no products of {a.dtype} in the interpreter"
    left, right, sums = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype), d.data.copy()
    for k in range(left.shape[-1]):
        sums += left[..., k : k + 1] * right[..., k : k + 1, :]
    return interpreter.TensorHandle(sums, d.dtype.scalar)


if IS_INTERPRETED:
    assert isinstance(tl.zeros, interpreter.InterpretedFunction), "Triton was imported too early"
    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter.InterpreterBuilder.create_dot = _create_dot
