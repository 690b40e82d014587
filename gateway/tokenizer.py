"""The model's tokenizer: text to ids and back, its chat template, its end tokens and generation defaults.

Knows nothing of requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tokenizer:
    """Text to ids and back, as the files of one model say."""

    has_chat_template: bool
    end_token_ids: frozenset[int]
    vocab_size: int
    generation_defaults: dict[str, float]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Turns text into ids; with the model's special tokens (a begin token, say) unless told not to."""
        return []

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Turns ids into text. Ids outside of the vocabulary have no text."""
        return ""

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Renders messages as the prompt that the model was trained on; encode it with add_special_tokens=False.

        Raises BlockyardError: FEATURE_DISABLED when the model has no template, FIELD_INVALID when it refuses.
        """
        return ""
