"""An adapter in the host's cache. Knows no files and no slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.lora import PackedLora


@dataclass(frozen=True, slots=True)
class LoraRequest:
    """An adapter that a scheduler asks for: its number, its name, where it lies, and the most tokens beside it."""

    lora_id: int
    name: str
    path: str
    long_lora_max_len: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter that was read: its factors for each site of the network (None: left as it is), and facts."""

    request: LoraRequest
    rank: int
    targets: tuple[str, ...]
    digest: str
    factors: tuple[PackedLora | None, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(factors.num_bytes for factors in self.factors if factors is not None)
