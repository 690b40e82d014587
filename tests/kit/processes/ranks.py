"""The workers of one replica, driven as a scheduler would: set up as ranks, formed into groups."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockyard.worker.v1 import worker_pb2 as pb
from blockyard.worker.v1 import worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import grpc.aio

FORM_SECONDS = 20
CACHE = pb.InitializeCacheRequest(
    block_size=8, num_device_blocks=17, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4
)


@dataclass
class Ranks:
    """Workers by rank. `address` is that of rank 0."""

    channels: Sequence[grpc.aio.Channel]
    address: str

    def __post_init__(self) -> None:
        self.stubs = [worker_pb2_grpc.WorkerServiceStub(channel) for channel in self.channels]

    async def each(self, call: Any) -> list[Any]:
        """Calls every rank at once with (rank, stub), and gives answers and errors by rank."""
        calls = [call(rank, stub) for rank, stub in enumerate(self.stubs)]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def infos(self) -> list[pb.GetWorkerInfoResponse]:
        """Asks every rank who it is."""
        return [await stub.GetWorkerInfo(pb.GetWorkerInfoRequest()) for stub in self.stubs]

    async def members(self) -> list[str]:
        """The incarnations, by rank."""
        return [info.incarnation for info in await self.infos()]

    async def wait_for(self, rank: int, condition: Any) -> None:
        """Asks a rank until what it says fulfils a condition."""
        async with asyncio.timeout(20):
            # What another process says of itself: there is no event to wait for.
            while not condition(await self.stubs[rank].GetWorkerInfo(pb.GetWorkerInfoRequest())):  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def init(self, tensor: int, pipeline: int = 1, **fields: Any) -> None:
        """Brings every rank to DEVICE_READY."""
        for rank, stub in enumerate(self.stubs):
            parallel = pb.Parallel(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, rank=rank)
            await stub.InitDevice(
                pb.InitDeviceRequest(
                    device_type=pb.DEVICE_TYPE_CPU, configuration_digest="d", parallel=parallel, **fields
                )
            )

    async def prepare(self, model: Path, tensor: int, pipeline: int = 1) -> None:
        """Brings every rank that is CREATED to LOADED."""
        for rank, (stub, info) in enumerate(zip(self.stubs, await self.infos(), strict=True)):
            if info.HasField("model"):
                continue
            parallel = pb.Parallel(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, rank=rank)
            await stub.InitDevice(
                pb.InitDeviceRequest(
                    device_type=pb.DEVICE_TYPE_CPU,
                    dtype=pb.DTYPE_FLOAT32,
                    configuration_digest="set up",
                    parallel=parallel,
                )
            )
            assert [event async for event in stub.LoadModel(pb.LoadModelRequest(model=str(model)))]

    async def make_caches(self) -> None:
        """Brings every rank that is LOADED to CACHE_READY, in a group: the least that steps need."""
        stubs = [stub for stub, info in zip(self.stubs, await self.infos(), strict=True) if not info.HasField("cache")]
        await asyncio.gather(*[stub.InitializeCache(CACHE) for stub in stubs])

    async def request(self, epoch: int, **fields: Any) -> pb.FormGroupRequest:
        """Opens the meeting point, and makes the request that goes to every rank."""
        members = fields.pop("members", None) or await self.members()
        opened = await self.stubs[0].OpenRendezvous(pb.OpenRendezvousRequest(epoch=epoch, members=members))
        address = f"{self.address.rpartition(':')[0]}:{opened.port}" if opened.port else self.address
        fields = {"timeout": {"seconds": FORM_SECONDS}, "secret": opened.secret} | fields
        return pb.FormGroupRequest(epoch=epoch, rendezvous_address=address, members=members, **fields)

    async def form(self, epoch: int, **fields: Any) -> list[Any]:
        """Forms a group, and gives answers and errors by rank."""
        request = await self.request(epoch, **fields)
        return await self.each(lambda rank, stub: stub.FormGroup(request))

    async def leave(self, epoch: int, reason: str = "a test") -> None:
        """Ends a group at every rank."""
        for stub in self.stubs:
            await stub.LeaveGroup(pb.LeaveGroupRequest(epoch=epoch, reason=reason))
