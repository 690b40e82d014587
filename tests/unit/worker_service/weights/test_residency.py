"""A worker asleep and awake, over a real socket: what it gives up, what it takes again, and what it computes then."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from blockyard.common.v1 import administration_pb2
from blockyard.errors import Reason
from blockyard.worker.v1 import worker_pb2 as pb
from blockyard_kernels.cpu.huge_pages import HostArena
from tests.unit.worker_service.driver import WorkerDriver, fails, new_sequence, running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

PROMPT = [5, 6, 7, 8, 9, 10]
WEIGHTS, KV_CACHE = administration_pb2.MEMORY_TAG_WEIGHTS, administration_pb2.MEMORY_TAG_KV_CACHE


async def generate(worker: WorkerDriver, epoch: int, num_tokens: int = 6) -> list[int]:
    """Generates greedily in an epoch of its own."""
    stream = worker.open(epoch)
    first = await stream.sampled(
        new_sequences=[new_sequence(1, PROMPT, [1, 2])], sequence_ids=[1], num_new_tokens=[len(PROMPT)]
    )
    tokens = [first[1], *await stream.decode(1, num_tokens - 1)]
    stream.call.cancel()
    await worker.wait_for(lambda info: info.state != 5)
    return tokens


async def sleep(worker: WorkerDriver, level: int, tags: Sequence[int] = ()) -> pb.SleepResponse:
    return await worker.stub.Sleep(pb.SleepRequest(level=level, tags=tags))  # type: ignore[arg-type]


async def wake_up(worker: WorkerDriver, tags: Sequence[int] = ()) -> pb.WakeUpResponse:
    return await worker.stub.WakeUp(pb.WakeUpRequest(tags=tags))  # type: ignore[arg-type]


async def reload(worker: WorkerDriver, model: object = "", version: str = "") -> pb.ReloadedWeights:
    request = pb.ReloadWeightsRequest(model=str(model), version=version)
    return [event async for event in worker.stub.ReloadWeights(request)][-1].reloaded


def perturb(model: Path, folder: Path) -> Path:
    """A copy of a model with other weights of the same sizes."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor.flip(0) * 0.9 for name, tensor in tensors.items()}, file)
    return folder


@pytest.fixture(params=["auto", "reference"])
async def kept_worker(request: pytest.FixtureRequest, socket_folder: Path, model: Path) -> AsyncIterator[WorkerDriver]:
    """A worker with a model and pools, on each backend."""
    async with running_worker(socket_folder, cpu_kernels=request.param, worker_model_root=str(socket_folder)) as driver:
        await driver.prepare(model)
        yield driver


async def test_it_computes_the_same_after_each_sleep(kept_worker: WorkerDriver) -> None:
    worker = kept_worker
    before, info = await generate(worker, 1), await worker.info()
    assert info.sleep == pb.SleepInfo()
    await sleep(worker, 1)
    info_asleep = await worker.info()
    assert info_asleep.sleep == pb.SleepInfo(level=1, asleep=[WEIGHTS, KV_CACHE])
    assert not (await wake_up(worker)).weights_are_stale
    assert await generate(worker, 2) == before
    await sleep(worker, 2)
    answer = await wake_up(worker, [WEIGHTS])
    assert (list(answer.asleep_tags), answer.weights_are_stale) == ([KV_CACHE], True)
    reloaded = await reload(worker)
    assert (reloaded.model, reloaded.cache) == (info.model, info.cache)
    assert "SLEEPING" in (await worker.open(3).end_error()).message
    await wake_up(worker, [KV_CACHE])
    assert await generate(worker, 3) == before


async def test_nothing_is_generated_from_weights_that_are_gone(kept_worker: WorkerDriver) -> None:
    await sleep(kept_worker, 2)
    assert (await wake_up(kept_worker)).weights_are_stale
    # No step is sent: a write that meets the end of its call gets an internal error of grpcio (grpc/grpc#36066).
    error = await kept_worker.open(1).end_error()
    assert (error.reason, "STALE" in error.message) == (Reason.WRONG_STATE, True)


async def test_a_deeper_sleep_gives_up_more_and_the_same_again_nothing(worker: WorkerDriver) -> None:
    await sleep(worker, 1, [KV_CACHE])
    assert list((await worker.info()).sleep.asleep) == [KV_CACHE]
    await sleep(worker, 2)
    info = (await worker.info()).sleep
    assert (info.level, list(info.asleep), info.weights_are_stale) == (2, [WEIGHTS, KV_CACHE], True)
    await sleep(worker, 1)
    assert (await worker.info()).sleep == info


