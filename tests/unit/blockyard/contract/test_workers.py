"""Each value that a scheduler and a worker exchange arrives as it was sent."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.contract.codec import worker_info, workers
from blockyard.contract.models import Task
from blockyard.contract.parallel import ALONE, Parallel
from blockyard.contract.scheduling import Adapter
from blockyard.contract.workers import (
    AvailableBlocks,
    CacheInfo,
    CachePlan,
    CollectivesKind,
    DeviceRequest,
    DeviceType,
    Dtype,
    GroupInfo,
    GroupRequest,
    LoadedModel,
    LoadFormat,
    LoadProgress,
    LoadRequest,
    LoraInfo,
    LoraLimits,
    MemoryBreakdown,
    MemoryTag,
    Placement,
    ProfileRequest,
    Quantization,
    SavedState,
    SaveRequest,
    SleepInfo,
    StateFormat,
    WeightsSource,
    WorkerInfo,
    WorkerState,
)
from blockyard.errors import BlockyardError, Reason
from blockyard.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = LoadedModel(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    max_model_len=64,
    model_digest="m",
    parameter_bytes=2**40,
    weights_digest="w",
    weights_version="v2",
    task=Task.EMBED,
    whole_prompts=True,
    warnings=("the code of others",),
    dtype=Dtype.BFLOAT16,
    quantization=Quantization.INT4_GROUP,
    stored_format="AWQ",
)
CACHE = CacheInfo(16, 100, 10, 4096, 48, "id", True, (0, 32), (1, 2), (0.25, 0.5), 3)
ADAPTER = Adapter(3, "sql", "/adapters/sql", "ab" * 32, True, 20, 8, ("k_proj", "q_proj"), 1000)
LIMITS = LoraLimits(2, 16, 4, 32)
SLEEP = SleepInfo(2, frozenset({MemoryTag.KV_CACHE}), True)
GROUP = GroupInfo(7, True, "over", b"digest")
INFO = WorkerInfo(
    worker_id="host/unix:/worker",
    incarnation="abc",
    api_version="v1",
    state=WorkerState.SLEEPING,
    epoch=9,
    configuration_digest="settings",
    device="a GPU",
    model=MODEL,
    cache=CACHE,
    draining=True,
    group=GROUP,
    placement=Placement("blue", 3, "host"),
    sleep=SLEEP,
    lora=LoraInfo(LIMITS, (ADAPTER,)),
)

CODECS: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "InitDevice": (
        DeviceRequest(DeviceType.CUDA, Dtype.FLOAT16, "settings", Parallel(2, 2, 3)),
        workers.encode_device_request,
        workers.decode_device_request,
    ),
    "LoadModel": (
        LoadRequest("m", "main", Quantization.FP8, LoadFormat.PACKED, LIMITS, Task.SCORE),
        workers.encode_load_request,
        workers.decode_load_request,
    ),
    "LoadProgress": (LoadProgress(1, 3), workers.encode_load_event, workers.decode_load_event),
    "LoadedModel": (MODEL, workers.encode_load_event, workers.decode_load_event),
    "ReloadWeights": (
        WeightsSource("m", "main", "v2"),
        workers.WEIGHTS_SOURCE.encode,
        workers.WEIGHTS_SOURCE.decode,
    ),
    "DetermineNumAvailableBlocks": (
        ProfileRequest(16, 0.5, 2**30, 2048, 64, 32),
        workers.PROFILE_REQUEST.encode,
        workers.PROFILE_REQUEST.decode,
    ),
    "AvailableBlocks": (
        AvailableBlocks(16, 100, 10, 4096, (0, 32), MemoryBreakdown(6, 5, 4, 3, 2, 1), 3),
        workers.AVAILABLE_BLOCKS.encode,
        workers.AVAILABLE_BLOCKS.decode,
    ),
    "InitializeCache": (
        CachePlan(16, 100, 10, 512, 2048, 256, 11, 32, 3),
        workers.CACHE_PLAN.encode,
        workers.CACHE_PLAN.decode,
    ),
    "CacheInfo": (CACHE, workers.CACHE_INFO.encode, workers.CACHE_INFO.decode),
    "SleepInfo": (SLEEP, workers.SLEEP_INFO.encode, workers.SLEEP_INFO.decode),
    "SaveState": (
        SaveRequest(StateFormat.PACKED, "nightly", 5),
        workers.encode_save_request,
        workers.decode_save_request,
    ),
    "SavedState": (SavedState("/root/nightly", ("a", "b"), 9), workers.SAVED_STATE.encode, workers.SAVED_STATE.decode),
    "FormGroup": (
        GroupRequest(7, "host:1", b"secret", ("a", "b"), 2.5, True),
        worker_info.encode_group_request,
        worker_info.decode_group_request,
    ),
    "LoraAdapter": (ADAPTER, worker_info.ADAPTER.encode, worker_info.ADAPTER.decode),
    "WorkerInfo": (INFO, worker_info.encode_worker_info, worker_info.decode_worker_info),
}


@pytest.mark.parametrize("name", CODECS)
def test_a_value_arrives_as_it_was_sent(name: str) -> None:
    value, encode, decode = CODECS[name]
    sent = encode(value)
    assert decode(type(sent).FromString(sent.SerializeToString())) == value


@pytest.mark.parametrize("name", CODECS)
def test_the_values_above_have_no_field_at_its_default(name: str) -> None:
    """A codec that forgets such a field would go unnoticed."""
    value = CODECS[name][0]
    assert not is_dataclass(value) or all(getattr(value, field.name) for field in fields(value))


def test_what_is_not_there_yet_stays_away() -> None:
    info = WorkerInfo("w", "i", "v1", WorkerState.CREATED, 0, "", "", None, None)
    message = worker_info.encode_worker_info(info)
    absent = ("model", "cache", "group", "sleep", "lora")
    assert not any(message.HasField(name) for name in absent)
    assert worker_info.decode_worker_info(message) == info
    assert not workers.encode_device_request(DeviceRequest(parallel=ALONE)).HasField("parallel")
    assert not workers.encode_load_request(LoadRequest()).HasField("lora")


ENUMS: list[tuple[Any, Any, str]] = [
    (DeviceType, pb.DeviceType, "DEVICE_TYPE_"),
    (Dtype, pb.Dtype, "DTYPE_"),
    (Quantization, pb.Quantization, "QUANTIZATION_"),
    (LoadFormat, pb.LoadFormat, "LOAD_FORMAT_"),
    (CollectivesKind, pb.CollectivesKind, "COLLECTIVES_KIND_"),
    (StateFormat, administration_pb2.StateFormat, "STATE_FORMAT_"),
    (MemoryTag, administration_pb2.MemoryTag, "MEMORY_TAG_"),
    (WorkerState, status_pb2.WorkerState, "WORKER_STATE_"),
]


@pytest.mark.parametrize(("ours", "generated", "prefix"), ENUMS)
def test_every_name_of_the_protocol_has_a_member(ours: Any, generated: Any, prefix: str) -> None:
    names = {name.removeprefix(prefix) for name, _ in generated.items()}
    assert {member.name for member in ours} | {"UNSPECIFIED"} == names


def test_what_a_later_version_says_is_unspecified() -> None:
    told: Any = {"state": 99, "sleep": {"asleep": [2, 99]}, "model": {"task": 99, "dtype": 99, "quantization": 99}}
    info = worker_info.decode_worker_info(pb.GetWorkerInfoResponse(**told))
    assert (info.state, info.sleep.asleep) == (WorkerState.UNSPECIFIED, {MemoryTag.KV_CACHE})
    assert info.model is not None
    assert (info.model.task, info.model.dtype, info.model.quantization) == (
        Task.UNSPECIFIED,
        Dtype.UNSPECIFIED,
        Quantization.UNSPECIFIED,
    )
    assert worker_info.COLLECTIVES.decode(99) is CollectivesKind.UNSPECIFIED


@pytest.mark.parametrize(
    ("decode", "message", "named"),
    [
        (workers.decode_device_request, pb.InitDeviceRequest, ["device_type", "dtype"]),
        (workers.decode_load_request, pb.LoadModelRequest, ["quantization", "format", "task"]),
        (workers.decode_save_request, pb.SaveStateRequest, ["format"]),
    ],
)
def test_what_a_later_version_asks_for_is_refused(decode: Any, message: Any, named: list[str]) -> None:
    with pytest.raises(BlockyardError) as caught:
        decode(message(**dict.fromkeys(named, 99)))
    assert caught.value.reason is Reason.FIELD_INVALID
    assert [violation.field for violation in caught.value.violations] == named


def test_what_is_only_held_is_not_loaded() -> None:
    with pytest.raises(BlockyardError, match="quantization: 3 is not known to this worker"):
        workers.decode_load_request(pb.LoadModelRequest(quantization=pb.QUANTIZATION_INT4_GROUP))


def test_unknown_tags_are_refused_where_they_are_asked_for() -> None:
    assert workers.decode_known_tags([1, 2]) == set(MemoryTag)
    assert workers.encode_tags(frozenset(MemoryTag)) == [1, 2]
    with pytest.raises(BlockyardError, match="tags: 9 is not known"):
        workers.decode_known_tags([1, 9])


def test_only_sequences_with_a_state_may_have_no_kv_group() -> None:
    """A worker without states that names no group is of another version, and has one that keeps all."""
    has_states = replace(CACHE, kv_windows=())
    assert workers.CACHE_INFO.decode(workers.CACHE_INFO.encode(has_states)) == has_states
    has_none = replace(has_states, num_state_blocks=0)
    assert workers.CACHE_INFO.decode(workers.CACHE_INFO.encode(has_none)).kv_windows == (0,)
