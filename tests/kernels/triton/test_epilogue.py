"""What becomes of products' sums in Triton: activations, gates, and what is done with logits, by every way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockyard_kernels.cuda.backend import CudaBackend
from blockyard_kernels.cuda.epilogue import Epilogue, finish
from blockyard_kernels.cuda.gemm import multiply
from blockyard_kernels.cuda.linear import CudaLinear, Method, Way
from blockyard_kernels.reference import elementwise as reference
from blockyard_kernels.reference.backend import ReferenceBackend
from blockyard_kernels.shapes import Activation, LinearSpec, LogitTransform
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.triton_interpreter import DEVICE, DTYPES, IS_INTERPRETED

ACTIVATIONS = list(Activation)
TRANSFORMS = [LogitTransform(-0.7), LogitTransform(0.5, 2.0), LogitTransform(softcap=30.0)]
EPILOGUES = [
    *(Epilogue(activation=activation) for activation in ACTIVATIONS),
    *(Epilogue(gated=True, activation=activation) for activation in ACTIVATIONS),
    *(Epilogue(logits=transform) for transform in TRANSFORMS),
]
for_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2.4e-2}


def define(sums: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """In float64, but for what the reference has in float32."""
    assert epilogue.activation is not None
    if not epilogue.gated:
        return reference.activate(sums, epilogue.activation)
    gate, up = sums.chunk(2, dim=1)
    return reference.activate(gate, epilogue.activation) * up


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_the_definitions(activation: Activation):
    sums = torch.linspace(-12, 12, 3000, dtype=torch.float64)[None]
    for gated in (False, True):
        epilogue = Epilogue(gated, activation)
        got = finish(sums.float().to(DEVICE), None, dtype=torch.float32, epilogue=epilogue).cpu()
        torch.testing.assert_close(got.double(), define(sums, epilogue), rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("activation", [each for each in ACTIVATIONS if each is not Activation.TANH])
def test_activations_at_the_ends_of_their_range(activation: Activation):
    x = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 9984.0, torch.nan, torch.inf]])
    got = finish(x.to(DEVICE), None, dtype=torch.float32, epilogue=Epilogue(activation=activation)).cpu()[0]
    square = activation is Activation.RELU2
    assert got[2:5].tolist() == ([0, 1e4, 9984.0**2] if square else [0, 100, 9984])
    assert (got[:2].double().abs() < 1e-30).all()
    assert got.isnan().tolist() == [False] * 5 + [True, False]
    assert got[6] == torch.inf


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_logits_are_transformed_as_defined(transform: LogitTransform):
    sums = torch.cat([torch.linspace(-90, 90, 3000), torch.tensor([1e30, -1e30, torch.nan])])[None]
    got = finish(sums.to(DEVICE), None, dtype=torch.float32, epilogue=Epilogue(logits=transform)).cpu()
    expected = reference.transform_logits(sums.double(), transform)
    largest = float(expected[0, :-3].abs().max())
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=3e-7 * largest, equal_nan=True)
    if transform.softcap:
        # Equal logits are equal: then the lowest id is the best.
        assert got[0, -3] == transform.softcap == -got[0, -2]
    assert not torch.allclose(got[0, :-3], sums[0, :-3], rtol=1e-3), "it is done at all"


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_products_end_as_sums_do(epilogue: Epilogue):
    rows, weight, bias = (tensor.to(DEVICE) for tensor in (random(5, 24), random(20, 24, seed=1), random(20, seed=2)))
    got = multiply(rows, weight, bias, epilogue=epilogue)
    sums = multiply(rows, weight, dtype=torch.float32)
    expected = finish(sums, bias, dtype=torch.float32, epilogue=epilogue)
    near = 0 if IS_INTERPRETED else 1e-5
    torch.testing.assert_close(got, expected, rtol=near, atol=near)


@for_dtypes
@pytest.mark.parametrize("way", [Method.LIBRARY, Method.TILED])
def test_a_backend_ends_products_as_the_reference_does(way: Method, dtype: torch.dtype):
    backend, truth = CudaBackend(DEVICE), ReferenceBackend(torch.device("cpu"))
    rows, weight, bias = random(3, 24, dtype=dtype), random(20, 24, seed=1) * 24**-0.5, random(20, seed=2)
    for epilogue in (*EPILOGUES[1:10:4], EPILOGUES[-2]):
        kind: dict[str, Any] = {"gated": epilogue.gated, "activation": epilogue.activation, "logits": epilogue.logits}
        is_wide = not epilogue.logits.is_idle
        # A library on a processor gives no float32 of shorter numbers.
        if is_wide and way is Method.LIBRARY and IS_INTERPRETED and dtype is not torch.float32:
            continue
        packed = backend.pack_linear(weight.to(DEVICE, dtype), bias.to(DEVICE, dtype), LinearSpec(**kind))
        assert isinstance(packed, CudaLinear)
        packed.way = Way(way)
        got = backend.linear(rows.to(DEVICE), packed, wide=is_wide).cpu()
        same = truth.pack_linear(weight.to(dtype).float(), bias.to(dtype).float(), LinearSpec(**kind))
        expected = truth.linear(rows.float(), same, wide=is_wide)
        assert got.dtype == (torch.float32 if is_wide else dtype)
        torch.testing.assert_close(got.float(), expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
        if is_wide:
            # Only logits are.
            plain = backend.linear(rows.to(DEVICE), packed).cpu()
            assert not torch.allclose(plain.float(), got, rtol=0.1)
