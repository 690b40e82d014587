"""A vocabulary that is sharded over ranks, whose logits are gathered where a token is chosen."""

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
    """A vocabulary of which all ranks hold equal shares; only the last share may be smaller."""

    vocab_size: int
    collectives: Collectives

    @property
    def first_token(self) -> int:
        """The first token of this rank's share."""
        return self.collectives.rank * self._rank_tokens

    @property
    def _rank_tokens(self) -> int:
        return vocabulary_share(self.vocab_size, self.collectives.size)

    def gather(self, logits: Tensor) -> Tensor | None:
        """Gathers all ranks' logits [R, tokens] to [R, vocab_size] at rank 0; returns None at other ranks."""
        if self.collectives.size == 1:
            return logits
        missing = self._rank_tokens - logits.shape[1]
        whole = self.collectives.gather(functional.pad(logits, (0, missing)) if missing else logits)
        return None if whole is None else whole[:, : self.vocab_size].contiguous()
