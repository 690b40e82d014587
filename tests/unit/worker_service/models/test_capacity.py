"""What is planned from config.json is what workers then hold: weights, blocks, the sizes that kernels know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from blockyard.capacity.adapters import adapter_format, lora_bytes
from blockyard.capacity.formats import QUANTIZED_DEVICES, check_kv_cache, check_quantization, weight_format
from blockyard.capacity.limits import BLOCK_SIZES
from blockyard.capacity.steps import SamplingScratch, arena_bytes, cpu_scratch
from blockyard.capacity.weights import weights_bytes
from blockyard.configuration import SystemConfiguration
from blockyard.contract.parallel import Parallel
from blockyard.contract.workers import NO_LORAS, LoraLimits
from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.share import Share
from blockyard.settings import settings_of
from blockyard_kernels import ops
from blockyard_kernels.capture import CaptureSizes
from blockyard_kernels.cpu.huge_pages import HostArena
from tests.kit.kernels.backends import build_kernels
from tests.kit.kernels.families import family_model
from tests.kit.kernels.pooling_models import pooling_model
from tests.kit.kernels.tiny_models import tiny_model
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.lora.reader import AdapterReader
from worker_service.lora.store import make_loras
from worker_service.models.builder import build_decoder
from worker_service.models.loader import RunnableModel, load_model
from worker_service.models.model_config import read_config
from worker_service.models.random_weights import RandomWeights

from blockyard_kernels.cuda.backend import CudaBackend  # isort: skip
from blockyard_kernels.cuda.lora.slots import CudaLoraOps  # isort: skip

if TYPE_CHECKING:
    from blockyard.capacity.weights import WeightFormat

CPU = torch.device("cpu")
RANKS = (Parallel(), *(Parallel(2, 1, rank) for rank in range(2)), *(Parallel(1, 2, rank) for rank in range(2)))
HELD = [
    ("auto", torch.float32, "none"),
    ("auto", torch.bfloat16, "none"),
    ("auto", torch.bfloat16, "int8"),
    ("reference", torch.float32, "none"),
    ("reference", torch.bfloat16, "none"),
    ("reference", torch.float16, "none"),
]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    build_kernels()


HYBRIDS = ["qwen3_5", "qwen3_next", "lfm2_moe", "granite_hybrid", "nemotron_h"]
FAMILIES = ["gemma3", "granite", "olmo", "gpt2", "phi", "stablelm_parallel", "qwen3_moe", "gpt_oss", *HYBRIDS]


def load(name: str, kernels: str, dtype: torch.dtype, quantization: str, rank: Parallel) -> RunnableModel:
    folder = family_model(name) if name in FAMILIES else tiny_model(name)
    return load_model(folder, dtype, CPU, lambda done, total: None, kernels, quantization, "random", rank)


def planned_format(loaded: RunnableModel, kernels: str, quantization: str) -> WeightFormat:
    return weight_format("cpu", loaded.config.dtype_name, quantization, kernels)


@pytest.mark.parametrize(("kernels", "dtype", "quantization"), HELD)
@pytest.mark.parametrize("name", ["llama_bias", "qwen3", *FAMILIES])
def test_weights_are_counted_to_the_byte(name: str, kernels: str, dtype: torch.dtype, quantization: str) -> None:
    for rank in RANKS:
        loaded = load(name, kernels, dtype, quantization, rank)
        share, held = Share.of(loaded.config, rank), planned_format(loaded, kernels, quantization)
        assert weights_bytes(loaded.config, share, held) == loaded.parameter_bytes, rank


@pytest.mark.parametrize(("kernels", "dtype", "quantization"), HELD)
@pytest.mark.parametrize("name", ["llama_bias", "qwen3_moe", *HYBRIDS])
def test_adapters_are_counted_to_the_byte(name: str, kernels: str, dtype: torch.dtype, quantization: str) -> None:
    limits = LoraLimits(2, 5, 3)
    for rank in RANKS:
        loaded = load(name, kernels, dtype, quantization, rank)
        loras = make_loras(loaded, limits, None)
        assert loras is not None
        share, held = Share.of(loaded.config, rank), adapter_format("cpu", loaded.config.dtype_name, kernels)
        assert lora_bytes(loaded.config, share, held, limits) == loras.free_bytes, rank
        assert lora_bytes(loaded.config, share, held, NO_LORAS) == 0


def test_so_are_the_slots_of_a_gpu() -> None:
    limits, dtype, name = LoraLimits(3, 5, 9), torch.float16, "llama_bias"
    config = read_config(tiny_model(name), dtype)
    model = build_decoder(config, CudaBackend(CPU), RandomWeights(config, CPU, lambda done, total: None))
    arena = HostArena()
    AdapterReader(model, CudaLoraOps(CPU), limits, arena)
    share, held = Share.of(config, Parallel()), adapter_format("cuda", config.dtype_name, "auto")
    assert lora_bytes(config, share, held, limits) == arena.used_bytes


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen3", *FAMILIES])
def test_the_arena_of_a_step_is_bounded(name: str, quantization: str) -> None:
    # A stage of one layer needs less.
    for rank in RANKS[:3]:
        loaded = load(name, "auto", torch.bfloat16, quantization, rank)
        pool = allocate_pool(BlockFormat.of(loaded.model, 32), 1, CPU)
        captured = loaded.model.capture(pool, CaptureSizes(512, 64, 32))
        assert captured is not None
        share, held = Share.of(loaded.config, rank), planned_format(loaded, "auto", quantization)
        num_threads = loaded.backend.sampling.executor.num_threads
        num_bytes = captured.num_bytes - cpu_scratch(num_threads).attention_bytes
        assert num_bytes <= arena_bytes(loaded.config, share, held, 512) < 1.4 * num_bytes


def test_choosing_takes_what_is_planned() -> None:
    sampling = load("llama", "auto", torch.bfloat16, "none", Parallel()).backend.sampling
    there = SamplingScratch(sampling.choose_bytes, sampling.token_logprobs_bytes)
    # Another test may have set the threads of the kernels, which are one object for all.
    planned = cpu_scratch(sampling.executor.num_threads)
    assert planned.sampling_bytes(7, 1000) == there.sampling_bytes(7, 1000)
    assert planned.logprobs_bytes(7, 1000) == there.logprobs_bytes(7, 1000)
    assert planned.attention_bytes == sampling.executor.attention_bytes
    assert cpu_scratch(1).attention_bytes == 0


def test_the_sizes_of_blocks_are_those_of_the_kernels() -> None:
    assert BLOCK_SIZES == ops.BLOCK_SIZES


@pytest.mark.parametrize(
    ("name", "device", "kernels", "told"),
    [
        ("llama", "cpu", "auto", ""),
        ("llama", "cpu", "reference", ""),
        ("llama", "cuda", "reference", ""),
        ("llama", "cuda", "auto", "int8 is served on a CPU"),
        ("llama", "cuda", "triton", "int8 is served on a CPU"),
    ],
)
def test_blocks_in_int8_say_where_they_are_possible(name: str, device: str, kernels: str, told: str) -> None:
    config = read_config(tiny_model(name), torch.bfloat16)
    for kv_cache_dtype in ("auto", "bfloat16"):
        check_kv_cache(kv_cache_dtype, config, device, kernels)
    if not told:
        check_kv_cache("int8", config, device, kernels)
        return
    with pytest.raises(BlockyardError, match=told) as raised:
        check_kv_cache("int8", config, device, kernels)
    assert raised.value.reason is Reason.MODEL_NOT_LOADED


def test_an_encoder_keeps_no_blocks_in_int8() -> None:
    config = read_config(pooling_model("bert"), torch.float32)
    with pytest.raises(BlockyardError, match="BertModel is an encoder, which keeps no KV blocks"):
        check_kv_cache("int8", config, "cpu", "auto")


def test_every_quantization_says_where_it_is_possible() -> None:
    (choices,) = (each.choices for each in settings_of(SystemConfiguration) if each.name == "quantization")
    assert {"none", *QUANTIZED_DEVICES} == set(choices)
    with pytest.raises(BlockyardError, match="int8 needs the kernels for x86-64 processors"):
        check_quantization("int8", read_config(tiny_model("llama"), torch.float16), "cpu", "auto")
