"""What a fake worker does as a rank of a group: meets the others at rank 0, by the protocol, and hashes its steps."""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import grpc.aio

from blockyard.common.v1 import status_pb2
from blockyard.errors import BlockyardError, Reason
from blockyard.service import faults
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.transport import Transport
    from tests.kit.fakes.fake_worker import FakeWorkerOptions


class FakeGroup:
    """The part of a fake worker that knows its replica."""

    options: FakeWorkerOptions
    address: str
    incarnation: str
    epoch: int
    transport: Transport
    parallel: worker_pb2.Parallel | None = None
    group: worker_pb2.GroupInfo | None = None
    # How often it formed a group, took one over, and was told to leave one.
    num_formed = num_reused = num_left = 0
    # Faults that a test asks for: refuse to form a group, lose the group in the next step, hash a step wrong in each of
    # so many epochs from now on.
    refuse_group: BlockyardError | None = None
    lose_group_next = False
    num_epochs_to_skew = 0

    def __init__(self) -> None:
        self._secret = b""
        self._keys: defaultdict[str, asyncio.Future[bytes]] = defaultdict(asyncio.Future)

    @property
    def world_size(self) -> int:
        """The workers of its replica."""
        if self.parallel is None:
            return 1
        return self.parallel.tensor_parallel_size * self.parallel.pipeline_parallel_size

    @property
    def rank(self) -> int:
        """Its place among them."""
        return self.parallel.rank if self.parallel else 0

    @property
    def has_stages(self) -> bool:
        """Whether no rank appends what is sampled."""
        return self.parallel is not None and self.parallel.pipeline_parallel_size > 1

    @property
    def is_in_last_stage(self) -> bool:
        """Whether it hashes what was sampled."""
        return self.parallel is not None and self.rank >= self.world_size - self.parallel.tensor_parallel_size

    @property
    def is_sampling(self) -> bool:
        """Whether it tells what was sampled."""
        return self.parallel is None or self.rank == self.world_size - self.parallel.tensor_parallel_size

    def break_group(self, problem: str) -> None:
        """Its group is whole no more."""
        if self.group is not None and not self.group.problem:
            self.group.reusable, self.group.problem = False, problem

    def _require(self, *states: int) -> None:
        raise NotImplementedError

    def _end_streams(self) -> None:
        raise NotImplementedError

    def _require_group(self, epoch: int, members: Sequence[str]) -> None:
        self._require(*range(status_pb2.WORKER_STATE_DEVICE_READY, status_pb2.WORKER_STATE_RUNNING + 1))
        if self.world_size == 1:
            raise BlockyardError(Reason.WRONG_STATE, "a world of one has no group")
        if len(members) != self.world_size or members[self.rank] != self.incarnation:
            raise BlockyardError(Reason.WRONG_STATE, "another worker is meant")
        if epoch < self.epoch:
            raise BlockyardError(Reason.WRONG_STATE, f"epoch {epoch} after {self.epoch}")

    async def OpenRendezvous(self, request: worker_pb2.OpenRendezvousRequest, context: Any) -> Any:
        self._require_group(request.epoch, request.members)
        assert self.rank == 0
        self._secret = f"{request.epoch:016d}".encode()
        self._keys.clear()
        port = 0 if self.address.startswith("unix:") else int(self.address.rpartition(":")[2])
        return worker_pb2.OpenRendezvousResponse(port=port, secret=self._secret)

    async def SetRendezvousKey(self, request: worker_pb2.SetRendezvousKeyRequest, context: Any) -> Any:
        self._require_secret(request.secret)
        self._keys[request.key].set_result(request.value)
        return worker_pb2.SetRendezvousKeyResponse()

    async def GetRendezvousKey(self, request: worker_pb2.GetRendezvousKeyRequest, context: Any) -> Any:
        self._require_secret(request.secret)
        return worker_pb2.GetRendezvousKeyResponse(value=await asyncio.shield(self._keys[request.key]))

    def _require_secret(self, secret: bytes) -> None:
        if not secret or secret != self._secret:
            raise BlockyardError(Reason.PERMISSION_DENIED, "nobody meets here with this secret")

    async def FormGroup(self, request: worker_pb2.FormGroupRequest, context: Any) -> Any:
        self._require_group(request.epoch, request.members)
        if self.refuse_group is not None:
            error, self.refuse_group = self.refuse_group, None
            raise error
        faults.reach(faults.BEFORE_JOIN)
        self._end_streams()
        digest = hashlib.sha256("".join(f"{member}\n" for member in request.members).encode()).digest()
        if not request.reuse:
            await self._meet(request)
            self.num_formed += 1
        elif self.group is None or not self.group.reusable or self.group.members_digest != digest:
            raise BlockyardError(Reason.WRONG_STATE, "there is no such group")
        else:
            self.num_reused += 1
        self.group = worker_pb2.GroupInfo(epoch=request.epoch, reusable=True, members_digest=digest)
        return worker_pb2.FormGroupResponse(kind=worker_pb2.COLLECTIVES_KIND_GLOO)

    async def _meet(self, request: worker_pb2.FormGroupRequest) -> None:
        """Says at rank 0 that it is there, and waits for all."""
        channel = internal_channel(request.rendezvous_address, transport=self.transport)
        stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
        timeout = request.timeout.ToTimedelta().total_seconds()
        told = {"epoch": request.epoch, "secret": request.secret}
        try:
            await stub.SetRendezvousKey(
                worker_pb2.SetRendezvousKeyRequest(key=str(self.rank), value=b"here", **told), timeout=timeout
            )
            for rank in range(self.world_size):
                await stub.GetRendezvousKey(worker_pb2.GetRendezvousKeyRequest(key=str(rank), **told), timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise BlockyardError(Reason.GROUP_BROKEN, f"not all ranks have come: {error.details()}") from None
        finally:
            await channel.close()

    async def LeaveGroup(self, request: worker_pb2.LeaveGroupRequest, context: Any) -> Any:
        if self.group is not None and self.group.epoch <= request.epoch:
            self.num_left += 1
            self.break_group(request.reason)
        return worker_pb2.LeaveGroupResponse()


class Digests:
    """The chained hashes of one epoch."""

    def __init__(self) -> None:
        self._inputs = self._outputs = b""

    def add(self, step: bytes, answer: worker_pb2.ExecuteModelResponse) -> tuple[int, int]:
        """Adds a step and what was sampled; returns both hashes."""
        self._inputs = _hash(self._inputs + step)
        self._outputs = _hash(self._outputs + repr((answer.sequence_ids, answer.token_ids, answer.num_tokens)).encode())
        return int.from_bytes(self._inputs), int.from_bytes(self._outputs)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()
