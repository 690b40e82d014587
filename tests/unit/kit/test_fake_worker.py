"""The stand-in is strict: whatever breaks the step stream's rules is refused in-band, and so is all that follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from blockyard.common.v1 import status_pb2
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.kit.fakes.fake_worker import FakeWorker, FakeWorkerOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def worker(sockets: str) -> AsyncIterator[FakeWorker]:
    async with FakeWorker(FakeWorkerOptions(), f"unix:{sockets}/worker") as worker:
        worker.state = status_pb2.WORKER_STATE_CACHE_READY
        worker.cache = worker_pb2.CacheInfo(block_size=4, num_device_blocks=10, num_host_blocks=2)
        yield worker


@pytest.fixture
async def stub(worker: FakeWorker) -> AsyncIterator[Any]:
    async with internal_channel(worker.address) as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel)


def new(sequence_id: int, blocks: list[int], num_tokens: int = 4) -> worker_pb2.NewSequence:
    return worker_pb2.NewSequence(
        sequence_id=sequence_id, token_ids=range(num_tokens), prompt_length=num_tokens, block_ids=blocks
    )


def step(step_id: int, epoch: int = 1, **fields: Any) -> worker_pb2.ExecuteModelRequest:
    return worker_pb2.ExecuteModelRequest(epoch=epoch, step_id=step_id, **fields)


FIRST = step(1, new_sequences=[new(1, [1])], sequence_ids=[1], num_new_tokens=[4])


async def answers(stub: Any, *steps: worker_pb2.ExecuteModelRequest) -> list[worker_pb2.ExecuteModelResponse]:
    call = stub.ExecuteModel()
    for message in steps:
        await call.write(message)
    received = [await call.read() for _ in steps]
    call.cancel()
    return received


async def test_a_good_step_is_answered(stub: Any) -> None:
    decode = step(2, sequence_ids=[1], num_new_tokens=[1], appended_sequence_ids=[1], appended_block_ids=[2])
    first, second = await answers(stub, FIRST, decode)
    assert (first.epoch, first.step_id, list(first.sequence_ids), len(first.token_ids)) == (1, 1, [1], 1)
    assert (second.step_id, list(second.sequence_ids)) == (2, [1])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (step(3), "step 3 after step 1"),
        (step(1), "step 1 after step 1"),
        (step(2, epoch=2), "epoch 2 where 1 runs"),
        (step(2, sequence_ids=[9], num_new_tokens=[1]), "sequence 9 is unknown"),
        (step(2, sequence_ids=[1], num_new_tokens=[1]), "beyond the table"),
        (step(2, appended_sequence_ids=[1], appended_block_ids=[10]), "device block 10"),
        (step(2, appended_sequence_ids=[1], appended_block_ids=[0]), "device block 0"),
        (step(2, blocks_to_swap_out=worker_pb2.BlockPairs(sources=[1], destinations=[2])), "host block 2"),
        (
            step(2, new_sequences=[new(2, [1])], sequence_ids=[2, 1], num_new_tokens=[3, 0]),
            "computes nothing and is no child",
        ),
    ],
)
async def test_what_breaks_a_rule_is_refused(
    stub: Any, worker: FakeWorker, bad: worker_pb2.ExecuteModelRequest, message: str
) -> None:
    first, refused, after = await answers(stub, FIRST, bad, step(bad.step_id + 1))
    assert not first.HasField("refusal")
    assert message in refused.refusal.message
    assert after.HasField("refusal")
    assert message in worker.refusals[0]


async def test_an_old_epoch_is_refused(stub: Any, worker: FakeWorker) -> None:
    worker.epoch = 5
    (refused,) = await answers(stub, step(1, epoch=5))
    assert refused.HasField("refusal")


async def test_a_new_stream_ends_the_old_one_and_forgets_its_sequences(stub: Any) -> None:
    old = stub.ExecuteModel()
    await old.write(FIRST)
    await old.read()
    (refused,) = await answers(stub, step(1, epoch=2, sequence_ids=[1], num_new_tokens=[1]))
    assert "unknown" in refused.refusal.message
    assert await old.read() is grpc.aio.EOF


async def test_an_rpc_in_the_wrong_state_is_told(stub: Any, worker: FakeWorker) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.InitializeCache(worker_pb2.InitializeCacheRequest())
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert worker.plans == []
