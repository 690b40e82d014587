"""Pooling heads: linear layers over the pooled row, or the logits of chosen tokens. Knows no files."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.contract.pooling import PoolingKind
from blockyard.model_config.pooling.rule import Finish, PoolingRule
from blockyard_kernels.shapes import AS_THEY_ARE, Activation, LinearSpec, LogitTransform

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from blockyard_kernels.ops import Backend
    from blockyard_kernels.packed import PackedLinear

# The most sets of label tokens whose rows of the table stay packed.
MAX_TOKEN_SETS = 16


@dataclass(frozen=True, slots=True, eq=False)
class PoolingHead:
    """The weights of a pooling rule."""

    rule: PoolingRule
    products: tuple[PackedLinear, ...] = ()
    norms: tuple[Tensor | None, ...] = ()
    """The weight, float32, of the layer norm after each product; None: no norm."""
    table: Tensor | None = None
    """[vocabulary, hidden_size]: the head's row of each token, only for LABEL_LOGITS."""
    logits: LogitTransform = AS_THEY_ARE
    owns_table: bool = False
    """Whether the table is separate from the embedding."""
    _packed: OrderedDict[tuple[int, ...], PackedLinear] = field(
        default_factory=OrderedDict[tuple[int, ...], "PackedLinear"], repr=False
    )

    @property
    def own_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are not weights of a product."""
        table = self.table if self.owns_table else None
        return tuple(tensor for tensor in (table, *self.norms) if tensor is not None)

    def multiply(self, backend: Backend, rows: Tensor) -> Tensor:
        """Computes the products of pooled rows [n, hidden_size], in the products' dtype -> [n, width] float32."""
        for product, norm, dense in zip(self.products, self.norms, self.rule.products, strict=True):
            is_wide = dense is self.rule.products[-1] and dense.activation is None
            rows = backend.linear(rows, product, wide=is_wide)
            if norm is not None:
                rows = backend.layer_norm(rows, norm, None, dense.norm_epsilon)[0]
        return rows.float()

    def label_logits(self, backend: Backend, rows: Tensor, token_ids: tuple[int, ...]) -> Tensor:
        """Computes the logits of some tokens [n, tokens] float32 of rows [n, hidden_size]."""
        packed = self._packed.get(token_ids)
        if packed is None:
            assert self.table is not None
            ids = torch.tensor(token_ids, device=self.table.device)
            packed = backend.pack_linear(self.table.index_select(0, ids), spec=LinearSpec(logits=self.logits))
            self._packed[token_ids] = packed
            if len(self._packed) > MAX_TOKEN_SETS:
                self._packed.popitem(last=False)
        return backend.linear(rows, packed, wide=True)

    def forget(self) -> None:
        """Drops the packed rows of the table, after its numbers have changed."""
        self._packed.clear()


def read_products(
    rule: PoolingRule,
    read: Callable[..., Tensor],
    pack: Callable[[Sequence[Tensor], Tensor | None, LinearSpec], PackedLinear],
    read_norm: Callable[[str, int, torch.dtype], Tensor],
) -> PoolingHead:
    """Reads the products of a pooling rule, and the norms after them.

    Args:
        rule: the model's pooling rule.
        read: reads a tensor by its name and its sizes.
        pack: packs weights [rows, in_features] in parts with a bias.
        read_norm: reads the weight of a norm by its name, its width and its dtype.
    """
    products, norms = list["PackedLinear"](), list["Tensor | None"]()
    for dense in rule.products:
        weight = read(f"{dense.name}.weight", dense.out_features, dense.in_features)
        bias = read(f"{dense.name}.bias", dense.out_features).clone() if dense.has_bias else None
        activation = Activation(dense.activation.value) if dense.activation else None
        products.append(pack([weight], bias, LinearSpec(activation=activation)))
        norms.append(read_norm(f"{dense.norm}.weight", dense.out_features, torch.float32) if dense.norm else None)
    return PoolingHead(rule, tuple(products), tuple(norms))


def finish(rule: PoolingRule, numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Turns a sequence's numbers [labels] into probabilities: in float64, one by one, so alike on every machine."""
    kind = Finish.SOFTMAX if rule.kind is PoolingKind.LABEL_LOGITS else rule.finish
    values = numbers.tolist()
    if kind is Finish.SIGMOID:
        values = [_sigmoid(value) for value in values]
    elif kind is Finish.SOFTMAX:
        weights = [math.exp(value - max(values)) for value in values]
        values = [weight / sum(weights) for weight in weights]
    return np.array(values, np.float32)


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    power = math.exp(value)
    return power / (1 + power)
