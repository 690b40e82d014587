"""Refuses options that cannot be combined with a format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import Reason, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.request import GenerationRequest
    from gateway.text.tokenizer import Tokenizer


def wrong_format(request: GenerationRequest, tokenizer: Tokenizer, model: Tokenizer) -> Iterator[Violation]:
    """Finds what goes against a request's format, or against its grammar.

    Args:
        request: as it came.
        tokenizer: of the request.
        model: that of the model, which workers make masks by.
    """
    if not request.has_form:
        return
    field = (
        "format" if request.format else "sampling.grammar" if request.sampling.grammar else "conversation.tool_choice"
    )
    if request.beam_search is not None:
        yield Violation(field, "is not supported with a beam search", Reason.UNSUPPORTED_PARAMETER)
    if tokenizer.backend is not model.backend:
        description = f"is not supported with {request.model!r}, which has a vocabulary of its own"
        yield Violation(field, description, Reason.UNSUPPORTED_PARAMETER)
    if request.stop.ignore_eos:
        yield Violation("stop.ignore_eos", "is not allowed with a format, which says where the answer ends")
    elif not tokenizer.end_token_ids and not request.stop.stop_token_ids:
        yield Violation(field, "can never end, since the model has no end token: give stop_token_ids")
