"""Batch-invariant versions of torch functions that a network calls directly, not through a module.

torch's own activations use another formula for the last numbers of a tensor (`kernels.reference.elementwise`), and a
product with a parameter is not a module that could be replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kernels.reference.elementwise import activate
from kernels.shapes import Activation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from worker_service.models.fallback.packing import Packer


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
