"""What Llama's network lacks, captured: a replay gives the bits of the ops one by one, and what its logits tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from blockyard_kernels.capture import CaptureSizes, StepInputs
from blockyard_kernels.ops import kv_pool_shape
from blockyard_kernels.shapes import Activation, AttentionShape, LinearSpec, LogitTransform, QueryKeyNorms
from tests.kit.kernels.backends import COMPILED, Kernels
from tests.kit.kernels.random_tensors import random

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.capture import CapturedStep
    from blockyard_kernels.ops import AttentionBatch
    from blockyard_kernels.packed import PackedLinear

HIDDEN, VOCAB_SIZE, BLOCK_SIZE, LAYERS = 48, 90, 16, 2
SHAPE = AttentionShape(4, 2, 24, 0.2, softcap=3.0)
ROTATED = 16
SIZES = CaptureSizes(max_num_tokens=64, max_num_seqs=4, block_size=BLOCK_SIZE)
for_compiled = pytest.mark.parametrize("kernels", COMPILED, ids=str)


@dataclass
class Network:
    """Norms of every kind, sums of every kind, activations, a part of a head rotated, caps and sinks."""

    kernels: Kernels

    def __post_init__(self) -> None:
        dtype, width = self.kernels.dtype, SHAPE.num_heads * SHAPE.head_dim
        self.table, self.positions = random(VOCAB_SIZE, HIDDEN, dtype=dtype), random(64, HIDDEN, dtype=dtype, seed=1)
        self.rotary = random(64, 2 * ROTATED, dtype=dtype, seed=2)
        self.wide, self.bias = random(HIDDEN, seed=3), random(HIDDEN, seed=4)
        self.qk = QueryKeyNorms(random(width, seed=5), random(width // 2, seed=6), 1e-5, are_of_whole_rows=True)
        self.sinks = random(SHAPE.num_heads, seed=7)
        self.qkv = self.pack(2 * width, HIDDEN, 8)
        self.output = self.pack(HIDDEN, width, 9)
        self.inner = self.pack(80, HIDDEN, 10, activation=Activation.GELU_ERF)
        self.gated = self.pack(160, HIDDEN, 11, activation=Activation.GELU_TANH, gated=True)
        self.down = self.pack(HIDDEN, 80, 12)
        self.head = self.pack(VOCAB_SIZE, HIDDEN, 13, logits=LogitTransform(0.7, 2.0))
        shape = kv_pool_shape(12, LAYERS, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim)
        self.pools = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)]

    def pack(
        self,
        num_rows: int,
        width: int,
        seed: int,
        *,
        gated: bool = False,
        activation: Activation | None = None,
        logits: LogitTransform | None = None,
    ) -> PackedLinear:
        weight = (random(num_rows, width, seed=seed) * width**-0.5).to(self.kernels.dtype)
        bias = random(num_rows, dtype=self.kernels.dtype, seed=seed)
        return self.kernels.backend.pack_linear(
            weight, bias, LinearSpec(gated=gated, activation=activation, logits=logits or LogitTransform())
        )

    def forward(self, token_ids: Tensor, batch: AttentionBatch, pool: Tensor) -> Tensor:
        backend = self.kernels.backend
        rotary = backend.embedding(batch.positions, self.rotary).view(-1, 2, ROTATED)
        hidden = backend.add(
            backend.embedding(batch.positions, self.positions), backend.embedding(token_ids, self.table, scale=3.5), 0.5
        )
        for layer in range(LAYERS):
            normed, _ = backend.layer_norm(hidden, self.wide, self.bias, 1e-5)
            qkv = backend.linear(normed, self.qkv)
            query = backend.rotary_and_cache(qkv, rotary if layer else None, batch, pool, layer, SHAPE, self.qk)
            attended = backend.paged_attention(query, batch, pool, layer, SHAPE, sinks=self.sinks if layer else None)
            total = backend.add_normed(backend.linear(attended, self.output), self.wide, 1e-5, hidden, 0.3)
            fed = backend.linear(backend.linear(total, self.inner), self.down)
            normed, total = backend.rms_norm(fed, None, 1e-5, total, 0.3)
            hidden = backend.add(backend.linear(backend.linear(normed, self.gated), self.down), total)
        return backend.layer_norm(hidden, None, None, 1e-5)[0]

    def capture(self, head: PackedLinear) -> CapturedStep:
        captured = self.kernels.backend.capture(lambda ids, batch: self.forward(ids, batch, self.pools[0]), head, SIZES)
        assert captured is not None
        return captured

    def compute(self, step: StepInputs, head: PackedLinear) -> Tensor:
        """Op by op, in the other pool."""
        backend = self.kernels.backend
        batch = backend.plan_attention(step.num_new_tokens, step.seq_lens, step.block_tables, BLOCK_SIZE)
        hidden = self.forward(torch.from_numpy(step.token_ids), batch, self.pools[1])
        return backend.linear(hidden[torch.from_numpy(step.chosen)], head, wide=True)


def make_step(new: list[int], lens: list[int], chosen: list[int]) -> StepInputs:
    """Sequence i has the blocks 4 i, 4 i + 1, …"""
    tables = np.arange(4 * len(new), dtype=np.int32).reshape(len(new), 4)
    token_ids = np.random.default_rng(sum(new)).integers(0, VOCAB_SIZE, sum(new))
    return StepInputs(np.array(new, np.int64), np.array(lens, np.int64), tables, token_ids, np.array(chosen, np.int64))


STEPS = [make_step([40, 17, 1], [40, 17, 1], [39, 56, 57]), make_step([1, 5, 1], [41, 22, 2], [0, 3, 5, 6])]


@for_compiled
def test_a_replay_gives_the_bits_of_the_ops_one_by_one(kernels: Kernels):
    network = Network(kernels)
    captured = network.capture(network.head)
    for step in STEPS:
        expected = network.compute(step, network.head)
        outputs = captured.replay(step, with_logits=True)
        assert outputs.logits is not None
        assert torch.equal(outputs.logits, expected)
        assert expected.isfinite().all()
        assert (expected.abs() <= 2).all()
        torch.testing.assert_close(network.pools[0], network.pools[1], rtol=0, atol=0, equal_nan=True)


@for_compiled
@pytest.mark.parametrize(
    "transform", [LogitTransform(-1.0), LogitTransform(0.5, 2.0), LogitTransform(1e5, 2.0)], ids=str
)
def test_the_best_token_is_that_of_the_logits_as_they_are_told(transform: LogitTransform, kernels: Kernels):
    """After the bias, the scale and the cap, which makes many of them equal: then the lowest id wins."""
    network, step = Network(kernels), STEPS[0]
    head = network.pack(VOCAB_SIZE, HIDDEN, 14, logits=transform)
    captured = network.capture(head)
    for num_threads in (3, 1):
        kernels.backend.set_num_threads(num_threads)
        outputs = captured.replay(step, with_logits=True)
        assert outputs.logits is not None
        assert torch.equal(outputs.logits, network.compute(step, head))
        assert outputs.best.tolist() == outputs.logits.argmax(1).tolist()
        assert outputs.best.tolist() == captured.replay(step, with_logits=False).best.tolist()
        assert outputs.best_values is not None
        assert outputs.best_values.tolist() == outputs.logits.amax(1).tolist()
    if transform.scale > 1:
        assert ((outputs.logits == 2).sum(1) > 5).all()
