"""Encodes and decodes a worker's device, model, blocks and memory.

What a worker decodes is refused with BlockyardError FIELD_INVALID where it has a number that is not known. What a
scheduler decodes is checked by the scheduler (`scheduler_service.replicas.steps.answer_checks`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockyard.common.v1 import administration_pb2
from blockyard.contract.codec.messages import EnumCodec, FieldCodec, MessageCodec
from blockyard.contract.codec.models import TASKS
from blockyard.contract.parallel import Parallel
from blockyard.contract.workers import (
    AvailableBlocks,
    CacheInfo,
    CachePlan,
    DeviceRequest,
    DeviceType,
    Dtype,
    LoadedModel,
    LoadFormat,
    LoadProgress,
    LoadRequest,
    LoraLimits,
    MemoryBreakdown,
    MemoryTag,
    ProfileRequest,
    Quantization,
    SavedState,
    SaveRequest,
    SleepInfo,
    StateFormat,
    WeightsSource,
)
from blockyard.errors import Violation, invalid
from blockyard.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

DEVICE_TYPES = EnumCodec(DeviceType, worker_pb2.DeviceType.items(), "DEVICE_TYPE_")
DTYPES = EnumCodec(Dtype, worker_pb2.Dtype.items(), "DTYPE_")
QUANTIZATIONS = EnumCodec(Quantization, worker_pb2.Quantization.items(), "QUANTIZATION_")
LOAD_FORMATS = EnumCodec(LoadFormat, worker_pb2.LoadFormat.items(), "LOAD_FORMAT_", zero=LoadFormat.AUTO)
STATE_FORMATS = EnumCodec(StateFormat, administration_pb2.StateFormat.items(), "STATE_FORMAT_")
TAGS = EnumCodec(MemoryTag, administration_pb2.MemoryTag.items(), "MEMORY_TAG_")

PARALLEL = MessageCodec(Parallel, worker_pb2.Parallel)
LORA_LIMITS = MessageCodec(LoraLimits, worker_pb2.LoraLimits)
PROGRESS = MessageCodec(LoadProgress, worker_pb2.LoadProgress)
MODEL = MessageCodec(LoadedModel, worker_pb2.LoadedModel, dtype=DTYPES, quantization=QUANTIZATIONS, task=TASKS)
WEIGHTS_SOURCE = MessageCodec(WeightsSource, worker_pb2.ReloadWeightsRequest)
PROFILE_REQUEST = MessageCodec(ProfileRequest, worker_pb2.DetermineNumAvailableBlocksRequest)
AVAILABLE_BLOCKS = MessageCodec(
    AvailableBlocks,
    worker_pb2.DetermineNumAvailableBlocksResponse,
    memory=MessageCodec(MemoryBreakdown, worker_pb2.MemoryBreakdown),
)
CACHE_PLAN = MessageCodec(CachePlan, worker_pb2.InitializeCacheRequest)
CACHE_INFO = MessageCodec(CacheInfo, worker_pb2.CacheInfo)
SAVED_STATE = MessageCodec(SavedState, administration_pb2.SavedState)
_DEVICE_REQUEST = MessageCodec(
    DeviceRequest, worker_pb2.InitDeviceRequest, device_type=DEVICE_TYPES, dtype=DTYPES, parallel=PARALLEL
)
_LOAD_REQUEST = MessageCodec(
    LoadRequest,
    worker_pb2.LoadModelRequest,
    quantization=QUANTIZATIONS,
    format=LOAD_FORMATS,
    lora=LORA_LIMITS,
    task=TASKS,
    kv_cache_dtype=DTYPES,
)
_SAVE_REQUEST = MessageCodec(SaveRequest, worker_pb2.SaveStateRequest, format=STATE_FORMATS)


def encode_tags(tags: Collection[MemoryTag]) -> list[administration_pb2.MemoryTag.ValueType]:
    """Encodes tags, in the order of their numbers."""
    return [TAGS.encode(tag) for tag in MemoryTag if tag in tags]


def decode_tags(numbers: Iterable[int]) -> frozenset[MemoryTag]:
    """Decodes tags; one of a later version is left out."""
    return frozenset(tag for number in numbers if (tag := TAGS.find(number)) is not None)


def decode_known_tags(numbers: Iterable[int]) -> frozenset[MemoryTag]:
    """Decodes tags; raises BlockyardError FIELD_INVALID for one that is not known."""
    numbers = list(numbers)
    if unknown := [number for number in numbers if TAGS.find(number) is None]:
        raise invalid([Violation("tags", f"{number} is not known to this process") for number in unknown])
    return decode_tags(numbers)


SLEEP_INFO = MessageCodec(SleepInfo, worker_pb2.SleepInfo, asleep=FieldCodec(encode_tags, decode_tags))


def encode_device_request(request: DeviceRequest) -> worker_pb2.InitDeviceRequest:
    """Encodes the device to choose; a world of one is left out."""
    message = _DEVICE_REQUEST.encode(request)
    if request.parallel.world_size == 1:
        message.ClearField("parallel")
    return message


def decode_device_request(message: worker_pb2.InitDeviceRequest) -> DeviceRequest:
    dtype = DTYPES.find(message.dtype)
    # No model computes in it.
    dtype = None if dtype is Dtype.INT8 else dtype
    _refuse_unknown(message, device_type=DEVICE_TYPES.find(message.device_type), dtype=dtype)
    return _DEVICE_REQUEST.decode(message)


def encode_load_request(request: LoadRequest) -> worker_pb2.LoadModelRequest:
    """Encodes the model to load; no room for adapters is left out."""
    message = _LOAD_REQUEST.encode(request)
    if not request.lora.max_loras:
        message.ClearField("lora")
    return message


def decode_load_request(message: worker_pb2.LoadModelRequest) -> LoadRequest:
    quantization = QUANTIZATIONS.find(message.quantization)
    # A checkpoint may hold its weights so; nobody asks for it.
    quantization = None if quantization is Quantization.INT4_GROUP else quantization
    load_format, task = LOAD_FORMATS.find(message.format), TASKS.find(message.task)
    kv_cache_dtype = DTYPES.find(message.kv_cache_dtype)
    _refuse_unknown(message, quantization=quantization, format=load_format, task=task, kv_cache_dtype=kv_cache_dtype)
    request = _LOAD_REQUEST.decode(message)
    lora = request.lora
    return replace(request, lora=replace(lora, max_cpu_loras=lora.max_cpu_loras or lora.max_loras))


def _refuse_unknown(message: Any, **members: object) -> None:
    """Raises FIELD_INVALID for the fields of a message whose number has no member."""
    unknown = [name for name, member in members.items() if member is None]
    if unknown:
        told = "is not known to this worker: is the scheduler of another version?"
        raise invalid([Violation(name, f"{getattr(message, name)} {told}") for name in unknown])


def encode_load_event(event: LoadProgress | LoadedModel) -> worker_pb2.LoadModelResponse:
    if isinstance(event, LoadProgress):
        return worker_pb2.LoadModelResponse(progress=PROGRESS.encode(event))
    return worker_pb2.LoadModelResponse(loaded=MODEL.encode(event))


def decode_load_event(message: worker_pb2.LoadModelResponse) -> LoadProgress | LoadedModel:
    return MODEL.decode(message.loaded) if message.HasField("loaded") else PROGRESS.decode(message.progress)


def encode_save_request(request: SaveRequest) -> worker_pb2.SaveStateRequest:
    return _SAVE_REQUEST.encode(request)


def decode_save_request(message: worker_pb2.SaveStateRequest) -> SaveRequest:
    if STATE_FORMATS.find(message.format) is None:
        raise invalid([Violation("format", "must be STATE_FORMAT_SHARDED or STATE_FORMAT_PACKED")])
    return _SAVE_REQUEST.decode(message)
