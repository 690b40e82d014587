"""Adds warnings to requests that are not served exactly as asked. `validation` refuses requests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.validation import length_limit

if TYPE_CHECKING:
    from gateway.request import GenerationRequest


def with_clamped_length(request: GenerationRequest, num_prompt_tokens: int, max_model_len: int) -> GenerationRequest:
    """Cuts a max_tokens that does not fit behind the prompt to what fits, with a warning.

    A prompt that leaves no room at all is refused later.
    """
    room, max_tokens = max_model_len - num_prompt_tokens, request.stop.max_tokens
    if max_tokens is None or not 0 < room < max_tokens:
        return request
    warning = (
        f"max_tokens: {room} instead of {max_tokens}, which do not fit behind a prompt of {num_prompt_tokens} tokens. "
        f"{length_limit(max_model_len)}"
    )
    stop = replace(request.stop, max_tokens=room)
    return replace(request, stop=stop, warnings=(*request.warnings, warning))
