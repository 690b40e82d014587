"""Encodes and decodes what the scheduler sends to a gateway.

Most messages have tokens and nothing else: a field that a message does not have costs no time on either side.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from blockyard.contract.codec.messages import MessageCodec
from blockyard.contract.codec.models import TASKS
from blockyard.contract.codec.pooling import join_values, split_values
from blockyard.contract.codec.sampling import (
    decode_reason,
    encode_prompt_logprobs,
    encode_reason,
    join_logprobs,
    split_logprobs,
    split_prompt_logprobs,
)
from blockyard.contract.codec.scheduling import (
    decode_adapter,
    decode_error,
    decode_record,
    encode_adapter,
    encode_error,
    encode_record,
)
from blockyard.contract.sampling import FinishReason, PredictionUsage
from blockyard.contract.scheduling import (
    Acceptance,
    Ending,
    Failure,
    ModelFacts,
    Prefill,
    Progress,
    Readiness,
    Recovery,
    Resumed,
    TokenUpdate,
)
from blockyard.errors import from_status, to_status
from blockyard.scheduler.v1 import scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence


_FACTS = MessageCodec(ModelFacts, scheduler_pb2.ModelFacts, task=TASKS)


def encode_progress(progress: Progress) -> scheduler_pb2.AttachResponse:
    message = _encode_update(progress.update)
    if progress.accepted:
        message.accepted.extend(
            [
                scheduler_pb2.RequestAccepted(request_id=request_id, first_sequence_id=first, handle=handle)
                for handle, first, request_id in progress.accepted
            ]
        )
    if progress.failed:
        message.failed.extend(
            [
                scheduler_pb2.RequestFailed(request_id=request_id, status=to_status(error), handle=handle)
                for handle, error, request_id in progress.failed
            ]
        )
    if progress.resumed:
        message.resumed.extend(map(encode_resumed, progress.resumed))
    if progress.recovered:
        message.recovered.extend(scheduler_pb2.RequestRecovered(**each._asdict()) for each in progress.recovered)
    for request_id, version in progress.weights:
        message.weights.add(request_id=request_id, version=version)
    if progress.facts:
        message.facts.CopyFrom(_FACTS.encode(progress.facts))
    if progress.readiness:
        message.readiness.ready = progress.readiness.ready
        message.readiness.message = progress.readiness.message
        message.readiness.needs_repair = progress.readiness.needs_repair
    if progress.loras is not None:
        message.loras.CopyFrom(scheduler_pb2.LoraAdapters(adapters=map(encode_adapter, progress.loras)))
    return message


def decode_progress(message: scheduler_pb2.AttachResponse) -> Progress:
    """Decodes one message of the scheduler. Slices copy packed columns at once."""
    sequence_ids, token_ids = message.sequence_ids[:], message.token_ids[:]
    if len(message.ListFields()) == bool(sequence_ids) + bool(token_ids):
        # To look at each of the other fields costs more than to read these two.
        return Progress(update=TokenUpdate(sequence_ids, token_ids))
    readiness = message.readiness
    return Progress(
        facts=_FACTS.decode(message.facts) if message.HasField("facts") else None,
        readiness=(
            Readiness(readiness.ready, readiness.message, readiness.needs_repair)
            if message.HasField("readiness")
            else None
        ),
        loras=tuple(map(decode_adapter, message.loras.adapters)) if message.HasField("loras") else None,
        accepted=[Acceptance(each.handle, each.first_sequence_id, each.request_id) for each in message.accepted],
        failed=[Failure(each.handle, from_status(each.status), each.request_id) for each in message.failed],
        resumed=list(map(_decode_resumed, message.resumed)),
        recovered=[
            Recovery(each.request_id, each.cause, each.num_replayed_tokens, each.exact) for each in message.recovered
        ],
        weights=[(each.request_id, each.version) for each in message.weights],
        update=_decode_update(message),
    )


def _encode_update(update: TokenUpdate) -> scheduler_pb2.AttachResponse:
    message = scheduler_pb2.AttachResponse(sequence_ids=update.sequence_ids, token_ids=update.token_ids)
    if update.ended:
        _put_ended(message, update.ended)
    if update.prefilled:
        message.prefilled_sequence_ids.extend([first for first, _ in update.prefilled])
        message.num_cached_tokens.extend([cached for _, cached in update.prefilled])
    if update.logprobs:
        message.logprob_sequence_ids.extend([sequence_id for sequence_id, _ in update.logprobs])
        message.logprobs.CopyFrom(join_logprobs([logprobs for _, logprobs in update.logprobs]))
    for first, piece in update.prompt_logprobs:
        message.prompt_logprobs.append(encode_prompt_logprobs(first, piece))
    if update.pooled:
        message.pooled_sequence_ids.extend([sequence_id for sequence_id, _ in update.pooled])
        sizes, message.pooled_values = join_values([values for _, values in update.pooled])
        message.pooled_sizes.extend(sizes)
    if update.predictions:
        message.predicted_sequence_ids.extend([sequence_id for sequence_id, _ in update.predictions])
        message.num_accepted_predictions.extend([each.num_accepted_tokens for _, each in update.predictions])
        message.num_rejected_predictions.extend([each.num_rejected_tokens for _, each in update.predictions])
    return message


def _decode_update(message: scheduler_pb2.AttachResponse) -> TokenUpdate:
    return TokenUpdate(
        message.sequence_ids[:],
        message.token_ids[:],
        ended=_decode_ended(message),
        prefilled=list(map(Prefill, message.prefilled_sequence_ids, message.num_cached_tokens)),
        logprobs=list(zip(message.logprob_sequence_ids, split_logprobs(message.logprobs), strict=True)),
        prompt_logprobs=[(each.sequence_id, split_prompt_logprobs(each)) for each in message.prompt_logprobs],
        pooled=_decode_pooled(message) if message.pooled_sequence_ids else [],
        predictions=_decode_predictions(message) if message.predicted_sequence_ids else [],
    )


def _decode_predictions(message: scheduler_pb2.AttachResponse) -> list[tuple[int, PredictionUsage]]:
    counts = map(PredictionUsage, message.num_accepted_predictions, message.num_rejected_predictions)
    return list(zip(message.predicted_sequence_ids, counts, strict=True))


def _decode_pooled(message: scheduler_pb2.AttachResponse) -> list[tuple[int, bytes]]:
    values = split_values(message.pooled_sizes, message.pooled_values)
    return list(zip(message.pooled_sequence_ids, values, strict=True))


def _put_ended(message: scheduler_pb2.AttachResponse, ended: Sequence[Ending]) -> None:
    message.finished_sequence_ids.extend([end.sequence_id for end in ended])
    message.finish_reasons.extend([encode_reason(end.reason) for end in ended])
    if any(end.score is not None for end in ended):
        message.finish_scores.extend([math.nan if end.score is None else end.score for end in ended])
    for end in ended:
        if end.error is not None:
            message.sequence_failures.add(sequence_id=end.sequence_id, status=encode_error(end.error))


def _decode_ended(message: scheduler_pb2.AttachResponse) -> list[Ending]:
    scores: Sequence[float | None] = message.finish_scores or [None] * len(message.finish_reasons)
    errors = {failure.sequence_id: decode_error(failure.status) for failure in message.sequence_failures}
    return [
        Ending(
            sequence_id,
            decode_reason(reason) or FinishReason.ERROR,
            None if score is None or math.isnan(score) else score,
            errors.get(sequence_id),
        )
        for sequence_id, reason, score in zip(
            message.finished_sequence_ids, message.finish_reasons, scores, strict=True
        )
    ]


def encode_resumed(resumed: Resumed) -> scheduler_pb2.RequestResumed:
    first = resumed.first_sequence_id
    return scheduler_pb2.RequestResumed(
        handle=resumed.handle,
        submission=resumed.submission,
        first_sequence_id=first,
        sequences=map(encode_record, resumed.sequences),
        num_cached_tokens=resumed.num_cached_tokens,
        prompt_logprobs=[encode_prompt_logprobs(first, piece) for piece in resumed.prompt_logprobs],
    )


def _decode_resumed(message: scheduler_pb2.RequestResumed) -> Resumed:
    return Resumed(
        handle=message.handle,
        submission=message.submission,
        first_sequence_id=message.first_sequence_id,
        sequences=list(map(decode_record, message.sequences)),
        num_cached_tokens=message.num_cached_tokens,
        prompt_logprobs=list(map(split_prompt_logprobs, message.prompt_logprobs)),
    )
