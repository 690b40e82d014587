"""Replaces norms by our op if it gives the module's results in a trial with its weights: a name proves nothing."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kernels.invariance import random_numbers

if TYPE_CHECKING:
    from kernels.ops import Backend

NUM_ROWS = 7
# The largest error, in units of the dtype's precision, relative to the largest number.
TOLERANCE = 2.0


class ExactNorm(nn.Module):
    """An RMS norm computed by `Backend.rms_norm`."""

    def __init__(self, backend: Backend, weight: Tensor, epsilon: float) -> None:
        """`weight`: [width], as in `Backend.rms_norm`."""
        super().__init__()
        self._backend = backend
        self._epsilon = epsilon
        self._held = weight

    @property
    def weight(self) -> Tensor:
        return self._held

    def forward(self, rows: Tensor) -> Tensor:
        """Normalises [..., width]."""
        flat = rows.reshape(-1, rows.shape[-1])
        return self._backend.rms_norm(flat, self._held, self._epsilon)[0].view(rows.shape)


@torch.no_grad()
def find_norm(module: nn.Module, backend: Backend, dtype: torch.dtype) -> ExactNorm | None:
    """Returns an `ExactNorm` with the results of a module; None if no such norm gives them."""
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    weight = tensors.get("weight")
    if "Norm" not in type(module).__name__ or weight is None or len(tensors) > 1 or weight.dim() != 1:
        return None
    epsilon = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
    if not isinstance(epsilon, float) or len(list(module.children())):
        return None
    rows = random_numbers(NUM_ROWS, len(weight), seed=2).to(dtype).to(weight.device)
    try:
        expected = module(rows)
    except (RuntimeError, TypeError):
        return None
    if not isinstance(expected, Tensor) or expected.dtype != dtype:
        return None
    wide = weight.detach().float()
    forms = (weight.detach().clone(), wide.clone(), 1.0 + wide)
    tried = [ExactNorm(backend, form, epsilon) for form in forms if form.dtype in (dtype, torch.float32)]
    errors = [float((norm(rows) - expected).abs().max()) for norm in tried]
    best = min(range(len(tried)), key=errors.__getitem__)
    allowed = TOLERANCE * torch.finfo(dtype).eps * float(expected.abs().max())
    return tried[best] if errors[best] <= allowed else None
