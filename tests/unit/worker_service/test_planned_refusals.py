"""What a plan says would be refused a worker refuses, word for word; what it does not is not refused."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch

from blockyard.capacity.adapters import lora_limits
from blockyard.capacity.replica_plan import plan_replica
from blockyard.configuration import SystemConfiguration
from blockyard.contract.codec.workers import LORA_LIMITS
from blockyard.contract.parallel import ParallelSizes
from blockyard.errors import BlockyardError, from_rpc_error
from blockyard.local.hardware import read_processors
from blockyard.model_config.network import read_network
from blockyard.settings import resolve
from blockyard.worker.v1 import worker_pb2 as pb
from worker_service.device.device import ANY_DEVICE, choose_device

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.worker_service.driver import WorkerDriver

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
ROOM = re.compile(r"\d+\.\d GiB of memory are free")
KV_DTYPES: dict[str, Any] = {"auto": 0, "bfloat16": pb.DTYPE_BFLOAT16, "int8": pb.DTYPE_INT8}
DTYPES = {"auto": 0, "float32": pb.DTYPE_FLOAT32, "bfloat16": pb.DTYPE_BFLOAT16, "float16": pb.DTYPE_FLOAT16}


def plan_refusal(folder: Path, settings: dict[str, Any], sizes: ParallelSizes) -> str:
    """What the command would say."""
    configuration = resolve(SystemConfiguration, settings, environment={})
    try:
        network = read_network(folder, configuration.device.dtype)
    except BlockyardError as error:
        return error.message
    return plan_replica(network, configuration, read_processors(), sizes).refusal


async def worker_refusal(worker: WorkerDriver, folder: Path, settings: dict[str, Any], sizes: ParallelSizes) -> str:
    """What the first call that fails says; empty where all blocks were counted."""
    place = pb.Parallel(
        tensor_parallel_size=sizes.tensor_parallel_size, pipeline_parallel_size=sizes.pipeline_parallel_size
    )
    quantizations = {"none": 0, "int8": pb.QUANTIZATION_INT8, "fp8": pb.QUANTIZATION_FP8}
    quantization: Any = quantizations[settings.get("quantization", "none")]
    load = pb.LoadModelRequest(
        model=str(folder),
        format=pb.LOAD_FORMAT_RANDOM,
        quantization=quantization,
        kv_cache_dtype=KV_DTYPES[settings.get("kv_cache_dtype", "auto")],
    )
    if settings.get("max_loras"):
        load.lora.CopyFrom(LORA_LIMITS.encode(lora_limits(resolve(SystemConfiguration, settings, environment={}).lora)))
    profile = pb.DetermineNumAvailableBlocksRequest(
        device_memory_utilization=0.9,
        block_size=settings.get("block_size", 0),
        max_num_seqs=settings.get("max_num_seqs", 8),
        max_num_batched_tokens=settings.get("max_num_batched_tokens", 64),
    )
    try:
        dtype: Any = DTYPES[settings.get("dtype", "auto")]
        init = pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, dtype=dtype, parallel=place)
        await worker.stub.InitDevice(init)
        async for _ in worker.stub.LoadModel(load):
            pass
        await worker.stub.DetermineNumAvailableBlocks(profile)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).message
    return ""


@pytest.mark.parametrize(
    ("shape", "settings", "sizes", "told"),
    [
        ({}, {}, (1, 1), ""),
        ({}, {"quantization": "int8", "dtype": "bfloat16"}, (2, 2), ""),
        ({"architectures": ["FluxForCausalLM"]}, {}, (1, 1), "architecture 'FluxForCausalLM' is not supported"),
        ({"hidden_act": "xielu", "head_dim": 3}, {}, (1, 1), "hidden_act is 'xielu', not supported"),
        ({"quantization_config": {"bits": 4}}, {}, (1, 1), "quantization_config"),
        ({}, {}, (8, 1), "allows a tensor-parallel size of 1 or 2 or 4"),
        ({}, {}, (1, 3), "a pipeline-parallel size of 1 to 2"),
        ({}, {}, (3, 1), "must be a power of two, at most 8"),
        ({}, {}, (16, 2000), "must be from 1 to 1024"),
        ({}, {"quantization": "int8", "dtype": "float16"}, (1, 1), "int8 needs the kernels for x86-64 processors"),
        ({}, {"kv_cache_dtype": "int8"}, (2, 2), ""),
        ({}, {"kv_cache_dtype": "bfloat16", "dtype": "bfloat16"}, (1, 1), ""),
        (
            {},
            {"kv_cache_dtype": "bfloat16"},
            (1, 1),
            "needs a model that computes in it; LlamaForCausalLM computes in fl",
        ),
        ({"head_dim": 18}, {"kv_cache_dtype": "int8"}, (1, 1), "needs heads of a multiple of 4 numbers, not 18"),
        ({}, {"quantization": "fp8"}, (1, 1), "fp8 needs a GPU with our kernels; this is float32 on cpu"),
        ({"vocab_size": 1 << 28}, {}, (1, 1), r"the weights take \d+\.\d GiB in float32, and"),
        ({"vocab_size": 1 << 28}, {"dtype": "bfloat16"}, (2, 1), r"the weights take \d+\.\d GiB in bfloat16, and"),
        ({}, {"max_loras": 2, "max_cpu_loras": 1 << 17}, (1, 1), "lora.max_cpu_loras: must be from 2 to 65536"),
        ({}, {"max_loras": 2, "max_lora_rank": 8}, (2, 1), ""),
        ({}, {"block_size": 7}, (1, 1), "must be one of 8, 16, 32"),
        ({}, {"max_num_seqs": 1 << 17, "max_num_batched_tokens": 1 << 21}, (1, 1), "max_num_seqs: must be from 1 to"),
    ],
)
async def test_they_are_the_workers(
    fresh_worker: WorkerDriver,
    tmp_path: Path,
    shape: dict[str, Any],
    settings: dict[str, Any],
    sizes: tuple[int, int],
    told: str,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL | shape))
    planned = plan_refusal(tmp_path, settings, ParallelSizes(*sizes))
    assert re.search(told, planned) if told else not planned
    found = await worker_refusal(fresh_worker, tmp_path, settings, ParallelSizes(*sizes))
    assert ROOM.sub("", planned) == ROOM.sub("", found)


def test_so_is_that_of_a_gpu_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BlockyardError) as raised:
        choose_device("cuda", ANY_DEVICE)
    assert plan_refusal(tmp_path, {"device": "cuda"}, ParallelSizes()) == raised.value.message
