"""Decodes and encodes what WorkerService says of groups of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.parallel import ALONE, Parallel
from blockyard.worker.v1 import worker_pb2
from worker_service.groups.joining import GroupRequest

if TYPE_CHECKING:
    from worker_service.groups.membership import GroupInfo

COLLECTIVES_KINDS = {
    "gloo": worker_pb2.COLLECTIVES_KIND_GLOO,
    "nccl": worker_pb2.COLLECTIVES_KIND_NCCL,
}


def encode_group(info: GroupInfo | None) -> worker_pb2.GroupInfo | None:
    """Encodes the group that a worker is in, or was in last."""
    if info is None:
        return None
    return worker_pb2.GroupInfo(
        epoch=info.epoch, reusable=info.reusable, problem=info.problem, members_digest=info.members_digest
    )


def decode_parallel(message: worker_pb2.InitDeviceRequest) -> Parallel:
    """Decodes a worker's place in its replica; absent: a world of one."""
    if not message.HasField("parallel"):
        return ALONE
    parallel = message.parallel
    return Parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank)


def decode_group_request(message: worker_pb2.FormGroupRequest) -> GroupRequest:
    """Decodes a request to join a group."""
    return GroupRequest(
        message.epoch,
        message.rendezvous_address,
        message.secret,
        tuple(message.members),
        message.timeout.ToNanoseconds() / 1e9,
        message.reuse,
    )
