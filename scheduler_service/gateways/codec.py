"""Decodes the requests that gateways add, and refuses what no gateway should send or the model could not compute.

A gateway has validated what a client sent; another one may be broken, or of another version. What only workers read,
sampling parameters above all, they check themselves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from blockyard.contract.codec import scheduling
from blockyard.contract.codec.messages import decode_seconds
from blockyard.contract.codec.sampling import decode_beams
from blockyard.contract.codec.trace import decode_trace_context
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.lora.virtual_tokens import MAX_VIRTUAL_TOKENS, virtual_ids
from blockyard.paths import wrong_name, wrong_path
from blockyard.scheduler.v1 import scheduler_pb2
from scheduler_service.core.step import MAX_NEW_BYTES
from scheduler_service.core.values import GroupSpec, LoraSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.contract.scheduling import Adapter, Resubmission

# A tenant's name has 64 characters, and a request's id 128 beside it and what a gateway adds.
MAX_ID_CHARACTERS = 512
# Names stand in every log line of a request, and travel to workers.
MAX_NAME_CHARACTERS = 1024
# Each stop token makes every beam propose as many more tokens as there are beams. A gateway lets a client have half of
# these; the others are for the model's own ends.
MAX_BEAM_STOP_IDS = 64
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Addition:
    """A request that a gateway adds, as the scheduler plans by it. Has no generated code.

    `submission`: the bytes that the gateway sent, for whoever resumes the request. `age_seconds`: how long ago the
    request reached its gateway.
    """

    spec: GroupSpec
    handle: int
    digest: bytes
    submission: bytes
    max_queue_seconds: float | None = None
    remaining_seconds: float | None = None
    resubmission: Resubmission | None = None
    age_seconds: float = 0.0
    adapter: Adapter | None = None
    fails_on_update: bool = False


def parse_submission(encoded: bytes) -> scheduler_pb2.Submission:
    """Parses a request; raises FIELD_INVALID for bytes that are no Submission."""
    try:
        return scheduler_pb2.Submission.FromString(encoded)
    except DecodeError:
        raise invalid([Violation("submission", "must be a serialized Submission")]) from None


def decode_add(message: scheduler_pb2.AddRequest, submission: scheduler_pb2.Submission, owner: str) -> Addition:
    """Decodes a request of `owner`; raises FIELD_INVALID for what no gateway should send."""
    if violations := [*_find_violations(submission), *_find_violations_of_record(message, submission)]:
        raise invalid(violations)
    adapter = decode_adapter(submission.lora) if submission.HasField("lora") else None
    return Addition(
        spec=_decode_group(submission, owner, adapter),
        handle=message.handle,
        digest=submission.digest,
        submission=message.submission,
        max_queue_seconds=decode_seconds(submission, "max_queue_time"),
        remaining_seconds=decode_seconds(submission, "remaining_time"),
        resubmission=(
            scheduling.decode_resubmission(message.resubmission) if message.HasField("resubmission") else None
        ),
        # A gateway's clock may be ahead.
        age_seconds=max(message.age.ToNanoseconds() / 1e9, 0.0),
        adapter=adapter,
        fails_on_update=submission.fails_on_update,
    )


def _find_violations(submission: scheduler_pb2.Submission) -> list[Violation]:
    pools = bool(submission.pooling)
    needed = ("request_id", "prompt_token_ids", "n") if pools else ("request_id", "prompt_token_ids", "n", "max_tokens")
    violations = [Violation(name, "must be set") for name in needed if not getattr(submission, name)]
    if pools and (submission.n > 1 or submission.max_tokens or submission.HasField("beam_search")):
        violations.append(Violation("pooling", "needs n = 1, max_tokens = 0 and no beam_search"))
    if not isfinite(submission.beam_search.length_penalty):
        violations.append(Violation("beam_search.length_penalty", "must be a finite number"))
    too_long = [name for name in ("request_id", "tenant") if len(getattr(submission, name)) > MAX_ID_CHARACTERS]
    return violations + [Violation(name, f"must have at most {MAX_ID_CHARACTERS} characters") for name in too_long]


def _find_violations_of_record(
    message: scheduler_pb2.AddRequest, submission: scheduler_pb2.Submission
) -> list[Violation]:
    num_sequences = len(message.resubmission.sequences)
    if message.HasField("resubmission") and num_sequences != submission.n:
        return [
            Violation(
                "resubmission.sequences",
                f"must have {submission.n} entries, one for each of the n sequences, not {num_sequences}",
            )
        ]
    return []


def decode_adapter(message: scheduler_pb2.LoraAdapter) -> Adapter:
    """Decodes an adapter that a gateway knows; raises FIELD_INVALID for one that no scheduler makes."""
    if not (message.lora_id and message.name and message.path and _DIGEST.fullmatch(message.digest)):
        raise invalid([Violation("lora", "must have a lora_id, a name, a path and a digest")])
    if wrong := wrong_name(message.name) or wrong_path(message.path):
        raise invalid([Violation("lora", f"the adapter's name or path {wrong}")])
    if message.num_virtual_tokens > MAX_VIRTUAL_TOKENS:
        raise invalid([Violation("lora.num_virtual_tokens", f"must be at most {MAX_VIRTUAL_TOKENS}")])
    return scheduling.decode_adapter(message)


def _decode_group(message: scheduler_pb2.Submission, owner: str, adapter: Adapter | None) -> GroupSpec:
    virtual = virtual_ids(adapter.num_virtual_tokens) if adapter else ()
    return GroupSpec(
        request_id=message.request_id,
        owner=owner,
        prompt_token_ids=[*virtual, *message.prompt_token_ids[:]],
        n=message.n,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        payload=message.sampling,
        computes_prompt=message.computes_whole_prompt,
        tenant=message.tenant,
        priority=message.priority,
        beams=decode_beams(message.beam_search) if message.HasField("beam_search") else None,
        trace_context=decode_trace_context(message.trace_context) if message.HasField("trace_context") else None,
        lora=LoraSpec(adapter.lora_id, bytes.fromhex(adapter.digest), adapter.name) if adapter else None,
        pooling=message.pooling or None,
        cache_salt=message.cache_salt,
    )


def check_addition(addition: Addition, vocab_size: int) -> None:
    """Raises BlockyardError FIELD_INVALID for a request that no worker could compute, and MESSAGE_TOO_LARGE."""
    if violations := list(_find_violations_of_model(addition, vocab_size)):
        raise invalid(violations)
    size = len(addition.spec.payload or b"")
    if size > MAX_NEW_BYTES:
        message = f"the sampling parameters have {size} bytes; at most {MAX_NEW_BYTES} are allowed"
        raise BlockyardError(Reason.MESSAGE_TOO_LARGE, message)


def _find_violations_of_model(addition: Addition, vocab_size: int) -> Iterator[Violation]:
    spec, adapter = addition.spec, addition.adapter
    for name, text in (("request_id", spec.request_id), ("tenant", spec.tenant)):
        if len(text) > MAX_NAME_CHARACTERS:
            yield Violation(name, f"must be at most {MAX_NAME_CHARACTERS} characters, not {len(text)}")
    below = f"token ids must be below {vocab_size}"
    if max(spec.prompt_token_ids[adapter.num_virtual_tokens if adapter else 0 :], default=0) >= vocab_size:
        yield Violation("prompt_token_ids", below)
    # A model may name ends that its vocabulary does not have, but not as many again.
    if len(spec.stop_token_ids) > 2 * vocab_size:
        yield Violation("stop_token_ids", f"must be at most {2 * vocab_size} ids, not {len(spec.stop_token_ids)}")
    if spec.beams and len(spec.stop_token_ids) > MAX_BEAM_STOP_IDS:
        yield Violation("stop_token_ids", f"must be at most {MAX_BEAM_STOP_IDS} ids with a beam search")
    yield from _wrong_outputs(addition, spec, vocab_size)


def _wrong_outputs(addition: Addition, spec: GroupSpec, vocab_size: int) -> Iterator[Violation]:
    records = addition.resubmission.sequences if addition.resubmission else ()
    for index, (token_ids, *_) in enumerate(records):
        name = f"resubmission.sequences[{index}].token_ids"
        if len(token_ids) > spec.max_tokens:
            yield Violation(name, f"must be at most {spec.max_tokens} ids (max_tokens), not {len(token_ids)}")
        elif max(token_ids, default=0) >= vocab_size:
            yield Violation(name, f"token ids must be below {vocab_size}")
