"""Encodes steps for workers and decodes their answers. `blockyard.contract.codec` has a worker's lifecycle.

A message never travels deeper than this module, and each value of a worker's answer is checked here (`answer_checks`).
Whole columns go into constructors and come out of slices, since setting or reading single numbers is what costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.codec.scheduling import decode_error
from blockyard.contract.codec.trace import encode_trace_context
from blockyard.contract.codec.worker_info import encode_duration
from blockyard.errors import BlockyardError, Reason, from_status
from blockyard.worker.v1 import worker_pb2
from scheduler_service.core.values import BlockPair, NewSequence, SchedulerOutput, StepResult
from scheduler_service.replicas.steps.answer_checks import (
    AnswerLimits,
    check_distinct,
    check_drafts,
    check_rows,
    check_sampled,
    check_seconds,
    check_sources,
    require,
)
from scheduler_service.replicas.steps.answer_columns import (
    decode_candidates,
    decode_logprobs,
    decode_pooled,
    decode_prompts,
    has_candidates,
    has_logprobs,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.duration_pb2 import Duration

    from blockyard.contract.parallel import ParallelSizes
    from blockyard.google_rpc import status_pb2 as rpc_status_pb2


def encode_step(output: SchedulerOutput, epoch: int) -> worker_pb2.ExecuteModelRequest:
    """Encodes one step. A group's payload is its sampling parameters, serialized, which pass through unread."""
    input_sequence_ids, input_token_ids = zip(*output.input_ids, strict=True) if output.input_ids else ((), ())
    return worker_pb2.ExecuteModelRequest(
        epoch=epoch,
        step_id=output.step_id,
        new_sequences=[_encode_new_sequence(sequence) for sequence in output.new_sequences],
        forks=[
            worker_pb2.Fork(
                parent_sequence_id=fork.parent_id,
                child_sequence_id=fork.child_id,
                sequence_index=fork.sequence_index,
                block_ids=fork.block_ids,
                fixed_block_ids=fork.fixed_block_ids,
            )
            for fork in output.forks
        ],
        sequence_ids=output.sequence_ids,
        num_new_tokens=output.num_new_tokens,
        appended_sequence_ids=output.appended_sequence_ids,
        appended_block_ids=output.appended_block_ids,
        replaced_tables=_encode_tables(output) if output.replaced_tables else (),
        blocks_to_swap_out=_encode_pairs(output.blocks_to_swap_out),
        blocks_to_swap_in=_encode_pairs(output.blocks_to_swap_in),
        blocks_to_copy=_encode_pairs(output.blocks_to_copy),
        finished_sequence_ids=output.finished_sequence_ids,
        input_sequence_ids=input_sequence_ids,
        input_token_ids=input_token_ids,
        activated_lora_slots=[slot for slot, _ in output.activated_loras],
        activated_lora_ids=[lora_id for _, lora_id in output.activated_loras],
        max_draft_tokens=output.max_draft_tokens,
        draft_prices=output.draft_prices,
    )


def encode_group_step(
    output: SchedulerOutput, epoch: int, parallel: ParallelSizes, timeout_seconds: float, *, is_quiet: bool
) -> bytes:
    """Encodes one step for all ranks of a group; `is_quiet`: only the sampling rank answers it."""
    message = encode_step(output, epoch)
    message.step_timeout.CopyFrom(encode_duration(timeout_seconds))
    message.quiet = is_quiet
    if parallel.pipeline_parallel_size > 1:
        message.ids_from_scheduler = output.step_id == 1
    return message.SerializeToString()


def _encode_new_sequence(sequence: NewSequence) -> worker_pb2.NewSequence:
    return worker_pb2.NewSequence(
        sequence_id=sequence.sequence_id,
        sequence_index=sequence.sequence_index,
        token_ids=sequence.token_ids,
        prompt_length=sequence.prompt_length,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=sequence.block_ids,
        sampling_params=sequence.spec.payload or b"",
        min_tokens=sequence.spec.min_tokens,
        stop_token_ids=sorted(sequence.spec.stop_token_ids),
        num_beam_candidates=sequence.num_beam_candidates,
        trace_context=encode_trace_context(sequence.spec.trace_context) if sequence.spec.trace_context else None,
        request_id=sequence.spec.request_id,
        lora_id=sequence.spec.lora_id,
        pooling_params=sequence.spec.pooling,
        max_length=sequence.max_length,
        fixed_block_ids=sequence.fixed_block_ids,
    )


