"""Checks a request against the model that is served: its ids, its lengths, its size. Knows no queue and no worker.

A gateway has validated what a client sent; another one may be broken, or of another version. What only workers read,
sampling parameters above all, they check themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from scheduler_service.core.step import MAX_NEW_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scheduler_service.core.values import GroupSpec
    from scheduler_service.gateways.addition import Addition

# Names stand in every log line of a request, and travel to workers.
MAX_NAME_CHARACTERS = 1024
# Each stop token makes every beam propose as many more tokens as there are beams. A gateway lets a client have half of
# these; the others are for the model's own ends.
MAX_BEAM_STOP_IDS = 64


def check_addition(addition: Addition, vocab_size: int) -> None:
    """Raises BlockyardError FIELD_INVALID for a request that no worker could compute, and MESSAGE_TOO_LARGE."""
    if violations := list(_find_violations(addition, vocab_size)):
        raise invalid(violations)
    size = len(addition.spec.payload or b"")
    if size > MAX_NEW_BYTES:
        message = f"the sampling parameters have {size} bytes, and may have at most {MAX_NEW_BYTES}"
        raise BlockyardError(Reason.MESSAGE_TOO_LARGE, message)


def _find_violations(addition: Addition, vocab_size: int) -> Iterator[Violation]:
    spec, adapter = addition.spec, addition.adapter
    for name, text in (("request_id", spec.request_id), ("tenant", spec.tenant)):
        if len(text) > MAX_NAME_CHARACTERS:
            yield Violation(name, f"must be at most {MAX_NAME_CHARACTERS} characters, not {len(text)}")
    below = f"token ids must be below {vocab_size}"
    if max(spec.prompt_token_ids[adapter.num_virtual_tokens if adapter else 0 :], default=0) >= vocab_size:
        yield Violation("prompt_token_ids", below)
    # A model may name ends that its vocabulary does not have, but not as many again.
    if len(spec.stop_token_ids) > 2 * vocab_size:
        yield Violation("stop_token_ids", f"{len(spec.stop_token_ids)} ids of a vocabulary of {vocab_size}")
    if spec.beams and len(spec.stop_token_ids) > MAX_BEAM_STOP_IDS:
        yield Violation("stop_token_ids", f"must have at most {MAX_BEAM_STOP_IDS} entries with a beam search")
    yield from _wrong_outputs(addition, spec, vocab_size)


def _wrong_outputs(addition: Addition, spec: GroupSpec, vocab_size: int) -> Iterator[Violation]:
    records = addition.resubmission.sequences if addition.resubmission else ()
    for index, (token_ids, *_) in enumerate(records):
        name = f"resubmission.sequences[{index}].token_ids"
        if len(token_ids) > spec.max_tokens:
            yield Violation(name, f"{len(token_ids)} ids, and max_tokens is {spec.max_tokens}")
        elif max(token_ids, default=0) >= vocab_size:
            yield Violation(name, f"token ids must be below {vocab_size}")
