"""The parts of an adapter's factors that a rank needs for each weight of a network.

A packed weight may hold several modules of a checkpoint (q, k and v). Their factors are joined: the second factor is
block-diagonal, with zeros between the modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from worker_service.models.decoder import DecoderModel
    from worker_service.models.projections import Projection


def join_factors(projection: Projection, factors: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """Joins the factors of some modules, each (A [rank, in], B [out, rank]); None if no module has factors."""
    found = [(module, *factors[module.name]) for module in projection.modules if module.name in factors]
    if not found:
        return None
    width = sum(len(inner) for _, inner, _ in found)
    num_rows = [module.num_rows for module in projection.modules]
    expand = found[0][2].new_zeros(sum(num_rows), width)
    column = 0
    for module, inner, outer in found:
        row = sum(num_rows[: projection.modules.index(module)])
        expand[row : row + module.num_rows, column : column + len(inner)] = module.take(outer)
        column += len(inner)
    return torch.cat([inner[:, module.columns] for module, inner, _ in found]), expand


def find_sites(model: DecoderModel) -> tuple[Projection, ...]:
    """Lists the weights of a rank's layers."""
    return tuple(projection for layer in model.layers for projection in layer.projections)


def module_shapes(model: DecoderModel) -> dict[str, tuple[int, int]]:
    """Returns inputs and outputs of every module of the whole network that adapters may change."""
    first = model.layers[0]
    prefix = model.names.layer(model.share.layers.start)
    shapes = {
        module.name.removeprefix(prefix): (module.in_features, module.out_features)
        for projection in first.projections
        for module in projection.modules
    }
    numbers = range(model.config.num_layers)
    return {model.names.layer(number) + name: shape for number in numbers for name, shape in shapes.items()}
