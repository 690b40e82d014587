"""Encodes and decodes who a worker is, the group that it is in, and the adapters that it has."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration

from blockyard.common.v1 import status_pb2
from blockyard.contract.codec.messages import EnumCodec, FieldCodec, MessageCodec
from blockyard.contract.codec.workers import CACHE_INFO, LORA_LIMITS, MODEL, SLEEP_INFO
from blockyard.contract.scheduling import Adapter
from blockyard.contract.workers import (
    CollectivesKind,
    GroupInfo,
    GroupRequest,
    LoraInfo,
    Placement,
    WorkerInfo,
    WorkerState,
)
from blockyard.worker.v1 import worker_pb2

STATES = EnumCodec(WorkerState, status_pb2.WorkerState.items(), "WORKER_STATE_")
COLLECTIVES = EnumCodec(CollectivesKind, worker_pb2.CollectivesKind.items(), "COLLECTIVES_KIND_")
ADAPTER = MessageCodec(Adapter, worker_pb2.LoraAdapter)
_ADAPTERS = FieldCodec(
    lambda adapters: list(map(ADAPTER.encode, adapters)), lambda messages: tuple(map(ADAPTER.decode, messages))
)
_INFO = MessageCodec(
    WorkerInfo,
    worker_pb2.GetWorkerInfoResponse,
    state=STATES,
    model=MODEL,
    cache=CACHE_INFO,
    group=MessageCodec(GroupInfo, worker_pb2.GroupInfo),
    placement=MessageCodec(Placement, worker_pb2.Placement),
    sleep=SLEEP_INFO,
    lora=MessageCodec(LoraInfo, worker_pb2.LoraInfo, limits=LORA_LIMITS, adapters=_ADAPTERS),
)


def encode_worker_info(info: WorkerInfo) -> worker_pb2.GetWorkerInfoResponse:
    """Encodes who a worker is; what is asleep is left out before there is a model."""
    message = _INFO.encode(info)
    if info.model is None:
        message.ClearField("sleep")
    return message


def decode_worker_info(message: worker_pb2.GetWorkerInfoResponse) -> WorkerInfo:
    return _INFO.decode(message)


def encode_duration(seconds: float) -> Duration:
    """Encodes a time that is not below 0."""
    whole = int(seconds)
    return Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def encode_group_request(request: GroupRequest) -> worker_pb2.FormGroupRequest:
    return worker_pb2.FormGroupRequest(
        epoch=request.epoch,
        rendezvous_address=request.rendezvous_address,
        secret=request.secret,
        members=request.members,
        timeout=encode_duration(request.timeout_seconds),
        reuse=request.reuse,
    )


def decode_group_request(message: worker_pb2.FormGroupRequest) -> GroupRequest:
    return GroupRequest(
        message.epoch,
        message.rendezvous_address,
        message.secret,
        tuple(message.members),
        message.timeout.ToNanoseconds() / 1e9,
        message.reuse,
    )
