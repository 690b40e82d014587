"""Turns messages of blockyard.worker.v1 into values and back. The only room of the worker that knows their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.errors import to_status
from blockyard.worker.v1 import worker_pb2
from worker_service.step import BlockPairs, Fork, NewSequence, Sampling, Step, StepResult, StepTimes

if TYPE_CHECKING:
    from blockyard.common.v1 import sampling_pb2

DTYPES = {
    worker_pb2.DTYPE_UNSPECIFIED: None,
    worker_pb2.DTYPE_FLOAT32: torch.float32,
    worker_pb2.DTYPE_BFLOAT16: torch.bfloat16,
    worker_pb2.DTYPE_FLOAT16: torch.float16,
}
DEVICE_TYPES = {
    worker_pb2.DEVICE_TYPE_UNSPECIFIED: "auto",
    worker_pb2.DEVICE_TYPE_CPU: "cpu",
    worker_pb2.DEVICE_TYPE_CUDA: "cuda",
}


def decode_step(message: worker_pb2.ExecuteModelRequest) -> Step:
    """Decodes a step. Nothing in it is checked yet."""
    return Step(
        epoch=message.epoch,
        step_id=message.step_id,
        new_sequences=tuple(map(_decode_new_sequence, message.new_sequences)),
        forks=tuple(
            Fork(f.parent_sequence_id, f.child_sequence_id, f.sequence_index, np.array(f.block_ids, np.int64))
            for f in message.forks
        ),
        sequence_ids=tuple(message.sequence_ids),
        num_new_tokens=np.array(message.num_new_tokens, np.int64),
        appended_sequence_ids=tuple(message.appended_sequence_ids),
        appended_block_ids=np.array(message.appended_block_ids, np.int64),
        replaced_tables=tuple((t.sequence_id, np.array(t.block_ids, np.int64)) for t in message.replaced_tables),
        blocks_to_swap_out=_decode_pairs(message.blocks_to_swap_out),
        blocks_to_swap_in=_decode_pairs(message.blocks_to_swap_in),
        blocks_to_copy=_decode_pairs(message.blocks_to_copy),
        finished_sequence_ids=tuple(message.finished_sequence_ids),
    )


def _decode_pairs(message: worker_pb2.BlockPairs) -> BlockPairs:
    return BlockPairs(np.array(message.sources, np.int64), np.array(message.destinations, np.int64))


def _decode_new_sequence(message: worker_pb2.NewSequence) -> NewSequence:
    return NewSequence(
        sequence_id=message.sequence_id,
        sequence_index=message.sequence_index,
        token_ids=np.array(message.token_ids, np.int64),
        prompt_length=message.prompt_length,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=np.array(message.block_ids, np.int64),
        sampling=_decode_sampling(message.sampling),
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
    )


def _decode_sampling(message: sampling_pb2.SamplingParams) -> Sampling:
    """Decodes sampling parameters. Three proto defaults are not zero, so an absent field is not what it reads as."""
    return Sampling(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        seed=message.seed,
        logit_bias=dict(message.logit_bias),
    )


def encode_result(result: StepResult) -> worker_pb2.ExecuteModelResponse:
    """Encodes the answer to a step."""
    message = worker_pb2.ExecuteModelResponse(
        epoch=result.epoch,
        step_id=result.step_id,
        sequence_ids=result.sequence_ids,
        token_ids=result.token_ids,
        skipped_sequence_ids=result.skipped_sequence_ids,
    )
    for sequence_id, error in result.failures:
        message.failures.add(sequence_id=sequence_id, status=to_status(error))
    if result.refusal is not None:
        message.refusal.CopyFrom(to_status(result.refusal))
    _encode_times(result.times, message.times)
    return message


def _encode_times(times: StepTimes, message: worker_pb2.StepTimes) -> None:
    message.queue.FromNanoseconds(int(times.queue_seconds * 1e9))
    message.cache_operations.FromNanoseconds(int(times.cache_operations_seconds * 1e9))
    message.forward.FromNanoseconds(int(times.forward_seconds * 1e9))
    message.sample.FromNanoseconds(int(times.sample_seconds * 1e9))


def encode_dtype(dtype: torch.dtype) -> worker_pb2.Dtype.ValueType:
    """Names a dtype that models compute in."""
    return next(number for number, known in DTYPES.items() if known is dtype)
