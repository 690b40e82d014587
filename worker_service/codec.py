"""Decodes messages of blockyard.worker.v1 into values, and encodes values. The rest of the worker knows only values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from blockyard.capacity.limits import ProfileRequest
from blockyard.common.v1 import sampling_pb2, status_pb2
from blockyard.errors import Violation, invalid, to_status
from blockyard.tracing.codec import decode_trace_context
from blockyard.worker.v1 import worker_pb2
from worker_service.group_codec import encode_group
from worker_service.lora_codec import decode_lora_limits, encode_lora
from worker_service.operations.codec import encode_kv_groups
from worker_service.pooling_codec import TASKS, decode_pooling, encode_pooled, encode_task
from worker_service.set_up import CacheRequest
from worker_service.step import (
    DEFAULT_TIMEOUT_SECONDS,
    MAX_VIOLATIONS,
    NO_IDS,
    NO_PAIRS,
    BlockPairs,
    Fork,
    NewSequence,
    SamplingParams,
    Step,
    StepResult,
    StepTimes,
)
from worker_service.weights.codec import encode_sleep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.duration_pb2 import Duration
    from google.protobuf.internal.containers import RepeatedScalarFieldContainer
    from google.protobuf.message import Message

    from blockyard.capacity.adapters import LoraLimits
    from blockyard.capacity.memory import CachePlan
    from blockyard.model_config.pooling.rule import Task
    from worker_service.models.loader import LoadedModel
    from worker_service.set_up import CacheFacts, SetUp
    from worker_service.step import Array, Logprobs
    from worker_service.worker import Worker

DTYPES = {
    worker_pb2.DTYPE_UNSPECIFIED: None,
    worker_pb2.DTYPE_FLOAT32: torch.float32,
    worker_pb2.DTYPE_BFLOAT16: torch.bfloat16,
    worker_pb2.DTYPE_FLOAT16: torch.float16,
}
QUANTIZATIONS = {worker_pb2.QUANTIZATION_UNSPECIFIED: "none", worker_pb2.QUANTIZATION_INT8: "int8"}
QUANTIZATIONS[worker_pb2.QUANTIZATION_FP8] = "fp8"
# Beside those that LoadModel asks for.
HELD_QUANTIZATIONS = {**QUANTIZATIONS, worker_pb2.QUANTIZATION_INT4_GROUP: "int4"}
LOAD_FORMATS = {
    **{number: name.removeprefix("LOAD_FORMAT_").lower() for name, number in worker_pb2.LoadFormat.items()},
    worker_pb2.LOAD_FORMAT_UNSPECIFIED: "auto",
}
DEVICE_TYPES = {
    worker_pb2.DEVICE_TYPE_UNSPECIFIED: "auto",
    worker_pb2.DEVICE_TYPE_CPU: "cpu",
    worker_pb2.DEVICE_TYPE_CUDA: "cuda",
}
# A step has at most as many of these as it has rows, and twice as many of those, where one is given up for another.
_ROWS = (
    "sequence_ids",
    "num_new_tokens",
    "input_sequence_ids",
    "input_token_ids",
    "activated_lora_slots",
    "activated_lora_ids",
)
_LISTS = ("new_sequences", "forks", "replaced_tables")
_FINISHED = {"finished_sequence_ids": 2**20}
# Several times what gateways let a request have.
_LISTS_OF_SAMPLING = {"bad_token_sequences": 2**14, "logit_bias": 2**16}
PairsField = Literal["blocks_to_swap_out", "blocks_to_swap_in", "blocks_to_copy"]


def decode_step(message: worker_pb2.ExecuteModelRequest, max_num_seqs: int = 2**16) -> Step:
    """Decodes a step, and checks nothing but its size: one for more than `max_num_seqs` rows is refused unread.

    To read it would hold up the event loop.
    """
    if max(len(message.sequence_ids), len(message.num_new_tokens)) > max_num_seqs:
        return _too_large(message, max_num_seqs)
    epoch, step_id = message.epoch, message.step_id
    sequence_ids, num_new_tokens = tuple(message.sequence_ids[:]), _decode_column(message.num_new_tokens)
    quiet, has_timeout = message.quiet, message.HasField("step_timeout")
    timeout_seconds = message.step_timeout.ToNanoseconds() / 1e9 if has_timeout else DEFAULT_TIMEOUT_SECONDS
    num_read = sum(map(bool, (epoch, step_id, sequence_ids, len(num_new_tokens), quiet, has_timeout)))
    if len(message.ListFields()) == num_read:
        # These and nothing else, as of most steps: to look at each of the other fields costs more than to read these.
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
        new_sequences=tuple(map(_decode_new_sequence, message.new_sequences)),
        forks=tuple(
            Fork(f.parent_sequence_id, f.child_sequence_id, f.sequence_index, _decode_column(f.block_ids))
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
    )


def _too_large(message: worker_pb2.ExecuteModelRequest, max_num_seqs: int) -> Step:
    error = invalid(_find_too_large(message, max_num_seqs)[:MAX_VIOLATIONS])
    return Step(message.epoch, message.step_id, decode_error=error)


def _find_too_large(message: worker_pb2.ExecuteModelRequest, max_num_seqs: int) -> list[Violation]:
    most_of = dict.fromkeys(_ROWS, max_num_seqs) | dict.fromkeys(_LISTS, 2 * max_num_seqs) | _FINISHED
    return _find_long(message, most_of)


def _find_long(message: Message, most_of: Mapping[str, int], prefix: str = "") -> list[Violation]:
    sizes = [(name, len(getattr(message, name)), most) for name, most in most_of.items()]
    return [
        Violation(prefix + name, f"{size} entries, at most {most} are allowed")
        for name, size, most in sizes
        if size > most
    ]


def _decode_column(numbers: RepeatedScalarFieldContainer[int]) -> Array:
    # A slice leaves the message at once; to make an array of nothing costs as much as one of something.
    return np.array(numbers[:], np.int64) if numbers else NO_IDS


def _decode_pairs(message: worker_pb2.ExecuteModelRequest, field: PairsField) -> BlockPairs:
    if not message.HasField(field):
        return NO_PAIRS
    pairs: worker_pb2.BlockPairs = getattr(message, field)
    return BlockPairs(_decode_column(pairs.sources), _decode_column(pairs.destinations))


def _decode_new_sequence(message: worker_pb2.NewSequence) -> NewSequence:
    too_long = _find_long(message.sampling, _LISTS_OF_SAMPLING, "sampling.")
    return NewSequence(
        sequence_id=message.sequence_id,
        sequence_index=message.sequence_index,
        token_ids=np.array(message.token_ids, np.int64),
        prompt_length=message.prompt_length,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=np.array(message.block_ids, np.int64),
        sampling=SamplingParams() if too_long else _decode_sampling(message.sampling),
        rejection=invalid(too_long) if too_long else None,
        has_sampling=message.HasField("sampling"),
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        num_beam_candidates=message.num_beam_candidates,
        trace_context=decode_trace_context(message.trace_context) if message.HasField("trace_context") else None,
        request_id=message.request_id,
        lora_id=message.lora_id,
        pooling=decode_pooling(message.pooling) if message.HasField("pooling") else None,
    )


def _decode_sampling(message: sampling_pb2.SamplingParams) -> SamplingParams:
    """Decodes sampling parameters. Three proto defaults are not zero, so an absent field is not what it reads as."""
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        seed=message.seed,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_token_sequences=tuple(tuple(sequence.token_ids) for sequence in message.bad_token_sequences),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        grammar=message.grammar,
    )


def encode_result(result: StepResult) -> worker_pb2.ExecuteModelResponse:
    """Encodes the answer to a step."""
    message = worker_pb2.ExecuteModelResponse(
        epoch=result.epoch,
        step_id=result.step_id,
        sequence_ids=result.sequence_ids,
        token_ids=result.token_ids,
        skipped_sequence_ids=result.skipped_sequence_ids,
        draining=result.draining,
        input_digest=result.digests[0],
        output_digest=result.digests[1],
    )
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
    encode_pooled(result.pooled, message)
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
    # What a Duration's own method checks besides costs three times as much.
    message.seconds, message.nanos = divmod(int(seconds * 1e9), 10**9)


def decode_init_device(message: worker_pb2.InitDeviceRequest) -> tuple[str, torch.dtype | None]:
    """Decodes the device type and the dtype; raises BlockyardError FIELD_INVALID for an unknown one."""
    violations = _unknown("device_type", message.device_type, DEVICE_TYPES)
    violations += _unknown("dtype", message.dtype, DTYPES)
    if violations:
        raise invalid(violations)
    return DEVICE_TYPES[message.device_type], DTYPES[message.dtype]


def decode_load(message: worker_pb2.LoadModelRequest) -> tuple[str, str, LoraLimits, Task | None]:
    """Decodes quantization, format, room for LoRA and task; raises BlockyardError FIELD_INVALID for an unknown one."""
    violations = _unknown("quantization", message.quantization, QUANTIZATIONS)
    violations += _unknown("format", message.format, LOAD_FORMATS)
    violations += _unknown("task", message.task, TASKS)
    if violations:
        raise invalid(violations)
    how = QUANTIZATIONS[message.quantization], LOAD_FORMATS[message.format]
    return *how, decode_lora_limits(message), TASKS[message.task]


def _unknown(field: str, number: int, known: Mapping[Any, object]) -> list[Violation]:
    if number in known:
        return []
    return [Violation(field, f"{number} is not known to this worker: is the scheduler of another version?")]


def encode_dtype(dtype: torch.dtype) -> worker_pb2.Dtype.ValueType:
    """Encodes a dtype that models compute in."""
    return next(number for number, known in DTYPES.items() if known is dtype)


def encode_model(loaded: LoadedModel) -> worker_pb2.LoadedModel:
    """Encodes the loaded model."""
    stored = loaded.config.stored
    return worker_pb2.LoadedModel(
        architecture=loaded.config.architecture,
        vocab_size=loaded.config.vocab_size,
        max_model_len=loaded.config.max_model_len,
        model_digest=loaded.model_digest,
        weights_digest=loaded.weights_digest,
        parameter_bytes=loaded.parameter_bytes,
        dtype=encode_dtype(loaded.config.dtype),
        quantization=next(number for number, name in HELD_QUANTIZATIONS.items() if name == loaded.quantization),
        weights_version=loaded.version,
        task=encode_task(loaded.config.task),
        whole_prompts=loaded.config.encoder is not None,
        stored_format=stored.title if stored is not None else "",
        warnings=loaded.warnings,
    )


def encode_reloaded(set_up: SetUp) -> worker_pb2.ReloadedWeights:
    """Encodes a model whose weights were loaded anew."""
    assert set_up.loaded is not None
    assert set_up.cache is not None
    return worker_pb2.ReloadedWeights(model=encode_model(set_up.loaded), cache=encode_cache(set_up.cache))


def encode_cache(cache: CacheFacts) -> worker_pb2.CacheInfo:
    """Encodes the pools."""
    return worker_pb2.CacheInfo(
        block_size=cache.request.block_size,
        num_device_blocks=cache.request.num_device_blocks,
        num_host_blocks=cache.request.num_host_blocks,
        cache_block_bytes=cache.cache_block_bytes,
        max_model_len=cache.request.max_model_len,
        determinism_id=cache.determinism_id,
        batch_invariant=cache.batch_invariant,
        kv_windows=cache.kv_windows,
    )


def encode_info(worker: Worker, worker_id: str, placement: worker_pb2.Placement) -> worker_pb2.GetWorkerInfoResponse:
    """Encodes a worker's identity and state; `placement`: what the process was started with."""
    set_up = worker.set_up
    return worker_pb2.GetWorkerInfoResponse(
        worker_id=worker_id,
        incarnation=worker.incarnation,
        api_version="v1",
        state=status_pb2.WorkerState.Value(f"WORKER_STATE_{worker.state.value}"),
        epoch=worker.epoch,
        configuration_digest=set_up.configuration_digest,
        device=worker.device_name,
        model=encode_model(set_up.loaded) if set_up.loaded else None,
        cache=encode_cache(set_up.cache) if set_up.cache else None,
        draining=worker.is_draining,
        group=encode_group(worker.membership.info),
        placement=placement,
        kv_groups=encode_kv_groups(set_up, encode_dtype(set_up.loaded.config.dtype)) if set_up.loaded else (),
        lora=encode_lora(set_up.loras),
        sleep=encode_sleep(set_up.sleep) if set_up.loaded else None,
    )