def _encode_tables(output: SchedulerOutput) -> list[worker_pb2.BlockTable]:
    fixed = dict(output.replaced_fixed_tables)
    return [
        worker_pb2.BlockTable(sequence_id=key, block_ids=block_ids, fixed_block_ids=fixed.get(key, ()))
        for key, block_ids in output.replaced_tables
    ]


def _encode_pairs(pairs: Sequence[BlockPair]) -> worker_pb2.BlockPairs | None:
    columns = zip(*pairs, strict=True)
    return worker_pb2.BlockPairs(sources=next(columns), destinations=next(columns)) if pairs else None


def decode_answer(message: worker_pb2.ExecuteModelResponse, limits: AnswerLimits) -> StepResult:
    """Decodes the answer to one step; raises the refusal of a step that was refused whole, and WrongAnswer."""
    if message.HasField("refusal"):
        raise _decode_refusal(message.refusal)
    check_rows("sequence_ids", message.sequence_ids, limits)
    sequence_ids, token_ids = tuple(message.sequence_ids[:]), tuple(message.token_ids[:])
    num_tokens = tuple(message.num_tokens[:]) if message.num_tokens else ()
    check_sampled(sequence_ids, token_ids, num_tokens, limits)
    check_drafts(message.num_draft_tokens, message.num_accepted_tokens, limits)
    predictions: tuple[tuple[int, int, int], ...] = ()
    if message.num_forced_tokens or message.predicted_sequence_ids:
        predictions = _decode_predictions(message, limits)
    check_rows("skipped_sequence_ids", message.skipped_sequence_ids, limits)
    check_rows("failures", message.failures, limits)
    times = message.times
    return StepResult(
        message.step_id,
        sequence_ids,
        token_ids,
        tuple(message.skipped_sequence_ids[:]),
        tuple((failure.sequence_id, decode_error(failure.status)) for failure in message.failures),
        logprobs=decode_logprobs(message, limits) if has_logprobs(message) else (),
        beam_candidates=decode_candidates(message, limits) if has_candidates(message) else None,
        prompt_logprobs=decode_prompts(message, limits) if message.prompt_logprobs else (),
        pooled=decode_pooled(message, limits) if message.pooled_sequence_ids or message.pooled_values else (),
        forward_seconds=_seconds(times.forward) + _seconds(times.sample),
        cache_seconds=_seconds(times.cache_operations) if times.HasField("cache_operations") else 0.0,
        num_tokens=num_tokens,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        num_forced_tokens=message.num_forced_tokens,
        num_accepted_forced_tokens=message.num_accepted_forced_tokens,
        predictions=predictions,
    )


def _decode_predictions(
    message: worker_pb2.ExecuteModelResponse, limits: AnswerLimits
) -> tuple[tuple[int, int, int], ...]:
    """Decodes the drafts that predictions say, and checks them and those that grammars force."""
    check_rows("predicted_sequence_ids", message.predicted_sequence_ids, limits)
    sequence_ids, drafted = message.predicted_sequence_ids[:], message.num_predicted_tokens[:]
    accepted = message.num_accepted_predicted_tokens[:]
    check_distinct("predicted_sequence_ids", sequence_ids)
    require(len(sequence_ids) == len(drafted) == len(accepted), "the columns of predictions have other lengths")
    check_sources(
        (message.num_draft_tokens, message.num_accepted_tokens),
        ((message.num_forced_tokens, message.num_accepted_forced_tokens), *zip(drafted, accepted, strict=True)),
    )
    return tuple(zip(sequence_ids, drafted, accepted, strict=True))


class Receipt(NamedTuple):
    """A rank's answer to a step: the digests of all steps of the epoch so far, and how long the step took."""

    step_id: int
    input_digest: int
    output_digest: int
    seconds: float


def decode_receipt(message: worker_pb2.ExecuteModelResponse) -> Receipt:
    """Decodes a rank's answer to a step; raises the refusal of a step that was refused whole, and WrongAnswer."""
    if message.HasField("refusal"):
        raise _decode_refusal(message.refusal)
    times = message.times
    seconds = _seconds(times.forward) + _seconds(times.sample) + _seconds(times.cache_operations)
    return Receipt(message.step_id, message.input_digest, message.output_digest, seconds)


# Reasons that a refusal cannot have: they are about other processes.
_NO_REFUSALS = (Reason.NO_READY_WORKER, Reason.DRAINING, Reason.CLIENT_CANCELLED)


def _decode_refusal(status: rpc_status_pb2.Status) -> BlockyardError:
    error = from_status(status)
    return BlockyardError(Reason.BUG if error.reason in _NO_REFUSALS else error.reason, error.message, error.violations)


def _seconds(duration: Duration) -> float:
    return check_seconds(duration.seconds + duration.nanos * 1e-9)
