"""An adapter, as the scheduler and its workers know it. Knows no messages."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.core.values import LoraSpec


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that requests may name. Two with one `lora_id` are one.

    Attributes:
        lora_id: from 1 on, and never used again.
        name: as requests have it.
        path: its folder on the workers' machines.
        digest: SHA-256 of its content, in hex; empty before a worker has read it.
        rank, targets, num_bytes: as the workers found them; 0 and empty where it is not known.
        pinned: it stays in the workers' caches.
        num_virtual_tokens: of a soft prompt, which has no rank and no targets; 0: it is none.
    """

    lora_id: int
    name: str
    path: str
    digest: str = ""
    rank: int = 0
    targets: tuple[str, ...] = ()
    num_bytes: int = 0
    pinned: bool = False
    num_virtual_tokens: int = 0

    @property
    def spec(self) -> LoraSpec:
        """What the core must know of it."""
        return LoraSpec(self.lora_id, bytes.fromhex(self.digest), self.name)
