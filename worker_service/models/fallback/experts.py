"""Mixtures of experts with our products: each row is multiplied by its experts, and their outputs are added in order.

A row's bits do not depend on the other rows that chose an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from worker_service.models.fallback.attention import IMPLEMENTATION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernels.ops import Backend
    from kernels.packed import PackedLinear


@dataclass(frozen=True, slots=True)
class FallbackExperts:
    """The weights of a layer's experts: up, or gate and up, and down; each in the order of the experts."""

    backend: Backend
    inner: Sequence[PackedLinear]
    outer: Sequence[PackedLinear]


def are_experts(module: nn.Module) -> bool:
    """Returns whether transformers allows another function to compute a module's experts."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate"))


def expert_weights(module: Any) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yields for both products the parameter, the weights [experts, outputs, inputs] and the biases."""
    for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
        weights = getattr(module, name)
        yield (
            name,
            weights.transpose(1, 2) if module.is_transposed else weights,
            getattr(module, f"{name}_bias") if module.has_bias else None,
        )


def compute_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Computes rows [T, hidden] with their chosen experts, `top_k_index` [T, k] -> [T, hidden].

    The outputs of experts are multiplied by `top_k_weights` [T, k] and added in float32; the sum is rounded once.
    """
    if hidden_states.is_meta:
        return torch.empty_like(hidden_states)
    packed: FallbackExperts = module.packed
    backend, num_chosen = packed.backend, top_k_index.shape[1]
    chosen = top_k_index.flatten()
    made = hidden_states.new_empty(len(chosen), packed.outer[0].out_features)
    for expert in chosen.unique().tolist():
        places = (chosen == expert).nonzero()[:, 0]
        inner = backend.linear(hidden_states[places // num_chosen], packed.inner[expert])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        result = backend.linear(inner, packed.outer[expert])
        made[places] = module.post_expert_norm(result) if getattr(module, "has_post_expert_norm", False) else result
    parts = made.view(-1, num_chosen, made.shape[1]).float() * top_k_weights.float()[..., None]
    total = parts[:, 0]
    for rank in range(1, num_chosen):
        total = total + parts[:, rank]
    return total.to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, compute_experts)
