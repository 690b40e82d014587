"""The attention function that transformers' layers call: our paged attention, over the pool of the step.

Layers find the function by its name. The code that runs a network sets the handler of its calls with `attending`: a
survey records the calls, a step computes them.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from torch import Tensor, nn

    from blockyard_kernels.ops import AttentionBatch, Backend
    from blockyard_kernels.shapes import AttentionShape

IMPLEMENTATION = "blockyard"
"""The name under which transformers finds our attention and our experts."""


class Attends(Protocol):
    """A handler of the attention calls of all layers."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, given: Mapping[str, Any]
    ) -> Tensor:
        """Attends queries [1, H, T, D] to keys and values [1, K, T, D] -> [1, T, H, D]; `given`: other keywords."""
        ...


class _Calls(threading.local):
    """The current handler of this thread's attention calls."""

    taker: Attends | None = None


_calls = _Calls()


@contextmanager
def attending(taker: Attends) -> Generator[None]:
    """Lets `taker` handle this thread's attention calls within the context."""
    before, _calls.taker = _calls.taker, taker
    try:
        yield
    finally:
        _calls.taker = before


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **given: Any
) -> tuple[Tensor, None]:
    """Passes a layer's call to the current handler; see `transformers.AttentionInterface`."""
    assert _calls.taker is not None, "a network runs outside of `attending`"
    return _calls.taker.attend(module, query, key, value, attention_mask, given), None


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)


@dataclass(frozen=True, slots=True)
class Site:
    """The attention of one layer: its place in the pool, its heads, and the keys that a query sees (None: all)."""

    layer: int
    shape: AttentionShape
    window: int | None


@dataclass(frozen=True, slots=True)
class StepAttention:
    backend: Backend
    batch: AttentionBatch
    kv_pool: Tensor
    sites: Mapping[nn.Module, Site]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, given: Mapping[str, Any]
    ) -> Tensor:
        """Writes keys and values to their slots, and attends."""
        site, backend = self.sites[module], self.backend
        heads = torch.cat([query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)], dim=2)
        num_rows = heads.shape[1]
        rows = backend.rotary_and_cache(
            heads.view(num_rows, -1), None, self.batch, self.kv_pool, site.layer, site.shape
        )
        sinks: Tensor | None = given.get("s_aux")
        attended = backend.paged_attention(
            rows,
            self.batch,
            self.kv_pool,
            site.layer,
            site.shape,
            site.window,
            None if sinks is None else sinks.float().contiguous(),
        )
        return attended.view(1, num_rows, site.shape.num_heads, site.shape.head_dim)
