"""Logits of a vocabulary that several ranks hold parts of: brought together where something is chosen from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.collectives import Collectives


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The vocabulary of a network whose ranks hold `rank_tokens` tokens each, the last one perhaps fewer."""

    vocab_size: int
    rank_tokens: int
    collectives: Collectives

    @property
    def first_token(self) -> int:
        """Of this rank."""
        return self.collectives.rank * self.rank_tokens

    def gather(self, logits: Tensor) -> Tensor | None:
        """Returns the logits [R, vocab_size] of all ranks' [R, tokens] at rank 0, None elsewhere."""
        missing = self.rank_tokens - logits.shape[1]
        whole = self.collectives.gather(functional.pad(logits, (0, missing)) if missing else logits)
        return None if whole is None else whole[:, : self.vocab_size].contiguous()
