"""Routing and experts, op by op: against a naive version in float64, and what decides between equal ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from blockyard_kernels.cpu.backend import CpuBackend
from blockyard_kernels.mixture.ops import ExpertShape, ExpertWeights, Router
from blockyard_kernels.reference.int8 import linear_int8
from blockyard_kernels.shapes import Activation
from tests.kit.kernels.backends import BEST, REFERENCE, Kernels
from tests.kit.kernels.random_tensors import random

NUM_EXPERTS, TOP_K, WIDTH, INNER = 6, 3, 48, 40
ALL = [Kernels(name, dtype) for name in (REFERENCE, BEST) for dtype in (torch.float32, torch.bfloat16)]
SHAPE = ExpertShape(NUM_EXPERTS, Activation.SILU)
for_all = pytest.mark.parametrize("kernels", ALL, ids=str)


@dataclass
class Mixture:
    """Experts with biases, and a router with one."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        def numbers(*shape: int, seed: int) -> Tensor:
            return (random(*shape, seed=seed) * shape[-1] ** -0.5).to(self.dtype)

        self.router, self.router_bias = numbers(NUM_EXPERTS, WIDTH, seed=1), numbers(NUM_EXPERTS, seed=2)
        self.experts = [
            ExpertWeights(
                [numbers(INNER, WIDTH, seed=10 * e + 3), numbers(INNER, WIDTH, seed=10 * e + 4)],
                numbers(2 * INNER, seed=10 * e + 5),
                numbers(WIDTH, INNER, seed=10 * e + 6),
                numbers(WIDTH, seed=10 * e + 7),
            )
            for e in range(NUM_EXPERTS)
        ]

    def route(self, hidden: Tensor, renormalises: bool) -> tuple[Tensor, Tensor]:
        """Naively, in float64."""
        logits = hidden.double() @ self.router.double().T + self.router_bias.double()
        chosen, ids = logits.topk(TOP_K)
        weights = chosen.softmax(1) if renormalises else logits.softmax(1).gather(1, ids)
        return ids, weights

    def expert(self, number: int, row: Tensor, limit: float) -> Tensor:
        weights = self.experts[number]
        assert weights.gate_up_bias is not None
        assert weights.down_bias is not None
        gate, up = (torch.cat(list(weights.gate_up)).double() @ row + weights.gate_up_bias.double()).chunk(2)
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            inner = torch.nn.functional.silu(gate) * up
        return weights.down.double() @ inner + weights.down_bias.double()

    def compute(self, hidden: Tensor, renormalises: bool, limit: float) -> Tensor:
        ids, weights = self.route(hidden, renormalises)
        rows = [
            sum(w * self.expert(int(e), row.double(), limit) for e, w in zip(*each, strict=True))
            for row, *each in zip(hidden, ids, weights, strict=True)
        ]
        return torch.stack([row for row in rows if isinstance(row, Tensor)])


def compute(kernels: Kernels, mixture: Mixture, hidden: Tensor, router: Router, shape: ExpertShape) -> Tensor:
    ops = kernels.backend.mixture
    assert ops is not None
    ids, weights = ops.route(hidden, ops.pack_router(mixture.router, mixture.router_bias), router)
    return ops.experts(hidden, ids, weights, ops.pack_experts(iter(mixture.experts), shape))


@for_all
@pytest.mark.parametrize(("renormalises", "limit"), [(True, 0.0), (False, 0.0), (True, 0.3)])
def test_a_mixture_is_what_it_is_said_to_be(kernels: Kernels, renormalises: bool, limit: float) -> None:
    mixture, hidden = Mixture(kernels.dtype), random(9, WIDTH, dtype=kernels.dtype, seed=8)
    router, shape = Router(TOP_K, renormalises), replace(SHAPE, limit=limit)
    got, expected = compute(kernels, mixture, hidden, router, shape), mixture.compute(hidden, renormalises, limit)
    tolerance = 1e-5 if kernels.dtype is torch.float32 else 1e-2
    assert (got.double() - expected).abs().max() <= tolerance * expected.abs().max()
    # The same is not so of another weighting, nor of others' limits.
    for others in ((not renormalises, limit), (renormalises, 0.2)):
        assert (mixture.compute(hidden, *others) - expected).abs().max() > 3 * tolerance * expected.abs().max()
    assert torch.equal(compute(kernels, mixture, hidden[4:5], router, shape)[0], got[4])
    doubled = compute(kernels, mixture, hidden, replace(router, scale=2.0), shape)
    assert torch.equal(doubled.float(), 2 * got.float())


