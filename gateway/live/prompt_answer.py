"""Joins the log probabilities of a prompt from the pieces of several prefills. Knows no sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.contract.events import PromptLogprobs, TokenLogprobs

if TYPE_CHECKING:
    from blockyard.contract.logprobs import Candidates, PromptPiece
    from gateway.text.token_texts import TokenTexts


class PromptAnswer:
    """Collects pieces in any order, also repeated ones, and makes one event when all are there."""

    def __init__(self, num_prompt_tokens: int, texts: TokenTexts, num_virtual_tokens: int = 0) -> None:
        """`num_virtual_tokens`: tokens before the prompt, which count in the pieces' positions."""
        # The first token has no log probabilities.
        self._first_position = num_virtual_tokens + 1
        self._entries: list[Candidates | None] = [None] * (num_prompt_tokens - 1)
        self._texts = texts

    def add(self, piece: PromptPiece) -> None:
        start = piece.first_position - self._first_position
        self._entries[start : start + len(piece.candidates)] = piece.candidates

    def make_event(self) -> PromptLogprobs | None:
        """Makes the event with the whole prompt's log probabilities; None while some are missing."""
        known = [entry for entry in self._entries if entry is not None]
        if len(known) < len(self._entries):
            return None
        return PromptLogprobs((TokenLogprobs(None), *map(self._texts.logprobs_of, known)))
