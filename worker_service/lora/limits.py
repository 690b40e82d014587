"""How many LoRA adapters there is room for, and how large they may be. Knows no adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.errors import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_LORAS = 256
MAX_RANK = 512
MAX_CPU_LORAS = 2**16


@dataclass(frozen=True, slots=True)
class LoraLimits:
    """Slots on the device, the largest rank of an adapter, and adapters in the host's cache; 0 slots: no LoRA."""

    max_loras: int = 0
    max_lora_rank: int = 0
    max_cpu_loras: int = 0


NO_LORAS = LoraLimits()


def wrong_limits(limits: LoraLimits) -> Iterable[Violation]:
    """Finds what is wrong with limits that a scheduler asks for."""
    most = {"max_loras": MAX_LORAS, "max_lora_rank": MAX_RANK, "max_cpu_loras": MAX_CPU_LORAS}
    least = {"max_cpu_loras": limits.max_loras}
    for name in most:
        low, high = least.get(name, 1), most[name]
        if not low <= getattr(limits, name) <= high:
            yield Violation(f"lora.{name}", f"must be from {low} to {high}")
