"""Batch-invariant versions of torch functions that a network calls directly, not through a module.

torch's own activations use another formula for the last numbers of a tensor
(`blockyard_kernels.reference.elementwise`), and a product with a parameter is not a module that could be replaced.

Also finds torch ops in a network whose results for a row may depend on other rows, and the modules that call them:
products, which `Backend.linear` and `Backend.paged_attention` should compute, and functions for which torch uses
another formula at the end of a tensor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from blockyard_kernels.reference.elementwise import activate
from blockyard_kernels.shapes import Activation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from worker_service.models.fallback.packing import Packer


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

_OWNERS = ("blockyard_kernels",)


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


def _sigmoid(x: Tensor) -> Tensor:
    return (1 / torch.exp(-x.float()).add_(1)).to(x.dtype)


def _silu(x: Tensor, inplace: bool = False) -> Tensor:
    return activate(x, Activation.SILU)


def _gelu(x: Tensor, approximate: str = "none") -> Tensor:
    return activate(x, Activation.GELU_TANH if approximate == "tanh" else Activation.GELU_ERF)


def _softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    scaled = x.float() * beta
    return torch.where(scaled > threshold, x.float(), torch.log1p(torch.exp(scaled)) / beta).to(x.dtype)


def _rsqrt(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float()).to(x.dtype)


_EXACT: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((torch.sigmoid, torch.Tensor.sigmoid, functional.sigmoid), _sigmoid),
    functional.silu: _silu,
    functional.gelu: _gelu,
    functional.softplus: _softplus,
    **dict.fromkeys((torch.rsqrt, torch.Tensor.rsqrt), _rsqrt),
}

_CASTS = (torch.Tensor.to, torch.Tensor.type, torch.Tensor.float)


class ExactFunctions(TorchFunctionMode):
    """Computes activations, and products with parameters of the network, with our ops."""

    def __init__(self, packer: Packer, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._packer = packer
        self._names: dict[int, str] = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters = parameters
        # Casts of parameters. Parameters never change, so each cast is kept and packed once.
        self._casts: dict[tuple[int, torch.dtype], Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (exact := _EXACT.get(func)) is not None:
            return exact(*args, **kwargs)
        if func is functional.linear:
            return self._linear(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _CASTS and (name := self._names.get(id(args[0]))) is not None and isinstance(result, Tensor):
            known = self._casts.setdefault((id(args[0]), result.dtype), result)
            self._names.setdefault(id(known), name)
            return known
        return result

    def _linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        name = self._names.get(id(weight))
        if name is None or (bias is not None and id(bias) not in self._names):
            return functional.linear(rows, weight, bias)
        dtype = str(weight.dtype).removeprefix("torch.")
        packed = self._packer.packed.get(f"{name} ({dtype})") or self._packer.pack(f"{name} ({dtype})", weight, bias)
        backend = self._packer.backend_of(weight.dtype)
        product = backend.linear(rows.reshape(-1, rows.shape[-1]), packed)
        return product.view(*rows.shape[:-1], packed.out_features)


def compute_inside(module: nn.Module, mode: TorchFunctionMode) -> None:
    """Runs a module's computations under a torch function mode."""
    forward = module.forward

    def compute(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    module.forward = compute
