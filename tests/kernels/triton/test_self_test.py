"""What a worker asks of freshly compiled kernels before it takes them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

from blockyard_kernels import select
from blockyard_kernels.reference.backend import ReferenceBackend
from tests.kit.kernels.triton_interpreter import DEVICE

from blockyard_kernels.cuda.backend import CudaBackend  # isort: skip
from blockyard_kernels.cuda.self_test import first_difference  # isort: skip

if TYPE_CHECKING:
    from torch import Tensor


class Wrong(CudaBackend):
    """A backend whose compiler made a mistake."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Forgets the last row."""
        result = super().silu_and_mul(gate_up)
        result[-1] = 0
        return result


class Uncompiled(CudaBackend):
    """A backend without a compiler."""

    def rms_norm(self, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Fails."""
        raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize(("invariant", "quantization"), [(True, "none"), (True, "int8"), (False, "fp8")])
def test_right_kernels_pass(invariant: bool, quantization: str):
    backend = CudaBackend(DEVICE, invariant=invariant, quantization=quantization)
    assert select._computes(backend, torch.float32, quantization)
    if quantization != "none":
        # Held to another definition they would not.
        assert first_difference(backend, ReferenceBackend(DEVICE), torch.float32) == "linear"


@pytest.mark.parametrize(
    ("backend", "told"), [(Wrong, "(silu_and_mul)"), (Uncompiled, "(RuntimeError: Failed to find C compiler)")]
)
def test_others_are_told_and_not_taken(backend: type[CudaBackend], told: str, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert not select._computes(backend(DEVICE), torch.float32, "none")
    assert told in caplog.text
