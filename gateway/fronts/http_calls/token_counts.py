"""Counts the tokens that a part of an answer has by itself, for `usage`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.generation import GenerationService


async def token_counter(service: GenerationService, model: str) -> Callable[[str], int]:
    """Returns what counts the tokens of a text, as a model or an adapter has them."""
    tokenizer = await service.find_tokenizer(model)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False)) if text else 0

    return count
