"""A worker that is told to quantize: what it says of itself, and where it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.common.v1 import status_pb2
from blockyard.errors import Reason
from blockyard.worker.v1 import worker_pb2 as pb
from tests.unit.worker_service.driver import WorkerDriver, fails, new_sequence, running_worker

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = list(range(3, 40))


async def load(worker: WorkerDriver, model: Path, quantization: int, dtype: int = pb.DTYPE_BFLOAT16) -> pb.LoadedModel:
    await worker.stub.InitDevice(pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, dtype=dtype))
    request = pb.LoadModelRequest(model=str(model), quantization=quantization)
    return [event async for event in worker.stub.LoadModel(request)][-1].loaded


async def generate(worker: WorkerDriver, num_tokens: int) -> list[int]:
    """Greedy tokens of one prompt alone."""
    stream = worker.open(1)
    blocks = list(range(1, 8))
    first = await stream.sampled(
        sequence_ids=[1], num_new_tokens=[len(PROMPT)], new_sequences=[new_sequence(1, PROMPT, blocks)]
    )
    return [first[1], *await stream.decode(1, num_tokens - 1)]


async def test_it_tells_what_it_holds(fresh_worker: WorkerDriver, model: Path) -> None:
    loaded = await load(fresh_worker, model, pb.QUANTIZATION_INT8)
    assert (loaded.quantization, loaded.dtype) == (pb.QUANTIZATION_INT8, pb.DTYPE_BFLOAT16)
    assert (await fresh_worker.info()).model == loaded


async def test_it_generates_and_says_that_its_bits_are_its_own(socket_folder: Path, model: Path) -> None:
    identities: set[str] = set()
    sizes: list[int] = []
    for quantization in (pb.QUANTIZATION_UNSPECIFIED, pb.QUANTIZATION_INT8):
        async with running_worker(socket_folder) as worker:
            sizes.append((await load(worker, model, quantization)).parameter_bytes)
            cache = await worker.initialize_cache()
            assert cache.batch_invariant
            identities.add(cache.determinism_id)
            assert len(await generate(worker, 8)) == 8
    assert len(identities) == 2
    assert sizes[1] < 0.75 * sizes[0]


async def test_blocks_in_int8_are_half_as_large_and_their_bits_their_own(socket_folder: Path, model: Path) -> None:
    identities: dict[int, str] = {}
    sizes: dict[int, int] = {}
    for kv_cache_dtype in (pb.DTYPE_UNSPECIFIED, pb.DTYPE_BFLOAT16, pb.DTYPE_INT8):
        async with running_worker(socket_folder) as worker:
            init = pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, dtype=pb.DTYPE_BFLOAT16)
            await worker.stub.InitDevice(init)
            load = pb.LoadModelRequest(model=str(model), kv_cache_dtype=kv_cache_dtype)
            assert [event async for event in worker.stub.LoadModel(load)][-1].loaded.dtype == pb.DTYPE_BFLOAT16
            cache = await worker.initialize_cache()
            assert cache.batch_invariant
            identities[kv_cache_dtype], sizes[kv_cache_dtype] = cache.determinism_id, cache.cache_block_bytes
            (group,) = (await worker.info()).kv_groups
            assert group.dtype == (kv_cache_dtype or pb.DTYPE_BFLOAT16)
            assert len(await generate(worker, 8)) == 8
            # A scale of 4 bytes for each key and value of a head.
            item = 1 + 4 / group.head_dim if kv_cache_dtype == pb.DTYPE_INT8 else 2
            numbers = len(group.layers) * 2 * group.num_kv_heads * group.block_size * group.head_dim
            assert group.page_bytes == cache.cache_block_bytes == numbers * item
    assert identities[pb.DTYPE_UNSPECIFIED] == identities[pb.DTYPE_BFLOAT16] != identities[pb.DTYPE_INT8]


async def test_no_model_computes_in_int8(fresh_worker: WorkerDriver) -> None:
    request = pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, dtype=pb.DTYPE_INT8)
    error = await fails(fresh_worker.stub.InitDevice(request))
    assert error.reason is Reason.FIELD_INVALID


@pytest.mark.parametrize(
    ("settings", "dtype", "told"),
    [
        ({"cpu_kernels": "reference"}, pb.DTYPE_BFLOAT16, "kernels: reference"),
        ({}, pb.DTYPE_FLOAT16, "this is float16 on cpu"),
    ],
)
async def test_what_lacks_it_refuses(
    socket_folder: Path, model: Path, settings: dict[str, str], dtype: int, told: str
) -> None:
    async with running_worker(socket_folder, **settings) as worker:
        error = await fails(load(worker, model, pb.QUANTIZATION_INT8, dtype))
        assert error.reason is Reason.MODEL_NOT_LOADED
        assert "int8 needs the kernels for x86-64" in error.message
        assert told in error.message
        assert (await worker.info()).state == status_pb2.WORKER_STATE_DEVICE_READY
