"""Finds the texts of single tokens, and adds them to log probabilities. Knows no sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.contract.events import TokenLogprobs
from gateway.request import ReturnedLogprob

if TYPE_CHECKING:
    from blockyard.contract.sampling import Candidates
    from gateway.text.detokenizer import DetokenizerFactory


class TokenTexts:
    """Adds the tokens' texts to log probabilities. Caches the text of each token."""

    def __init__(self, detokenizers: DetokenizerFactory, *, skip_special_tokens: bool) -> None:
        self._detokenizers = detokenizers
        self._skip_special_tokens = skip_special_tokens
        self._texts: dict[int, tuple[str, bytes]] = {}

    def of(self, token_id: int) -> tuple[str, bytes]:
        """Returns a token's own text, and the bytes that it adds to the answer's text; see ReturnedLogprob."""
        texts = self._texts.get(token_id)
        if texts is None:
            text = self._detokenizers.bytes_of(token_id, skip_special_tokens=False).decode(errors="replace")
            raw = self._detokenizers.bytes_of(token_id, skip_special_tokens=self._skip_special_tokens)
            texts = self._texts[token_id] = (text, raw)
        return texts

    def logprobs_of(self, candidates: Candidates) -> TokenLogprobs:
        """Returns the log probabilities at one position: of the chosen token and of the likeliest tokens."""
        token_ids, logprobs, ranks = candidates
        chosen, *top = (
            ReturnedLogprob(token_id, text, logprob, rank, raw)
            for token_id, logprob, rank, (text, raw) in zip(
                token_ids, logprobs, ranks, map(self.of, token_ids), strict=True
            )
        )
        return TokenLogprobs(chosen, tuple(top))
