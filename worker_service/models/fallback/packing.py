"""Packs the weights of a network's products, and replaces the modules that multiply by them with our ops.

Each weight is dropped once it is packed, so that memory holds at most one copy of all weights plus the largest weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from blockyard_kernels.invariance import random_numbers
from blockyard_kernels.select import get_backend
from blockyard_kernels.shapes import PLAIN_LINEAR, Activation, LinearSpec
from worker_service.models.fallback.attention import IMPLEMENTATION
from worker_service.models.fallback.fusing import MLP_PARTS, GatedMlp, PartOfProduct, TogetherProduct, find_gated_mlp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.ops import Backend
    from blockyard_kernels.packed import PackedLinear


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

    A row's bits do not depend on the other rows that chose an expert.
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


@dataclass(slots=True)
class Packer:
    """Packs weights, and keeps the packed weights by the names of their modules."""

    backend: Backend
    dtype: torch.dtype
    """The dtype that the model computes in; some models keep some weights in float32."""
    kernels: str
    arena: Arena
    packed: dict[str, PackedLinear] = field(default_factory=dict[str, "PackedLinear"])

    def backend_of(self, dtype: torch.dtype) -> Backend:
        return self.backend if dtype == self.dtype else get_backend(self.backend.device, dtype, self.kernels)

    def pack(self, name: str, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Packs a weight [outputs, inputs] and a bias under a name."""
        rows, added = weight.detach().contiguous(), None if bias is None else bias.detach().clone()
        packed = self.packed[name] = self.backend_of(weight.dtype).pack_linear([rows], added, arena=self.arena)
        return packed

    def pack_joined(self, name: str, modules: Sequence[nn.Module], spec: LinearSpec = PLAIN_LINEAR) -> PackedLinear:
        """Packs the weights of linear layers as one, and drops them."""
        weights = [_weight(module).detach().contiguous() for module in modules]
        biases = [bias.detach() for module in modules if isinstance(bias := module.bias, Tensor)]
        added = torch.cat(biases) if biases else None
        packed = self.backend_of(weights[0].dtype).pack_linear(weights, added, spec, self.arena)
        self.packed[name] = packed
        return packed


