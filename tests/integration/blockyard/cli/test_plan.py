"""What is planned is what a worker of its own process then finds, within 5 %; and it refuses with the same words."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.capacity.replica_plan import plan_replica
from blockyard.configuration import SystemConfiguration
from blockyard.contract.codec.workers import LORA_LIMITS
from blockyard.contract.parallel import ParallelSizes
from blockyard.contract.workers import NO_LORAS, LoraLimits
from blockyard.local.hardware import read_processors
from blockyard.model_config.network import read_network
from blockyard.service.servers import internal_channel
from blockyard.settings import resolve
from blockyard.worker.v1 import worker_pb2 as pb
from blockyard.worker.v1 import worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[4]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 17,
    "torch_dtype": "bfloat16",
}
MIDDLE = TINY | {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}
# What is asked of both, beside a model: so little memory that what the process itself takes shows.
STEP = {"device_memory_utilization": 0.2, "max_num_batched_tokens": 2048, "max_num_seqs": 256}


@asynccontextmanager
async def new_worker() -> AsyncIterator[Any]:
    """A worker in a process of its own, from which nothing has been asked yet."""
    with tempfile.TemporaryDirectory(prefix="by") as folder:
        address = f"unix:{folder}/w"
        flags = ["--worker-address", address, "--log-level", "warning"]
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "worker_service", *flags, cwd=ROOT)
        try:
            async with internal_channel(address) as channel:
                await asyncio.wait_for(channel.channel_ready(), 60)
                yield worker_pb2_grpc.WorkerServiceStub(channel)
        finally:
            process.terminate()
            await process.wait()


def write_model(folder: Path, shape: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


@pytest.mark.parametrize(
    ("shape", "quantization", "kv_cache_dtype"),
    [(TINY, "none", "auto"), (MIDDLE, "int8", "auto"), (TINY, "none", "int8")],
    ids=["tiny", "middle", "int8 KV"],
)
async def test_a_worker_finds_what_was_planned(
    tmp_path: Path, shape: dict[str, Any], quantization: str, kv_cache_dtype: str
) -> None:
    folder = write_model(tmp_path, shape)
    loras = LoraLimits(2, 16, 4) if quantization != "none" else NO_LORAS
    settings = {**STEP, "quantization": quantization, "swap_space_gib": 0.25, **asdict(loras)}
    settings["kv_cache_dtype"] = kv_cache_dtype
    settings["max_lora_rank"] = loras.max_lora_rank or 16
    planned = plan_replica(
        read_network(folder), resolve(SystemConfiguration, settings, environment={}), read_processors(), ParallelSizes()
    ).tightest
    async with new_worker() as worker:
        await worker.InitDevice(pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU))
        kind = pb.QUANTIZATION_INT8 if quantization == "int8" else pb.QUANTIZATION_UNSPECIFIED
        load = pb.LoadModelRequest(model=str(folder), format=pb.LOAD_FORMAT_RANDOM, quantization=kind)
        load.kv_cache_dtype = pb.DTYPE_INT8 if kv_cache_dtype == "int8" else pb.DTYPE_UNSPECIFIED
        if loras.max_loras:
            load.lora.CopyFrom(LORA_LIMITS.encode(loras))
        *_, last = [event async for event in worker.LoadModel(load)]
        request = pb.DetermineNumAvailableBlocksRequest(**STEP, swap_space_bytes=1 << 28)
        found = await worker.DetermineNumAvailableBlocks(request)
    assert planned.memory.weights_bytes == last.loaded.parameter_bytes
    assert planned.cache_block_bytes == found.cache_block_bytes
    assert planned.num_device_blocks == pytest.approx(found.num_device_blocks, rel=0.05)
    assert planned.num_host_blocks == pytest.approx(found.num_host_blocks, rel=0.05)