async def test_level_2_gives_pages_outside_of_the_arena_up_too(socket_folder: Path, tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 1024}
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=4, **sizes)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    async with running_worker(socket_folder, cpu_kernels="reference") as worker:
        await worker.prepare(tmp_path)
        loaded = worker.server.worker.set_up.loaded
        assert loaded is not None
        assert (await sleep(worker, 2)).freed_bytes > 0.95 * loaded.parameter_bytes


async def test_a_tag_that_is_awake_refuses_the_whole_call(worker: WorkerDriver) -> None:
    await sleep(worker, 1, [KV_CACHE])
    assert "weights is awake" in (await fails(wake_up(worker, [KV_CACHE, WEIGHTS]))).message
    assert (await fails(wake_up(worker, [77]))).reason is Reason.FIELD_INVALID
    assert (await fails(sleep(worker, 3))).reason is Reason.FIELD_INVALID
    assert list((await worker.info()).sleep.asleep) == [KV_CACHE]


async def test_other_weights_of_the_same_sizes_are_taken(
    kept_worker: WorkerDriver, model: Path, socket_folder: Path
) -> None:
    worker, before = kept_worker, await generate(kept_worker, 1)
    other = perturb(model, socket_folder / "other")
    (socket_folder / "fresh").mkdir()
    backend = worker.server.worker.set_up.loaded.backend.name  # type: ignore[union-attr]
    kernels = "reference" if backend == "reference" else "auto"
    async with running_worker(socket_folder / "fresh", cpu_kernels=kernels) as fresh:
        cache = await fresh.prepare(other)
        expected = await generate(fresh, 1)
    reloaded = await reload(worker, other, "2")
    assert reloaded.model.weights_version == "2"
    # As a worker that never had others.
    assert reloaded.cache.determinism_id == cache.determinism_id
    assert await generate(worker, 2) == expected != before
    assert (await reload(worker)).model.weights_version == ""
    assert await generate(worker, 3) == before


async def test_a_folder_that_cannot_be_taken_changes_nothing(
    worker: WorkerDriver, model: Path, socket_folder: Path, tmp_path: Path
) -> None:
    before = await generate(worker, 1)
    elsewhere = shutil.copytree(model, tmp_path / "elsewhere")
    error = await fails(reload(worker, elsewhere))
    assert (error.reason, "--worker-model-root" in error.message) == (Reason.PERMISSION_DENIED, True)
    assert await generate(worker, 2) == before
    assert (await reload(worker, model)).model.weights_digest


async def test_links_are_followed_before_a_folder_is_allowed(
    kept_worker: WorkerDriver, model: Path, socket_folder: Path, tmp_path: Path
) -> None:
    elsewhere = shutil.copytree(model, tmp_path / "elsewhere")
    (socket_folder / "link").symlink_to(elsewhere)
    assert (await fails(reload(kept_worker, socket_folder / "link"))).reason is Reason.PERMISSION_DENIED
    lacking = shutil.copytree(model, socket_folder / "lacking")
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, lacking / "model.safetensors")
    error = await fails(reload(kept_worker, lacking))
    assert (error.reason, "model.norm.weight" in error.message) == (Reason.MODEL_NOT_LOADED, True)
    assert (await kept_worker.info()).state == 4


def resident_bytes() -> int:
    """Bytes that this process has in memory, as the system adds its mappings up."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(next(line.split()[1] for line in rollup.splitlines() if line.startswith("Rss:")))


async def test_memory_falls_by_what_a_level_gives_up(fresh_worker: WorkerDriver, model: Path) -> None:
    worker = fresh_worker
    await worker.prepare(model, num_device_blocks=10_000)
    set_up = worker.server.worker.set_up
    assert set_up.loaded is not None
    assert set_up.executor is not None
    weights, pool = set_up.loaded.arena, set_up.executor.cache.device_pool
    assert isinstance(weights, HostArena)
    before = await generate(worker, 1)
    pool.fill_(1)
    held = resident_bytes()
    await sleep(worker, 1)
    assert held - resident_bytes() >= 0.95 * pool.nbytes > 30 << 20
    assert any(chunk.any() for chunk in weights.chunks)
    await sleep(worker, 2)
    assert not any(chunk[: 1 << 20].any() for chunk in weights.chunks)
    await wake_up(worker)
    pool.fill_(1)
    assert abs(resident_bytes() - held) <= 0.05 * pool.nbytes + (8 << 20)
    await reload(worker)
    assert await generate(worker, 2) == before