class PackedModule(nn.Module):
    """A linear layer computed by `Backend.linear`."""

    def __init__(self, backend: Backend, packed: PackedLinear, dtype: torch.dtype, *, is_head: bool = False) -> None:
        """`is_head`: whether it computes logits, which are float32."""
        super().__init__()
        self.in_features, self.out_features = packed.in_features, packed.out_features
        self._backend = backend
        self._packed = packed
        self._is_head = is_head
        # Some networks read the dtype of a weight. This meta tensor has it; a product with it would fail.
        self.__dict__["weight"] = torch.empty(packed.out_features, packed.in_features, dtype=dtype, device="meta")

    def forward(self, rows: Tensor) -> Tensor:
        """Multiplies [..., inputs] -> [..., outputs]."""
        flat = rows.reshape(-1, self.in_features)
        return self._backend.linear(flat, self._packed, wide=self._is_head).view(*rows.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """An embedding that takes its rows from the packed weight of the head."""

    def __init__(self, backend: Backend, packed: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._backend = backend
        self._packed = packed
        self.__dict__["weight"] = torch.empty(packed.out_features, packed.in_features, dtype=dtype, device="meta")

    def forward(self, token_ids: Tensor) -> Tensor:
        """Takes rows of ids [...] -> [..., width]."""
        rows = self._backend.embedding(token_ids.flatten(), self._packed)
        return rows.view(*token_ids.shape, self._packed.in_features)


@torch.no_grad()
def pack_network(model: nn.Module, head: nn.Module, together: Iterable[Sequence[str]], packer: Packer) -> None:
    """Replaces the modules of a network that multiply, one by one.

    Args:
        model: the network.
        head: the module that computes logits.
        together: groups of names of linear layers that read the same rows, one after another.
        packer: packs and keeps the weights.
    """
    _pack_head(model, head, packer)
    # A list of names, not of modules: a reference to a module would keep its weight alive.
    for name in [name for name, _ in model.named_modules()]:
        module = _find(model, name)
        if module is not None and (activation := find_gated_mlp(module)) is not None:
            _pack_mlp(model, module, name, activation, packer)
    for group in together:
        _pack_together(model, group, packer)
    for name in [name for name, _ in model.named_modules()]:
        module = model.get_submodule(name)
        if are_experts(module):
            _pack_experts(module, name, packer)
        elif type(module) in (nn.Linear, Conv1D):
            _replace(model, name, _pack_linear(module, name, packer))
        elif (norm := find_norm(module, packer.backend, packer.dtype)) is not None:
            _replace(model, name, norm)


def _find(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _pack_head(model: nn.Module, head: nn.Module, packer: Packer) -> None:
    """Packs the head. A tied table is held once if the backend can embed from packed weights.

    An embedding of another class does more than look up rows, so it keeps its own table.
    """
    names = {module: name for name, module in model.named_modules()}
    weight = _weight(head)
    tied = [name for module, name in names.items() if type(module) is nn.Embedding and module.weight is weight]
    replacement = _pack_linear(head, names[head], packer, is_head=True)
    _replace(model, names[head], replacement)
    packed = packer.packed[names[head]]
    for name in tied if packed.is_table else ():
        _replace(model, name, PackedEmbedding(packer.backend_of(weight.dtype), packed, weight.dtype))


def _pack_linear(module: nn.Module, name: str, packer: Packer, *, is_head: bool = False) -> PackedModule:
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    packed = packer.pack(name, weight.t() if isinstance(module, Conv1D) else weight, bias)
    return PackedModule(packer.backend_of(weight.dtype), packed, weight.dtype, is_head=is_head)


def _pack_mlp(model: nn.Module, module: nn.Module, name: str, activation: Activation, packer: Packer) -> None:
    gate, up, down = (module.get_submodule(part) for part in MLP_PARTS)
    dtype = _weight(gate).dtype
    if any(_weight(part).dtype != dtype for part in (up, down)) or _has_bias(gate) != _has_bias(up):
        return
    gate_up = packer.pack_joined(f"{name}.gate_up_proj", (gate, up), LinearSpec(gated=True, activation=activation))
    last = packer.pack_joined(f"{name}.down_proj", (down,))
    _replace(model, name, GatedMlp(packer.backend_of(dtype), gate_up, last))


def _pack_together(model: nn.Module, group: Sequence[str], packer: Packer) -> None:
    """Packs layers as one weight, unless they are packed already or differ in dtype or bias."""
    found = [_find(model, name) for name in group]
    modules = [module for module in found if type(module) is nn.Linear]
    if len(modules) < len(found) or len({(each.weight.dtype, _has_bias(each)) for each in modules}) > 1:
        return
    weights = [torch.empty_like(_weight(module), device="meta") for module in modules]
    backend = packer.backend_of(weights[0].dtype)
    product = TogetherProduct(backend, packer.pack_joined(" + ".join(group), modules))
    start = 0
    for name, weight in zip(group, weights, strict=True):
        place = start, start + len(weight)
        _replace(model, name, PartOfProduct(product, place, weight, is_last=name == group[-1]))
        start = place[1]


def _has_bias(module: nn.Module) -> bool:
    return isinstance(module.bias, Tensor)


def _weight(module: nn.Module) -> Tensor:
    assert isinstance(module.weight, Tensor)
    return module.weight


def _pack_experts(module: nn.Module, name: str, packer: Packer) -> None:
    dtype, packed = packer.dtype, list[list["PackedLinear"]]()
    for which, weights, biases in expert_weights(module):
        dtype = weights.dtype
        packed.append(
            [
                packer.pack(f"{name}.{which}.{index}", weight, None if biases is None else biases[index])
                for index, weight in enumerate(weights)
            ]
        )
        for parameter in (which, f"{which}_bias"):
            if getattr(module, parameter, None) is not None:
                setattr(module, parameter, None)
    module.__dict__["packed"] = FallbackExperts(packer.backend_of(dtype), *packed)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    module.train(False)
    setattr(model.get_submodule(parent), own, module)
