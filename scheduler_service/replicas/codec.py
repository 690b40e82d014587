"""Encodes values for workers and decodes their messages: the step stream and a worker's lifecycle.

A message never travels deeper than this module, and no value leaves it that cannot be: what a worker says is checked
(`answer_checks`). Columns go into constructors and come out of slices whole, since setting or reading one number at a
time is what costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from google.protobuf.duration_pb2 import Duration

from blockyard.common.v1 import administration_pb2, pooling_pb2, sampling_pb2, status_pb2
from blockyard.errors import BlockyardError, Reason, from_status
from blockyard.pooling.tasks import Task, find_task
from blockyard.tracing.codec import encode_trace_context
from blockyard.worker.v1 import worker_pb2
from scheduler_service.core.values import StepResult
from scheduler_service.error_codec import decode_error
from scheduler_service.replicas.facts import (
    AvailableBlocks,
    CacheInfo,
    CachePlan,
    GroupInfo,
    LoadedModel,
    LoadProgress,
    MemoryTag,
    Placement,
    SleepInfo,
    WorkerInfo,
    WorkerState,
)
from scheduler_service.replicas.steps.answer_checks import (
    check_blocks,
    check_cache,
    check_model,
    check_rows,
    check_sampled,
    check_seconds,
    check_worker,
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
    from collections.abc import Iterable, Sequence

    from blockyard.google_rpc import status_pb2 as rpc_status_pb2
    from blockyard.parallel import Parallel, ParallelSizes
    from scheduler_service.core.values import BlockPair, NewSequence, SchedulerOutput
    from scheduler_service.replicas.facts import MeetingPoint
    from scheduler_service.replicas.steps.answer_checks import AnswerLimits

TAGS: dict[int, MemoryTag] = {
    administration_pb2.MEMORY_TAG_WEIGHTS: MemoryTag.WEIGHTS,
    administration_pb2.MEMORY_TAG_KV_CACHE: MemoryTag.KV_CACHE,
}
_DEVICE_TYPES = {
    "auto": worker_pb2.DEVICE_TYPE_UNSPECIFIED,
    "cpu": worker_pb2.DEVICE_TYPE_CPU,
    "cuda": worker_pb2.DEVICE_TYPE_CUDA,
}
_DTYPES = {
    "auto": worker_pb2.DTYPE_UNSPECIFIED,
    "float32": worker_pb2.DTYPE_FLOAT32,
    "bfloat16": worker_pb2.DTYPE_BFLOAT16,
    "float16": worker_pb2.DTYPE_FLOAT16,
}
_QUANTIZATIONS = {
    "none": worker_pb2.QUANTIZATION_UNSPECIFIED,
    "int8": worker_pb2.QUANTIZATION_INT8,
    "fp8": worker_pb2.QUANTIZATION_FP8,
}
_STATE_PREFIX = "WORKER_STATE_"
_KIND_PREFIX = "COLLECTIVES_KIND_"


# The step stream.


def encode_step(output: SchedulerOutput, epoch: int) -> worker_pb2.ExecuteModelRequest:
    """Encodes one step. A group's payload is its sampling parameters, serialized."""
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
            )
            for fork in output.forks
        ],
        sequence_ids=output.sequence_ids,
        num_new_tokens=output.num_new_tokens,
        appended_sequence_ids=output.appended_sequence_ids,
        appended_block_ids=output.appended_block_ids,
        replaced_tables=[
            worker_pb2.BlockTable(sequence_id=sequence_id, block_ids=block_ids)
            for sequence_id, block_ids in output.replaced_tables
        ],
        blocks_to_swap_out=_encode_pairs(output.blocks_to_swap_out),
        blocks_to_swap_in=_encode_pairs(output.blocks_to_swap_in),
        blocks_to_copy=_encode_pairs(output.blocks_to_copy),
        finished_sequence_ids=output.finished_sequence_ids,
        input_sequence_ids=input_sequence_ids,
        input_token_ids=input_token_ids,
        activated_lora_slots=[slot for slot, _ in output.activated_loras],
        activated_lora_ids=[lora_id for _, lora_id in output.activated_loras],
    )


def encode_group_step(
    output: SchedulerOutput, epoch: int, parallel: ParallelSizes, timeout_seconds: float, *, is_quiet: bool
) -> bytes:
    """Encodes one step for all ranks of a group; `is_quiet`: only the sampling rank is to answer it."""
    message = encode_step(output, epoch)
    message.step_timeout.CopyFrom(_duration(timeout_seconds))
    message.quiet = is_quiet
    if parallel.pipeline_parallel_size > 1:
        message.ids_from_scheduler = output.step_id == 1
    return message.SerializeToString()


