"""Triton without a GPU: import this before a module of kernels. On a GPU nothing is interpreted.

`tests/conftest.py` decides, before anything can import Triton, which looks at TRITON_INTERPRET when it is imported.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

if TYPE_CHECKING:
    import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _patch_lang_tensor(tensor: Any, scope: Any, plain: Any = interpreter._patch_lang_tensor) -> None:
    """Lets bounds of loops be numbers of a launch: they are arrays of one element, which numpy 2.4 takes no int of."""
    plain(tensor, scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


class _Lasting:
    """What was patched stays: this process interprets all kernels."""

    def restore(self) -> None:
        """Restores nothing."""


@cache
def _patch_language() -> _Lasting:
    """Patches Triton's language once: the interpreter's own goes through all of it at each call of a function."""
    scope = interpreter._LangPatchScope()
    for lang in (tl, tl.core):
        for part in (lang, lang.tensor):
            interpreter._patch_builtin(part, interpreter.interpreter_builder, scope)
        _patch_lang_tensor(lang.tensor, scope)
        interpreter._patch_lang_core(lang, scope)
    for part in (tl.math, tl.core.tensor_descriptor_base):
        interpreter._patch_builtin(part, interpreter.interpreter_builder, scope)
    return _Lasting()


_NUMPY: dict[str, Any] = {}


def _get_np_dtype(kind: Any, plain: Any = interpreter._get_np_dtype) -> Any:
    """Remembers what the interpreter finds in a table that it makes at each call."""
    name = kind.scalar.name
    if name not in _NUMPY:
        _NUMPY[name] = plain(kind)
    return _NUMPY[name]


_TORCH = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def _convert_float(values: Any, from_type: Any, to_type: Any, rounding_mode: Any) -> Any:
    """Rounds to the nearest, to even between two: the interpreter's own makes 64 of 127.9 in 8 bits."""
    bits = torch.from_numpy(np.array(values)).view(_TORCH[from_type.name]).to(_TORCH[to_type.name])
    return bits.view(_BITS[bits.itemsize]).numpy()


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """Adds products one after the other, in float32: a library would take another order for another size of a tile.

    The interpreter's own multiplies the bits of bfloat16 as whole numbers (triton #11584).
    """
    if a.dtype.scalar.is_int():  # has no order
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)).astype(np.int32)
        return interpreter.TensorHandle(d.data + product, d.dtype.scalar)
    left, right, sums = _widen(a), _widen(b), d.data.copy()
    for k in range(left.shape[-1]):
        sums += left[..., k : k + 1] * right[..., k : k + 1, :]
    return interpreter.TensorHandle(sums, d.dtype.scalar)


def _widen(handle: Any) -> Any:
    return _convert_float(handle.data, handle.dtype.scalar, tl.float32, None).view(np.float32)


def _init_tuple_type(self: Any, types: Any, fields: Any = None) -> None:
    """Makes no name, which the interpreter's own makes for the shape of each value, and which few ask for."""
    self.types, self.fields = types, fields or [""] * len(types)


def _name_tuple_type(self: Any) -> str:
    return "[" + ",".join(f"{field}:{kind}" for field, kind in zip(self.fields, self.types, strict=False)) + "]"


if IS_INTERPRETED:
    assert isinstance(tl.zeros, interpreter.InterpretedFunction), "Triton was imported too early"
    interpreter._patch_lang = lambda fn: _patch_language()
    interpreter._get_np_dtype = _get_np_dtype
    interpreter.InterpreterBuilder.create_dot = _create_dot
    interpreter._convert_float = _convert_float
    # It would compute each sum of integers once more, in 64 bits, for an assertion that only `debug` has it make.
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    tl.core.tuple_type.__init__ = _init_tuple_type
    tl.core.tuple_type.name = property(_name_tuple_type)


def reverse_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interprets the programs of a launch last first: no result may depend on an order that a GPU does not keep."""
    builder = interpreter.interpreter_builder

    def set_grid_idx(*place: int) -> None:
        builder.grid_idx = tuple(size - 1 - each for size, each in zip(builder.grid_dim, place, strict=True))

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)
