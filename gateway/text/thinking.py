"""Prepares the limit of a request's reasoning. The worker keeps to it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.text.answer_parsing import end_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.sampling import ThinkingTokens
    from gateway.request import GenerationRequest
    from gateway.text.tokenizer import Tokenizer

_UNLIMITED = "reasoning is not limited"
UNKNOWN_REASONING = f"thinking_token_budget: it is not known how this model writes reasoning. Its {_UNLIMITED}"
NO_END_TOKEN = (
    f"thinking_token_budget: this model ends reasoning with a text, and only a single token can be forced. Its "
    f"{_UNLIMITED}"
)


def with_thinking(
    request: GenerationRequest, prompt_token_ids: Sequence[int], tokenizer: Tokenizer
) -> GenerationRequest:
    """Adds the tokens by which the worker follows the reasoning to a request that has a budget, or a warning.

    A model that does not reason, or not after this prompt, needs no limit.
    """
    tokens, warning = _tokens_of(request, prompt_token_ids, tokenizer)
    warnings = (*request.warnings, warning) if warning else request.warnings
    return replace(request, sampling=replace(request.sampling, thinking_tokens=tokens), warnings=warnings)


def _tokens_of(
    request: GenerationRequest, prompt_token_ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[ThinkingTokens | None, str]:
    """Returns the tokens of a request's reasoning, or None, with a warning if its reasoning cannot be followed."""
    if tokenizer.dialect is None:
        return None, UNKNOWN_REASONING
    reasoning = tokenizer.dialect.reasoning
    if reasoning is None or (request.has_form and request.parsing is None):
        return None, ""
    end = end_of(prompt_token_ids, tokenizer)
    is_open = end.endswith(reasoning.begins)
    if not is_open and (end.endswith(reasoning.ends) or not tokenizer.shows_reasoning):
        return None, ""
    tokens = tokenizer.thinking_tokens
    return (None, NO_END_TOKEN) if tokens is None else (replace(tokens, is_open=is_open), "")