def _duration(seconds: float) -> Duration:
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def _encode_new_sequence(sequence: NewSequence) -> worker_pb2.NewSequence:
    pooling = sequence.spec.pooling
    return worker_pb2.NewSequence(
        sequence_id=sequence.sequence_id,
        sequence_index=sequence.sequence_index,
        token_ids=sequence.token_ids,
        prompt_length=sequence.prompt_length,
        num_computed_tokens=sequence.num_computed_tokens,
        block_ids=sequence.block_ids,
        sampling=sampling_pb2.SamplingParams.FromString(sequence.spec.payload or b""),
        min_tokens=sequence.spec.min_tokens,
        stop_token_ids=sorted(sequence.spec.stop_token_ids),
        num_beam_candidates=sequence.num_beam_candidates,
        trace_context=encode_trace_context(sequence.spec.trace_context),
        request_id=sequence.spec.request_id,
        lora_id=sequence.spec.lora_id,
        pooling=None if pooling is None else pooling_pb2.Pooling.FromString(pooling),
    )


def _encode_pairs(pairs: Sequence[BlockPair]) -> worker_pb2.BlockPairs | None:
    columns = zip(*pairs, strict=True)
    return worker_pb2.BlockPairs(sources=next(columns), destinations=next(columns)) if pairs else None


def decode_answer(message: worker_pb2.ExecuteModelResponse, limits: AnswerLimits) -> StepResult:
    """Decodes the answer to one step; raises the refusal of a step that was refused whole, and WrongAnswer."""
    if message.HasField("refusal"):
        raise _decode_refusal(message.refusal)
    check_rows("sequence_ids", message.sequence_ids, limits)
    sequence_ids, token_ids = tuple(message.sequence_ids[:]), tuple(message.token_ids[:])
    check_sampled(sequence_ids, token_ids, limits)
    check_rows("skipped_sequence_ids", message.skipped_sequence_ids, limits)
    check_rows("failures", message.failures, limits)
    times = message.times
    return StepResult(
        message.step_id,
        sequence_ids,
        token_ids,
        tuple(message.skipped_sequence_ids[:]),
        tuple((failure.sequence_id, decode_error(failure.status)) for failure in message.failures),
        logprobs=decode_logprobs(message, limits) if has_logprobs(message) else None,
        beam_candidates=decode_candidates(message, limits) if has_candidates(message) else None,
        prompt_logprobs=decode_prompts(message, limits) if message.prompt_logprobs else (),
        pooled=decode_pooled(message, limits) if message.pooled_sequence_ids or message.pooled_values else (),
        forward_seconds=_seconds(times.forward) + _seconds(times.sample),
        cache_seconds=_seconds(times.cache_operations) if times.HasField("cache_operations") else 0.0,
    )


class Receipt(NamedTuple):
    """What each rank of a group tells of a step: the digests of all steps of the epoch so far, and how long it took."""

    step_id: int
    input_digest: int
    output_digest: int
    seconds: float


def decode_receipt(message: worker_pb2.ExecuteModelResponse) -> Receipt:
    """Decodes what a rank tells of a step; raises the refusal of a step that was refused whole, and WrongAnswer."""
    if message.HasField("refusal"):
        raise _decode_refusal(message.refusal)
    times = message.times
    seconds = _seconds(times.forward) + _seconds(times.sample) + _seconds(times.cache_operations)
    return Receipt(message.step_id, message.input_digest, message.output_digest, seconds)


# That somebody is gone is no reason to refuse a step.
_NO_REFUSALS = (Reason.NO_READY_WORKER, Reason.DRAINING, Reason.CLIENT_CANCELLED)


def _decode_refusal(status: rpc_status_pb2.Status) -> BlockyardError:
    error = from_status(status)
    return BlockyardError(Reason.BUG if error.reason in _NO_REFUSALS else error.reason, error.message, error.violations)


def _seconds(duration: Duration) -> float:
    return check_seconds(duration.seconds + duration.nanos * 1e-9)


# A worker's lifecycle.


def encode_init_device(
    device: str, dtype: str, configuration_digest: str, parallel: Parallel
) -> worker_pb2.InitDeviceRequest:
    """Encodes where and in what to compute, by the names of the settings, and what the worker is in its replica."""
    request = worker_pb2.InitDeviceRequest(
        device_type=_DEVICE_TYPES[device], dtype=_DTYPES[dtype], configuration_digest=configuration_digest
    )
    if parallel.world_size > 1:
        request.parallel.tensor_parallel_size = parallel.tensor_parallel_size
        request.parallel.pipeline_parallel_size = parallel.pipeline_parallel_size
        request.parallel.rank = parallel.rank
    return request


def encode_load_model(
    model: str, revision: str, quantization: str, load_format: str, task: Task = Task.UNSPECIFIED
) -> worker_pb2.LoadModelRequest:
    """Encodes what to load and what for, and by the settings' names how to hold it and where it comes from."""
    return worker_pb2.LoadModelRequest(
        model=model,
        revision=revision,
        quantization=_QUANTIZATIONS[quantization],
        format=worker_pb2.LoadFormat.Value(f"LOAD_FORMAT_{load_format.upper()}"),
        task=pooling_pb2.Task.ValueType(task),
    )


