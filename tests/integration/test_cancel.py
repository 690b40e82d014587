"""Cancelling frees at once, however it is done, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from blockyard import AsyncClient
from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2, inference_pb2_grpc
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from tests.kit.processes.status import scheduler_status
from tests.kit.processes.system import System

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_CANCELS = 1000
FLAGS = ["--dtype", "float32", "--block-size", "16", "--max-model-len", "512", "--num-device-blocks", "100"]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    # A scheduler that waits for no gateway to come back knows at once what runs.
    flags = [*FLAGS, "--num-host-blocks", "50", "--max-num-seqs", "16", "--debug-integrity", "--reattach-seconds", "0"]
    with System(tiny_model("llama"), tmp_path_factory.mktemp("cancel"), flags) as system:
        yield system


@contextmanager
def pausing_worker(system: System) -> Iterator[None]:
    """Lets no step end inside the block."""
    process = system.services["worker"].process
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def wait_until_idle(system: System) -> None:
    """Waits until nothing runs, waits or holds a block; polls the status, since idleness is no event."""
    for _ in range(200):
        status = await asyncio.to_thread(scheduler_status, system)
        replica = status.replicas[0]
        counts = (status.num_waiting_requests, replica.num_running_sequences, replica.num_swapped_sequences)
        free = (replica.device_blocks.num_free_blocks, replica.host_blocks.num_free_blocks)
        if not any(counts) and free == (replica.device_blocks.num_blocks, replica.host_blocks.num_blocks):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"left behind: {status}")


def make_spec(rng: random.Random) -> inference_pb2.GenerationSpec:
    """A request that would run long."""
    prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randrange(1, 80))]
    return inference_pb2.GenerationSpec(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        n=rng.choice([1, 1, 2]),
        stop=sampling_pb2.StopCriteria(max_tokens=400, ignore_eos=True),
    )


@pytest.mark.timeout(300)
async def test_a_thousand_random_cancels_leave_nothing_behind(system: System) -> None:
    """By cancelling the call, by CancelGenerate and by closing the connection, at random moments."""
    rng = random.Random(3)

    async def one(number: int) -> None:
        kind = number % 3
        num_events = rng.choice([0, 1, 1, 2, 3, 6])
        async with grpc.aio.insecure_channel(system.grpc_target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            spec = make_spec(rng)
            spec.request_id = f"cancelled-{number}"
            call = stub.StreamGenerate(inference_pb2.StreamGenerateRequest(spec=spec))
            for _ in range(num_events):
                await call.read()
            if kind == 0:
                call.cancel()
            elif kind == 1:
                request = inference_pb2.CancelGenerateRequest(request_ids=[spec.request_id])
                # It may have ended by itself just now.
                if (await stub.CancelGenerate(request)).cancelled_request_ids and num_events:
                    with pytest.raises(grpc.aio.AioRpcError) as raised:
                        while await call.read() != grpc.aio.EOF:
                            pass
                    assert raised.value.code() is grpc.StatusCode.CANCELLED
            # Else leaving the block closes the connection with the call open.

    queue = list(range(NUM_CANCELS))

    async def worker() -> None:
        while queue:
            await one(queue.pop())

    await asyncio.gather(*(worker() for _ in range(24)))
    await wait_until_idle(system)
    assert scheduler_status(system).replicas[0].ready


async def test_cancel_tells_which_ran_and_ends_their_streams(system: System) -> None:
    async with AsyncClient(system.grpc_target) as client:
        stream = client.stream([7, 8, 9], request_id="one", max_tokens=400, ignore_eos=True)
        await anext(stream)
        with pausing_worker(system):
            assert await client.cancel("one", "unknown") == ["one"]
        with pytest.raises(BlockyardError) as raised:
            async for _ in stream:
                pass
        assert raised.value.reason is Reason.CLIENT_CANCELLED
        assert await client.cancel("one") == []
    await wait_until_idle(system)


async def test_blocks_are_free_before_the_second_next_step(system: System) -> None:
    """Steps are told in the scheduler's log: none after the next two computes the cancelled sequence."""
    async with AsyncClient(system.grpc_target) as client:
        stream = client.stream([7, 8, 9], request_id="two", max_tokens=500, ignore_eos=True)
        await anext(stream)
        other = client.stream([4, 5, 6], max_tokens=500, ignore_eos=True)
        await anext(other)
        with pausing_worker(system):
            await client.cancel("two")
            log_length = len(system.log("scheduler"))
        rest = [event async for event in other]
    assert rest
    steps = [line for line in system.log("scheduler")[log_length:].splitlines() if " step " in line]
    assert len(steps) > 10
    assert not any("num_sequences=2" in line for line in steps[2:])
    await wait_until_idle(system)