@for_all
def test_equal_logits_choose_the_first_and_what_is_no_number_is_told(kernels: Kernels) -> None:
    ops = kernels.backend.mixture
    assert ops is not None
    hidden = torch.ones(1, WIDTH, dtype=kernels.dtype)
    bias = torch.tensor([0.0, 2, -1, 2, 2, 1])
    zeros = torch.zeros(6, WIDTH, dtype=kernels.dtype)
    packed = ops.pack_router(zeros, bias.to(kernels.dtype))
    ids, weights = ops.route(hidden, packed, Router(4, renormalises=True))
    assert ids.tolist() == [[1, 3, 4, 5]]
    torch.testing.assert_close(weights, bias[ids.long()].softmax(1))
    bias[2] = torch.nan
    ids, weights = ops.route(hidden, ops.pack_router(zeros, bias.to(kernels.dtype)), Router(4, renormalises=True))
    assert ids.tolist() == [[2, 1, 3, 4]]
    assert weights.isnan().all()


@for_all
@pytest.mark.parametrize("renormalises", [True, False])
def test_sigmoids_weigh_what_a_bias_may_choose(kernels: Kernels, renormalises: bool) -> None:
    ops, mixture, hidden = (
        kernels.backend.mixture,
        Mixture(kernels.dtype),
        random(9, WIDTH, dtype=kernels.dtype, seed=8),
    )
    assert ops is not None
    packed, bias = ops.pack_router(mixture.router, mixture.router_bias), 2 * random(NUM_EXPERTS, seed=5)
    scores = (hidden.double() @ mixture.router.double().T + mixture.router_bias.double()).sigmoid()
    for choice_bias in (None, bias):
        router = Router(TOP_K, renormalises, scale=1.3, is_sigmoid=True, choice_bias=choice_bias)
        ids, weights = ops.route(hidden, packed, router)
        expected = (scores if choice_bias is None else scores + choice_bias.double()).topk(TOP_K).indices
        assert torch.equal(ids.long(), expected)
        chosen = scores.gather(1, expected)
        total = chosen.sum(1, keepdim=True) + 1e-6 if renormalises else 1.0
        torch.testing.assert_close(weights.double(), chosen / total * 1.3, rtol=1e-5, atol=1e-6)
        alone = ops.route(hidden[4:5], packed, router)
        assert torch.equal(alone[0][0], ids[4])
        assert torch.equal(alone[1][0], weights[4])
    bias[2] = torch.nan
    ids, weights = ops.route(hidden, packed, replace(router, choice_bias=bias))
    assert (ids[:, 0] == 2).all()


@for_all
def test_the_sum_goes_in_the_order_of_ranks(kernels: Kernels) -> None:
    """Numbers whose sum another order would round otherwise."""
    ops, dtype = kernels.backend.mixture, kernels.dtype
    assert ops is not None
    identity, zero = torch.eye(2, dtype=dtype), torch.zeros(2, 2, dtype=dtype)
    biases = (2.0**24, 1.0, -(2.0**24), 1.0)
    made = [ExpertWeights([identity, identity], None, zero, torch.full((2,), bias, dtype=dtype)) for bias in biases]
    packed = ops.pack_experts(iter(made), ExpertShape(4, Activation.SILU))
    rows, ones = torch.ones(2, 2, dtype=dtype), torch.ones(2, 4)
    ids = torch.tensor([[0, 1, 2, 3], [0, 2, 1, 3]], dtype=torch.int32)
    assert ops.experts(rows, ids, ones, packed).tolist() == [[1.0, 1.0], [2.0, 2.0]]


def test_experts_are_quantized_as_other_weights_and_routers_are_not() -> None:
    dtype = torch.float32
    backend, mixture = CpuBackend(dtype, BEST, "int8"), Mixture(dtype)
    hidden, ops = random(40, WIDTH, seed=8), backend.mixture
    ids, weights = ops.route(hidden, ops.pack_router(mixture.router, mixture.router_bias), Router(TOP_K, True))
    expected_ids, expected_weights = mixture.route(hidden, renormalises=True)
    assert torch.equal(ids.long(), expected_ids)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-5)
    got = ops.experts(hidden, ids, weights, ops.pack_experts(iter(mixture.experts), SHAPE))
    expected = torch.zeros_like(hidden)
    for row, (row_ids, row_weights) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for number, weight in zip(row_ids, row_weights, strict=True):
            made = mixture.experts[number]
            gate, up = linear_int8(hidden[row : row + 1], torch.cat(list(made.gate_up)), made.gate_up_bias).chunk(2, 1)
            inner = gate / (1 + torch.exp(-gate)) * up
            expected[row] += weight * linear_int8(inner, made.down, made.down_bias)[0]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
