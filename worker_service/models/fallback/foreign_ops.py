"""Finds torch ops in a network whose results for a row may depend on other rows, and the modules that call them.

These are products, which `Backend.linear` and `Backend.paged_attention` should compute, and functions for which torch
uses another formula at the end of a tensor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType

# Names in ATen, up to the dot.
_PRODUCTS = {
    **dict.fromkeys(("matmul", "linear", "mm", "bmm", "mv", "dot", "vdot"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv"), 1),
}
"""Products, each with the index of its left factor: if that has a single column, nothing is summed."""
_ALWAYS = frozenset(
    (
        *("convolution", "_convolution", "mkldnn_linear", "_grouped_mm", "_scaled_mm", "einsum", "tensordot", "inner"),
        *("silu", "gelu", "sigmoid", "softplus", "mish", "elu", "sinh", "cosh", "glu"),
    )
)
_OWNERS = ("kernels",)


@dataclass(frozen=True, slots=True)
class ForeignOp:
    """An op, and the module that calls it."""

    name: str
    module: nn.Module
    module_name: str

    def __str__(self) -> str:
        return f"{self.name} in {self.module_name} ({type(self.module).__name__})"


class ForeignOps(TorchDispatchMode):
    """Records the foreign ops that a network calls within this context."""

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self._names = names
        self.found: list[ForeignOp] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_")
        if _is_foreign(name, args) and not any(map(_is_owner, _frames())):
            module = next((self_ for self_ in map(_module_of, _frames()) if self_ in self._names), None)
            if module is not None:
                self.found.append(ForeignOp(name, module, self._names[module]))
        return func(*args, **(kwargs or {}))


def _is_foreign(name: str, args: tuple[Any, ...]) -> bool:
    if name in _PRODUCTS:
        return args[_PRODUCTS[name]].shape[-1] > 1
    if name in ("_softmax", "softmax"):
        return args[1] not in (-1, args[0].dim() - 1)
    if name == "rsqrt":
        return args[0].dtype is torch.bfloat16
    return name in _ALWAYS or "scaled_dot_product" in name


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_owner(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _OWNERS


def _module_of(frame: FrameType) -> nn.Module | None:
    own = frame.f_locals.get("self")
    return own if isinstance(own, nn.Module) else None