def encode_cache_plan(plan: CachePlan) -> worker_pb2.InitializeCacheRequest:
    """Encodes the pools to allocate."""
    return worker_pb2.InitializeCacheRequest(
        block_size=plan.block_size,
        num_device_blocks=plan.num_device_blocks,
        num_host_blocks=plan.num_host_blocks,
        max_model_len=plan.max_model_len,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_num_seqs=plan.max_num_seqs,
    )


def decode_worker_info(message: worker_pb2.GetWorkerInfoResponse) -> WorkerInfo:
    """Decodes who a worker is."""
    return check_worker(
        WorkerInfo(
            worker_id=message.worker_id,
            incarnation=message.incarnation,
            api_version=message.api_version,
            state=_decode_state(message.state),
            epoch=message.epoch,
            configuration_digest=message.configuration_digest,
            device=message.device,
            model=_decode_model(message.model) if message.HasField("model") else None,
            cache=decode_cache_info(message.cache) if message.HasField("cache") else None,
            draining=message.draining,
            group=_decode_group(message.group) if message.HasField("group") else None,
            placement=Placement(message.placement.group, message.placement.index),
            sleep=SleepInfo(decode_tags(message.sleep.asleep), message.sleep.weights_are_stale),
        )
    )


def decode_tags(numbers: Iterable[int]) -> frozenset[MemoryTag]:
    """Decodes tags; one of a newer worker has no name here, and is left out."""
    return frozenset(TAGS[number] for number in numbers if number in TAGS)


def _decode_group(message: worker_pb2.GroupInfo) -> GroupInfo:
    return GroupInfo(message.epoch, message.reusable, message.problem, message.members_digest)


def encode_form_group(
    epoch: int, members: Sequence[str], timeout_seconds: float, meeting: MeetingPoint | None
) -> worker_pb2.FormGroupRequest:
    """Encodes a group to join; without a meeting point: the group that there is, to be taken over."""
    return worker_pb2.FormGroupRequest(
        epoch=epoch,
        members=members,
        timeout=_duration(timeout_seconds),
        reuse=meeting is None,
        rendezvous_address=meeting.address if meeting else "",
        secret=meeting.secret if meeting else b"",
    )


def decode_collectives_kind(message: worker_pb2.FormGroupResponse) -> str:
    """Decodes how the ranks of a group reach each other: a word for the log."""
    if message.kind not in worker_pb2.CollectivesKind.values():
        return "unspecified"
    return worker_pb2.CollectivesKind.Name(message.kind).removeprefix(_KIND_PREFIX).lower()


def _decode_state(state: status_pb2.WorkerState.ValueType) -> WorkerState:
    """A newer worker may be in a state that has no name here."""
    if state not in status_pb2.WorkerState.values():
        return WorkerState.UNSPECIFIED
    return WorkerState(status_pb2.WorkerState.Name(state).removeprefix(_STATE_PREFIX))


def _decode_model(message: worker_pb2.LoadedModel) -> LoadedModel:
    return check_model(
        LoadedModel(
            architecture=message.architecture,
            vocab_size=message.vocab_size,
            max_model_len=message.max_model_len,
            model_digest=message.model_digest,
            parameter_bytes=message.parameter_bytes,
            weights_digest=message.weights_digest,
            weights_version=message.weights_version,
            task=find_task(message.task),
            whole_prompts=message.whole_prompts,
            warnings=tuple(message.warnings),
        )
    )


def decode_load_event(message: worker_pb2.LoadModelResponse) -> LoadProgress | LoadedModel:
    """Decodes how far loading is, or what was loaded."""
    if message.HasField("loaded"):
        return _decode_model(message.loaded)
    return LoadProgress(message.progress.done_bytes, message.progress.total_bytes)


def decode_available_blocks(message: worker_pb2.DetermineNumAvailableBlocksResponse) -> AvailableBlocks:
    """Decodes how many blocks fit."""
    return check_blocks(
        AvailableBlocks(
            *(message.block_size, message.num_device_blocks, message.num_host_blocks, message.cache_block_bytes),
            kv_windows=tuple(message.kv_windows) or (0,),
        )
    )


def decode_cache_info(message: worker_pb2.CacheInfo) -> CacheInfo:
    """Decodes the pools that a worker has."""
    return check_cache(
        CacheInfo(
            block_size=message.block_size,
            num_device_blocks=message.num_device_blocks,
            num_host_blocks=message.num_host_blocks,
            cache_block_bytes=message.cache_block_bytes,
            max_model_len=message.max_model_len,
            determinism_id=message.determinism_id,
            batch_invariant=message.batch_invariant,
            kv_windows=tuple(message.kv_windows) or (0,),
        )
    )
