"""Decodes steps into values with numpy columns, and encodes their answers. The rest of the worker knows no messages.

`blockyard.contract.codec` decodes and encodes the messages that the worker and the scheduler share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from google.protobuf.message import DecodeError, Message

from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.contract.codec.pooling import decode_pooling
from blockyard.contract.codec.sampling import decode_sampling
from blockyard.contract.codec.trace import decode_trace_context
from blockyard.contract.sampling import SamplingParams
from blockyard.errors import BlockyardError, Violation, invalid, to_status
from blockyard.worker.v1 import worker_pb2
from worker_service.step import (
    DEFAULT_TIMEOUT_SECONDS,
    MAX_VIOLATIONS,
    NO_IDS,
    NO_PAIRS,
    BlockPairs,
    ForkedRow,
    NewRow,
    Step,
    StepOutput,
    StepTimes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.internal.containers import RepeatedScalarFieldContainer

    from blockyard.contract.pooling import Pooling
    from worker_service.step import Array, Logprobs

# Fields of _ROWS have at most as many entries as a step has rows. Fields of _LISTS may have twice as many, since a row
# may be freed and used again in one step.
_ROWS = (
    "sequence_ids",
    "num_new_tokens",
    "input_sequence_ids",
    "input_token_ids",
    "activated_lora_slots",
    "activated_lora_ids",
    "max_draft_tokens",
)
_LISTS = ("new_sequences", "forks", "replaced_tables")
_LONG = {"finished_sequence_ids": 2**20, "draft_prices": 2**10}
# Limits of several times the limits that gateways set for a request.
_LISTS_OF_SAMPLING = {"bad_token_sequences": 2**14, "logit_bias": 2**16}
PairsField = Literal["blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy"]


def decode_step(message: worker_pb2.ExecuteModelRequest, max_num_seqs: int = 2**16) -> Step:
    """Decodes a step, and checks only its size: a step of more than `max_num_seqs` rows is refused without decoding.

    Decoding it would block the event loop.
    """
    if max(len(message.sequence_ids), len(message.num_new_tokens)) > max_num_seqs:
        return _too_large(message, max_num_seqs)
    epoch, step_id = message.epoch, message.step_id
    sequence_ids, num_new_tokens = tuple(message.sequence_ids[:]), _decode_column(message.num_new_tokens)
    quiet, has_timeout = message.quiet, message.HasField("step_timeout")
    timeout_seconds = message.step_timeout.ToNanoseconds() / 1e9 if has_timeout else DEFAULT_TIMEOUT_SECONDS
    num_read = sum(map(bool, (epoch, step_id, sequence_ids, len(num_new_tokens), quiet, has_timeout)))
    if len(message.ListFields()) == num_read:
        # Most steps have only these fields. Reading the other fields would take longer than reading these.
        return Step(
            epoch,
            step_id,
            sequence_ids=sequence_ids,
            num_new_tokens=num_new_tokens,
            quiet=quiet,
            timeout_seconds=timeout_seconds,
        )
    if _find_too_large(message, max_num_seqs):
        return _too_large(message, max_num_seqs)
    return Step(
        epoch=epoch,
        step_id=step_id,
        new_sequences=tuple(map(_decode_new_row, message.new_sequences)),
        forks=tuple(
            ForkedRow(
                f.parent_sequence_id,
                f.child_sequence_id,
                f.sequence_index,
                _decode_column(f.block_ids),
                _decode_column(f.fixed_block_ids),
            )
            for f in message.forks
        ),
        sequence_ids=sequence_ids,
        num_new_tokens=num_new_tokens,
        appended_sequence_ids=tuple(message.appended_sequence_ids[:]),
        appended_block_ids=_decode_column(message.appended_block_ids),
        replaced_tables=tuple((t.sequence_id, _decode_column(t.block_ids)) for t in message.replaced_tables),
        blocks_to_swap_out=_decode_pairs(message, "blocks_to_swap_out"),
        blocks_to_swap_in=_decode_pairs(message, "blocks_to_swap_in"),
        blocks_to_copy=_decode_pairs(message, "blocks_to_copy"),
        finished_sequence_ids=tuple(message.finished_sequence_ids[:]),
        input_sequence_ids=tuple(message.input_sequence_ids[:]),
        input_token_ids=_decode_column(message.input_token_ids),
        quiet=quiet,
        ids_from_scheduler=message.ids_from_scheduler,
        timeout_seconds=timeout_seconds,
        activated_lora_slots=_decode_column(message.activated_lora_slots),
        activated_lora_ids=_decode_column(message.activated_lora_ids),
        max_draft_tokens=_decode_column(message.max_draft_tokens),
        draft_prices=_decode_column(message.draft_prices),
        replaced_fixed_tables=tuple(
            (t.sequence_id, _decode_column(t.fixed_block_ids)) for t in message.replaced_tables if t.fixed_block_ids
        ),
    )


def _too_large(message: worker_pb2.ExecuteModelRequest, max_num_seqs: int) -> Step:
    error = invalid(_find_too_large(message, max_num_seqs)[:MAX_VIOLATIONS])
    return Step(message.epoch, message.step_id, decode_error=error)


def _find_too_large(message: worker_pb2.ExecuteModelRequest, max_num_seqs: int) -> list[Violation]:
    most_of = dict.fromkeys(_ROWS, max_num_seqs) | dict.fromkeys(_LISTS, 2 * max_num_seqs) | _LONG
    return _find_long(message, most_of)


def _find_long(message: Message, most_of: Mapping[str, int], prefix: str = "") -> list[Violation]:
    sizes = [(name, len(getattr(message, name)), most) for name, most in most_of.items()]
    return [
        Violation(prefix + name, f"{size} entries, at most {most} are allowed")
        for name, size, most in sizes
        if size > most
    ]


def _decode_column(numbers: RepeatedScalarFieldContainer[int]) -> Array:
    # A slice copies the numbers in one call. An empty array would cost as much as a filled one, so NO_IDS is shared.
    return np.array(numbers[:], np.int64) if numbers else NO_IDS


def _decode_pairs(message: worker_pb2.ExecuteModelRequest, field: PairsField) -> BlockPairs:
    if not message.HasField(field):
        return NO_PAIRS
    pairs: worker_pb2.BlockPairs = getattr(message, field)
    return BlockPairs(_decode_column(pairs.sources), _decode_column(pairs.destinations))


def _decode_new_row(message: worker_pb2.NewSequence) -> NewRow:
    sampling, pooling, rejection = SamplingParams(), None, None
    try:
        sampling, pooling = _decode_sampling(message), _decode_pooling(message)
    except BlockyardError as error:
        rejection = error
    return NewRow(
        sequence_id=message.sequence_id,
        sequence_index=message.sequence_index,
        token_ids=np.array(message.token_ids, np.int64),
        prompt_length=message.prompt_length,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=np.array(message.block_ids, np.int64),
        sampling=sampling,
        rejection=rejection,
        has_sampling=message.HasField("sampling_params"),
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        num_beam_candidates=message.num_beam_candidates,
        trace_context=decode_trace_context(message.trace_context) if message.HasField("trace_context") else None,
        request_id=message.request_id,
        lora_id=message.lora_id,
        max_length=message.max_length,
        pooling=pooling,
        fixed_block_ids=_decode_column(message.fixed_block_ids),
    )


def _decode_sampling(message: worker_pb2.NewSequence) -> SamplingParams:
    """Decodes sampling parameters; raises BlockyardError FIELD_INVALID if they are too large or malformed."""
    try:
        params = sampling_pb2.SamplingParams.FromString(message.sampling_params)
    except DecodeError:
        raise invalid([Violation("sampling", "cannot be parsed: is the scheduler of another version?")]) from None
    if too_long := _find_long(params, _LISTS_OF_SAMPLING, "sampling."):
        raise invalid(too_long)
    return decode_sampling(params)


def _decode_pooling(message: worker_pb2.NewSequence) -> Pooling | None:
    """Decodes pooling parameters; raises BlockyardError FIELD_INVALID if they are malformed."""
    if not message.HasField("pooling_params"):
        return None
    try:
        return decode_pooling(pooling_pb2.Pooling.FromString(message.pooling_params))
    except DecodeError:
        raise invalid([Violation("pooling", "cannot be parsed: is the scheduler of another version?")]) from None


def encode_result(result: StepOutput) -> worker_pb2.ExecuteModelResponse:
    message = worker_pb2.ExecuteModelResponse(
        epoch=result.epoch,
        step_id=result.step_id,
        sequence_ids=result.sequence_ids,
        token_ids=result.token_ids,
        skipped_sequence_ids=result.skipped_sequence_ids,
        draining=result.draining,
        input_digest=result.digests[0],
        output_digest=result.digests[1],
        num_tokens=result.num_tokens,
        num_draft_tokens=result.num_draft_tokens,
        num_accepted_tokens=result.num_accepted_tokens,
        num_forced_tokens=result.num_forced_tokens,
        num_accepted_forced_tokens=result.num_accepted_forced_tokens,
    )
    if result.predictions:
        ids, drafted, accepted = zip(*result.predictions, strict=True)
        message.predicted_sequence_ids.extend(ids)
        message.num_predicted_tokens.extend(drafted)
        message.num_accepted_predicted_tokens.extend(accepted)
    for sequence_id, error in result.failures:
        message.failures.add(sequence_id=sequence_id, status=to_status(error))
    if result.refusal is not None:
        message.refusal.CopyFrom(to_status(result.refusal))
    if result.logprob_sequence_ids:
        message.logprob_sequence_ids.extend(result.logprob_sequence_ids)
        message.logprobs.CopyFrom(_encode_logprobs(result.logprobs))
    for part in result.prompt_logprobs:
        message.prompt_logprobs.add(
            sequence_id=part.sequence_id,
            first_position=part.first_position,
            logprobs=_encode_logprobs(part.logprobs),
        )
    if result.beam_sequence_ids:
        message.beam_sequence_ids.extend(result.beam_sequence_ids)
        message.beam_candidates.CopyFrom(_encode_logprobs(result.beam_candidates))
    if result.pooled.sequence_ids:
        message.pooled_sequence_ids.extend(result.pooled.sequence_ids)
        message.pooled_sizes.extend(map(len, result.pooled.values))
        message.pooled_values = np.concatenate(result.pooled.values).astype("<f4", copy=False).tobytes()
    _encode_times(result.times, message.times)
    return message


def _encode_logprobs(logprobs: Logprobs) -> sampling_pb2.Logprobs:
    return sampling_pb2.Logprobs(
        num_candidates=logprobs.num_candidates.tolist(),
        token_ids=logprobs.token_ids.tolist(),
        logprobs=logprobs.logprobs.tolist(),
        ranks=logprobs.ranks.tolist(),
    )


def _encode_times(times: StepTimes, message: worker_pb2.StepTimes) -> None:
    _encode_duration(times.queue_seconds, message.queue)
    _encode_duration(times.forward_seconds, message.forward)
    _encode_duration(times.sample_seconds, message.sample)
    if times.cache_operations_seconds:
        _encode_duration(times.cache_operations_seconds, message.cache_operations)


def _encode_duration(seconds: float, message: Duration) -> None:
    # A Duration's own method also checks its argument, which costs three times as much.
    message.seconds, message.nanos = divmod(int(seconds * 1e9), 10**9)
