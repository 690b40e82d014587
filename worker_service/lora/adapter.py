"""An adapter in the host's cache. Knows no files and no slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.lora import PackedLora


@dataclass(frozen=True, slots=True)
class LoraRequest:
    """An adapter that a scheduler requests: its id, name and folder."""

    lora_id: int
    name: str
    path: str


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """A loaded adapter: its factors for each site of the network (None: the adapter does not change it), and facts.

    A soft prompt has no factors but `num_virtual_tokens`; its rows [num_virtual_tokens, hidden_size] are None if
    another stage has the embedding.
    """

    request: LoraRequest
    rank: int
    targets: tuple[str, ...]
    digest: str
    factors: tuple[PackedLora | None, ...] = ()
    num_virtual_tokens: int = 0
    prompt: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        num_bytes = sum(factors.num_bytes for factors in self.factors if factors is not None)
        return num_bytes + (0 if self.prompt is None else self.prompt.nbytes)