def decode_profile_request(message: worker_pb2.DetermineNumAvailableBlocksRequest) -> ProfileRequest:
    """Decodes a request to count blocks."""
    return ProfileRequest(
        block_size=message.block_size,
        device_memory_utilization=message.device_memory_utilization,
        swap_space_bytes=message.swap_space_bytes,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_num_seqs=message.max_num_seqs,
    )


def decode_cache_request(message: worker_pb2.InitializeCacheRequest) -> CacheRequest:
    """Decodes a request for pools."""
    return CacheRequest(
        block_size=message.block_size,
        num_device_blocks=message.num_device_blocks,
        num_host_blocks=message.num_host_blocks,
        max_model_len=message.max_model_len,
        max_num_batched_tokens=message.max_num_batched_tokens,
        max_num_seqs=message.max_num_seqs,
    )


def encode_plan(plan: CachePlan) -> worker_pb2.DetermineNumAvailableBlocksResponse:
    """Encodes the numbers of blocks that fit."""
    return worker_pb2.DetermineNumAvailableBlocksResponse(
        block_size=plan.block_size,
        num_device_blocks=plan.num_device_blocks,
        num_host_blocks=plan.num_host_blocks,
        cache_block_bytes=plan.block_bytes,
        kv_windows=plan.kv_windows,
        memory=worker_pb2.MemoryBreakdown(
            total_bytes=plan.usage.total_bytes,
            budget_bytes=plan.budget_bytes,
            weights_bytes=plan.usage.weights_bytes,
            activation_bytes=plan.usage.activation_bytes,
            other_bytes=plan.usage.other_bytes,
            cache_bytes=plan.cache_bytes,
        ),
    )
