"""Logits of a vocabulary that several ranks hold parts of: brought together where something is chosen from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

from blockyard.model_config.parallel_sizes import vocabulary_share

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.collectives import Collectives


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The vocabulary of a network whose ranks hold equal shares of it, the last one perhaps less."""

    vocab_size: int
    collectives: Collectives

    @property
    def first_token(self) -> int:
        return self.collectives.rank * self._rank_tokens

    @property
    def _rank_tokens(self) -> int:
        return vocabulary_share(self.vocab_size, self.collectives.size)

    def gather(self, logits: Tensor) -> Tensor | None:
        """Returns the logits [R, vocab_size] of all ranks' [R, tokens] at rank 0, None elsewhere."""
        if self.collectives.size == 1:
            return logits
        missing = self._rank_tokens - logits.shape[1]
        whole = self.collectives.gather(functional.pad(logits, (0, missing)) if missing else logits)
        return None if whole is None else whole[:, : self.vocab_size].contiguous()
