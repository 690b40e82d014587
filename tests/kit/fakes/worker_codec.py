"""The worker's side of the step stream's codec: steps out of messages, answers into messages."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from google.protobuf import duration_pb2

from blockyard.common.v1 import pooling_pb2
from blockyard.contract.codec.pooling import join_values
from blockyard.errors import BlockyardError, Reason, to_status
from blockyard.worker.v1 import worker_pb2
from scheduler_service.core.values import BlockPair, Fork, GroupSpec, NewSequence, SchedulerOutput
from tests.kit.oracles.pooled_numbers import OF_ALL_ROWS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from scheduler_service.core.values import LoraSpec, StepResult


NONE: Mapping[int, LoraSpec] = MappingProxyType({})


def decode_step(message: worker_pb2.ExecuteModelRequest, loras: Mapping[int, LoraSpec] = NONE) -> SchedulerOutput:
    """Decodes a step, for the worker's side; `loras`: the adapters that it has."""
    return SchedulerOutput(
        step_id=message.step_id,
        new_sequences=tuple(_decode_new_sequence(new, loras) for new in message.new_sequences),
        forks=tuple(
            Fork(
                fork.parent_sequence_id,
                fork.child_sequence_id,
                fork.sequence_index,
                tuple(fork.block_ids),
                tuple(fork.fixed_block_ids),
            )
            for fork in message.forks
        ),
        sequence_ids=tuple(message.sequence_ids[:]),
        num_new_tokens=tuple(message.num_new_tokens[:]),
        appended_sequence_ids=tuple(message.appended_sequence_ids[:]),
        appended_block_ids=tuple(message.appended_block_ids[:]),
        replaced_tables=tuple((table.sequence_id, tuple(table.block_ids)) for table in message.replaced_tables),
        blocks_to_swap_out=_decode_pairs(message.blocks_to_swap_out),
        blocks_to_swap_in=_decode_pairs(message.blocks_to_swap_in),
        blocks_to_copy=_decode_pairs(message.blocks_to_copy),
        finished_sequence_ids=tuple(message.finished_sequence_ids[:]),
        input_ids=tuple(zip(message.input_sequence_ids, message.input_token_ids, strict=True)),
        activated_loras=tuple(zip(message.activated_lora_slots, message.activated_lora_ids, strict=True)),
        max_draft_tokens=tuple(message.max_draft_tokens[:]),
        draft_prices=tuple(message.draft_prices[:]),
        replaced_fixed_tables=tuple(
            (table.sequence_id, tuple(table.fixed_block_ids))
            for table in message.replaced_tables
            if table.fixed_block_ids
        ),
    )


def _decode_new_sequence(message: worker_pb2.NewSequence, loras: Mapping[int, LoraSpec]) -> NewSequence:
    token_ids = tuple(message.token_ids[:])
    spec = GroupSpec(
        request_id="",
        owner="",
        prompt_token_ids=token_ids[: message.prompt_length],
        n=1,
        max_tokens=0,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        payload=message.sampling_params,
        computes_prompt=pooling_pb2.Pooling.FromString(message.pooling_params).kind in OF_ALL_ROWS,
        lora=loras[message.lora_id] if message.lora_id else None,
        pooling=message.pooling_params if message.HasField("pooling_params") else None,
    )
    return NewSequence(
        message.sequence_id,
        message.sequence_index,
        token_ids,
        message.prompt_length,
        message.num_computed_tokens,
        tuple(message.block_ids[:]),
        spec,
        message.num_beam_candidates,
        message.max_length,
        tuple(message.fixed_block_ids[:]),
    )


def _decode_pairs(message: worker_pb2.BlockPairs) -> tuple[BlockPair, ...]:
    return tuple(BlockPair(*pair) for pair in zip(message.sources, message.destinations, strict=True))


def encode_result(result: StepResult, epoch: int, step_seconds: float) -> worker_pb2.ExecuteModelResponse:
    """Encodes the answer to a step."""
    message = worker_pb2.ExecuteModelResponse(
        epoch=epoch,
        step_id=result.step_id,
        sequence_ids=result.sequence_ids,
        token_ids=result.token_ids,
        skipped_sequence_ids=result.skipped_sequence_ids,
        num_tokens=result.num_tokens,
        num_draft_tokens=result.num_draft_tokens,
        num_accepted_tokens=result.num_accepted_tokens,
        times=worker_pb2.StepTimes(forward=duration_pb2.Duration(nanos=int(step_seconds * 1e9) % 10**9)),
    )
    message.pooled_sequence_ids.extend([sequence_id for sequence_id, _ in result.pooled])
    sizes, message.pooled_values = join_values([values for _, values in result.pooled])
    message.pooled_sizes.extend(sizes)
    for sequence_id, error in result.failures:
        status = to_status(BlockyardError(Reason(error.reason), error.message))
        message.failures.add(sequence_id=sequence_id, status=status)
    for sequence_id, candidates in (result.beam_candidates or {}).items():
        message.beam_sequence_ids.append(sequence_id)
        columns = message.beam_candidates
        columns.num_candidates.append(len(candidates))
        columns.token_ids.extend([token_id for token_id, _ in candidates])
        columns.logprobs.extend([logprob for _, logprob in candidates])
    return message
