"""Drives a real worker over a real socket, step by step, as a scheduler would."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc

from blockyard.common.v1 import sampling_pb2
from blockyard.configuration import InternalSecuritySettings
from blockyard.errors import from_rpc_error, from_status
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2 as pb
from blockyard.worker.v1 import worker_pb2_grpc
from worker_service.config import WorkerConfiguration, WorkerSettings
from worker_service.server import Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from pathlib import Path

    from blockyard.errors import BlockyardError
    from blockyard.security.tls import Peer

BLOCK_SIZE = 8
GREEDY = sampling_pb2.SamplingParams(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    seed=0,
)


def sampling(**fields: Any) -> sampling_pb2.SamplingParams:
    """Greedy, but for some fields."""
    params = sampling_pb2.SamplingParams()
    params.CopyFrom(GREEDY)
    params.MergeFrom(sampling_pb2.SamplingParams(**fields))
    return params


def new_sequence(sequence_id: int, token_ids: Sequence[int], block_ids: Sequence[int], **fields: Any) -> pb.NewSequence:
    """A prompt that starts, greedy unless told otherwise; `sampling` and `pooling` are messages."""
    fields = {"prompt_length": len(token_ids), "sampling": GREEDY} | fields
    for name in {"sampling", "pooling"} & fields.keys():
        fields[f"{name}_params"] = fields.pop(name).SerializeToString()
    return pb.NewSequence(sequence_id=sequence_id, token_ids=token_ids, block_ids=block_ids, **fields)


def pairs(*sources_and_destinations: tuple[int, int]) -> pb.BlockPairs:
    """Pairs of (source, destination)."""
    sources, destinations = zip(*sources_and_destinations, strict=True)
    return pb.BlockPairs(sources=sources, destinations=destinations)


@dataclass
class StepDriver:
    """One step stream: numbers the steps and checks that answers come in order."""

    call: Any
    epoch: int
    last_sent: int = 0
    last_answered: int = 0
    held: list[pb.ExecuteModelResponse] = field(default_factory=list)

    async def send(self, **fields: Any) -> None:
        """Sends a step and does not wait for its answer."""
        self.last_sent = fields.pop("step_id", self.last_sent + 1)
        epoch = fields.pop("epoch", self.epoch)
        await self.call.write(pb.ExecuteModelRequest(epoch=epoch, step_id=self.last_sent, **fields))

    async def answer(self) -> pb.ExecuteModelResponse:
        """Waits for the next answer."""
        response = await asyncio.wait_for(self.call.read(), 20)
        assert isinstance(response, pb.ExecuteModelResponse), "the stream has ended"
        return response

    async def step(self, **fields: Any) -> pb.ExecuteModelResponse:
        """Sends a step and waits for its answer, which must not be a refusal."""
        await self.send(**fields)
        response = await self.answer()
        assert not response.HasField("refusal"), from_status(response.refusal)
        assert response.step_id == self.last_sent
        return response

    async def sampled(self, **fields: Any) -> dict[int, int]:
        """Does a step and gives the sampled token of each sequence."""
        response = await self.step(**fields)
        return dict(zip(response.sequence_ids, response.token_ids, strict=True))

    async def refused(self, **fields: Any) -> BlockyardError:
        """Sends a step that must be refused, and gives why."""
        await self.send(**fields)
        response = await self.answer()
        assert response.HasField("refusal"), "the step was not refused"
        assert not response.sequence_ids
        return from_status(response.refusal)

    async def failed(self, **fields: Any) -> BlockyardError:
        """Does a step in which one sequence must fail alone, and gives why."""
        [failure] = (await self.step(**fields)).failures
        return from_status(failure.status)

    async def end_error(self) -> BlockyardError:
        """Waits until the worker ends the stream with an error, and gives it."""
        try:
            while True:
                assert await asyncio.wait_for(self.call.read(), 20) is not grpc.aio.EOF, "it ended without an error"
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)

    async def decode(self, sequence_id: int, num_tokens: int, **fields: Any) -> list[int]:
        """Decodes a sequence alone."""
        tokens = []
        for _ in range(num_tokens):
            tokens.append((await self.sampled(sequence_ids=[sequence_id], num_new_tokens=[1], **fields))[sequence_id])
        return tokens


class WorkerDriver:
    """A worker's client."""

    def __init__(self, server: Server, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.channel = channel
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._streams: list[StepDriver] = []

    async def info(self) -> pb.GetWorkerInfoResponse:
        """Asks who it is."""
        return await self.stub.GetWorkerInfo(pb.GetWorkerInfoRequest())

    async def load(self, model: Path, dtype: int = pb.DTYPE_FLOAT32) -> list[pb.LoadModelResponse]:
        """Brings it to LOADED."""
        await self.stub.InitDevice(
            pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, dtype=dtype, configuration_digest="digest")
        )
        return [event async for event in self.stub.LoadModel(pb.LoadModelRequest(model=str(model)))]

    async def initialize_cache(self, **fields: Any) -> pb.CacheInfo:
        """Brings a loaded one to CACHE_READY."""
        asked = {
            "block_size": BLOCK_SIZE,
            "num_device_blocks": 65,
            "num_host_blocks": 16,
            "max_model_len": 256,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 16,
        } | fields
        return (await self.stub.InitializeCache(pb.InitializeCacheRequest(**asked))).cache

    async def prepare(self, model: Path, dtype: int = pb.DTYPE_FLOAT32, **cache: Any) -> pb.CacheInfo:
        """Brings a fresh one to CACHE_READY."""
        await self.load(model, dtype)
        return await self.initialize_cache(**cache)

    async def send_weights(self, pieces: Iterator[pb.UpdateWeightsRequest]) -> pb.UpdateWeightsResponse:
        """Sends tensors as a trainer does, over a channel with threads.

        grpc.aio gives an internal error instead of the worker's own one if the worker ends the call during a write.
        """

        def send() -> pb.UpdateWeightsResponse:
            with grpc.insecure_channel(self.server.address) as channel:
                return worker_pb2_grpc.WorkerServiceStub(channel).UpdateWeights(pieces)

        return await asyncio.to_thread(send)

    def open(self, epoch: int) -> StepDriver:
        """Opens a step stream."""
        driver = StepDriver(self.stub.ExecuteModel(), epoch)
        self._streams.append(driver)
        return driver

    async def checksums(self, device: Sequence[int] = (), host: Sequence[int] = ()) -> tuple[list[bytes], list[bytes]]:
        """Hashes blocks."""
        request = pb.ChecksumBlocksRequest(device_block_ids=device, host_block_ids=host)
        response = await self.stub.ChecksumBlocks(request)
        return list(response.device_checksums), list(response.host_checksums)

    async def close_streams(self) -> None:
        """Breaks every stream."""
        for stream in self._streams:
            stream.call.cancel()

    async def wait_for(self, condition: Any) -> pb.GetWorkerInfoResponse:
        """Asks until what it says fulfils a condition."""
        async with asyncio.timeout(10):
            # What another process says of itself: there is no event to wait for.
            while not condition(info := await self.info()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return info


@asynccontextmanager
async def running_worker(
    folder: Path,
    internal: InternalSecuritySettings | None = None,
    peer: Peer | None = None,
    **settings: Any,
) -> AsyncIterator[WorkerDriver]:
    """Starts a worker, on a Unix socket of its own unless told otherwise, and stops it.

    `internal`: its certificate; `peer`: what its driver opens it with.
    """
    common = {"enable_debug_rpcs": True, "num_threads": 1, "worker_device": "cpu", "worker_address": f"unix:{folder}/w"}
    common["worker_extension"] = "tests.kit.worker_extension:Example"
    common["worker_save_root"] = str(folder / "saved")
    server = Server(
        WorkerConfiguration(worker=WorkerSettings(**common | settings), internal=internal or InternalSecuritySettings())
    )
    await server.start()
    async with internal_channel(server.address, peer) as channel:
        driver = WorkerDriver(server, channel)
        try:
            yield driver
        finally:
            await driver.close_streams()
            # Unless the test has stopped it.
            if not server.worker.is_draining:
                await server.stop()


async def fails(awaitable: Any) -> BlockyardError:
    """Awaits a call that must fail, and gives its error."""
    try:
        await awaitable
    except grpc.RpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call did not fail")
