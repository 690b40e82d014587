"""The weights of a network that adapters may change, and what of an adapter's factors a rank needs for each.

A packed weight holds several modules of a checkpoint (q, k and v): the factors of these are joined, with zeros where
one module's numbers meet another's rows. Knows names and shapes, and no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from blockyard.model_config.share import Share
    from kernels.ops import PackedLinear
    from worker_service.models.decoder import DecoderModel
    from worker_service.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Module:
    """A linear module of a checkpoint: its name, and the rows and columns of it that this rank has."""

    name: str
    rows: slice
    columns: slice


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A packed weight, and the modules whose rows it holds, in order."""

    packed: PackedLinear
    modules: tuple[Module, ...]

    def join(self, factors: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
        """Joins the factors of some modules, each (A [rank, in], B [out, rank]); None: none is of this weight."""
        found = [(module, *factors[module.name]) for module in self.modules if module.name in factors]
        if not found:
            return None
        width = sum(len(inner) for _, inner, _ in found)
        num_rows = [module.rows.stop - module.rows.start for module in self.modules]
        expand = found[0][2].new_zeros(sum(num_rows), width)
        column = 0
        for module, inner, outer in found:
            row = sum(num_rows[: self.modules.index(module)])
            expand[row : row + outer[module.rows].shape[0], column : column + len(inner)] = outer[module.rows]
            column += len(inner)
        return torch.cat([inner[:, module.columns] for module, inner, _ in found]), expand


def find_sites(model: DecoderModel) -> tuple[Site, ...]:
    """Lists the weights of a rank's layers."""
    numbers = model.share.layers
    return tuple(
        site
        for number, layer in zip(numbers, model.layers, strict=True)
        for site in _sites(f"model.layers.{number}.", layer.linears, model.config, model.share)
    )


def module_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of every module of the whole network that adapters may change."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {
        "self_attn.q_proj": (hidden, heads),
        "self_attn.k_proj": (hidden, kv_heads),
        "self_attn.v_proj": (hidden, kv_heads),
        "self_attn.o_proj": (heads, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    return {f"model.layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in shapes.items()}


def _sites(prefix: str, linears: Sequence[PackedLinear], config: ModelConfig, share: Share) -> Iterator[Site]:
    dim = config.head_dim
    heads = slice(share.heads.start * dim, share.heads.stop * dim)
    kv_heads = slice(share.kv_heads.start * dim, share.kv_heads.stop * dim)
    inner, whole = slice(share.mlp.start, share.mlp.stop), slice(0, config.hidden_size)
    outputs = (
        {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads, "self_attn.v_proj": kv_heads},
        {"self_attn.o_proj": whole},
        {"mlp.gate_proj": inner, "mlp.up_proj": inner},
        {"mlp.down_proj": whole},
    )
    for packed, parts, columns in zip(linears, outputs, (whole, heads, whole, inner), strict=True):
        yield Site(packed, tuple(Module(prefix + name, rows, columns) for name, rows in parts.items()))
