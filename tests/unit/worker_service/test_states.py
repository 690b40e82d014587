"""The lifecycle over a real socket: each call in its states only, and what each answers."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shutil
import threading
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch

from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.worker.v1 import worker_pb2 as pb
from tests.unit.worker_service.driver import BLOCK_SIZE, WorkerDriver, fails, running_worker
from worker_service import set_up
from worker_service.device.device import AllowedDevice, choose_device

if TYPE_CHECKING:
    from pathlib import Path

STATES = ("CREATED", "DEVICE_READY", "LOADED", "CACHE_READY", "RUNNING", "SLEEPING", "STALE")
LEGAL = {
    "InitDevice": {"CREATED"},
    "LoadModel": {"DEVICE_READY"},
    "DetermineNumAvailableBlocks": {"LOADED"},
    "InitializeCache": {"LOADED"},
    "ExecuteModel": {"CACHE_READY", "RUNNING"},
    "ChecksumBlocks": {"CACHE_READY", "RUNNING"},
    "StartProfile": {"CACHE_READY", "RUNNING"},
    "StopProfile": {"CACHE_READY", "RUNNING"},
    "SaveState": {"LOADED", "CACHE_READY"},
    "Sleep": {"CACHE_READY", "SLEEPING"},
    "WakeUp": {"SLEEPING", "STALE"},
    "ReloadWeights": {"CACHE_READY", "STALE"},
    "BeginWeightUpdate": {"CACHE_READY", "STALE"},
    # After BeginWeightUpdate: see weights/test_update.py.
    "UpdateWeights": set[str](),
    "FinishWeightUpdate": set[str](),
    # With an operation that reads weights.
    "CallExtension": {"LOADED", "CACHE_READY", "RUNNING"},
}
# After these a worker is in another state: of each state the first one is called.
CHANGING = ("InitializeCache", "Sleep", "ReloadWeights", "WakeUp", "BeginWeightUpdate")


def state(info: pb.GetWorkerInfoResponse) -> str:
    return status_pb2.WorkerState.Name(info.state).removeprefix("WORKER_STATE_")


async def bring_to(worker: WorkerDriver, wanted: str, model: Path) -> None:
    index = STATES.index(wanted)
    if index >= 1:
        await worker.stub.InitDevice(
            pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, configuration_digest="digest")
        )
    if index >= 2:
        assert [event async for event in worker.stub.LoadModel(pb.LoadModelRequest(model=str(model)))]
    if index >= 3:
        await worker.initialize_cache()
    if wanted == "RUNNING":
        await worker.open(1).step()
    if index >= 5:
        await worker.stub.Sleep(pb.SleepRequest(level=2))
    if wanted == "STALE":
        await worker.stub.WakeUp(pb.WakeUpRequest())
    assert state(await worker.info()) == wanted


async def call(worker: WorkerDriver, name: str, model: Path) -> None:
    """Calls an rpc with what is right for it; raises its error."""
    request: Any = {
        "InitDevice": pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU),
        "LoadModel": pb.LoadModelRequest(model=str(model)),
        "DetermineNumAvailableBlocks": profile_request(),
        "InitializeCache": pb.InitializeCacheRequest(
            block_size=8, num_device_blocks=9, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4
        ),
        "ChecksumBlocks": pb.ChecksumBlocksRequest(device_block_ids=[1]),
        "ExecuteModel": pb.ExecuteModelRequest(epoch=9, step_id=1),
        "StartProfile": pb.StartProfileRequest(),
        "StopProfile": pb.StopProfileRequest(),
        "SaveState": pb.SaveStateRequest(format=administration_pb2.STATE_FORMAT_SHARDED, folder=secrets.token_hex(4)),
        "Sleep": pb.SleepRequest(level=1),
        "WakeUp": pb.WakeUpRequest(),
        "ReloadWeights": pb.ReloadWeightsRequest(),
        "BeginWeightUpdate": pb.BeginWeightUpdateRequest(version="2"),
        "UpdateWeights": iter([pb.UpdateWeightsRequest()]),
        "FinishWeightUpdate": pb.FinishWeightUpdateRequest(version="2"),
        "CallExtension": pb.CallExtensionRequest(extension="diagnostics", operation="check_numerics"),
    }[name]
    if name == "ExecuteModel":
        stream = worker.stub.ExecuteModel()
        await stream.write(request)
        assert isinstance(await stream.read(), pb.ExecuteModelResponse)
        stream.cancel()
    elif name in ("LoadModel", "StopProfile", "ReloadWeights", "SaveState"):
        assert [event async for event in getattr(worker.stub, name)(request)]
    else:
        await getattr(worker.stub, name)(request)


def profile_request(**fields: Any) -> pb.DetermineNumAvailableBlocksRequest:
    asked = {
        "device_memory_utilization": 0.5,
        "swap_space_bytes": 1 << 20,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
    } | fields
    return pb.DetermineNumAvailableBlocksRequest(**asked)


async def test_a_fixed_pool_is_counted_without_a_profile(
    socket_folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(set_up, "profile", None)
    async with running_worker(socket_folder, device_cache_gib=0.5) as worker:
        await bring_to(worker, "LOADED", model)
        plan = await worker.stub.DetermineNumAvailableBlocks(profile_request(device_memory_utilization=0.001))
        assert plan.num_device_blocks == (1 << 29) // plan.cache_block_bytes
        assert plan.num_host_blocks == (1 << 20) // plan.cache_block_bytes


@pytest.mark.parametrize("num_seqs", [1, 2, 3])
async def test_a_budget_beyond_what_the_sequences_hold_is_profiled(
    fresh_worker: WorkerDriver, model: Path, num_seqs: int
) -> None:
    await bring_to(fresh_worker, "LOADED", model)
    plan = await fresh_worker.stub.DetermineNumAvailableBlocks(
        profile_request(max_num_seqs=num_seqs, max_num_batched_tokens=8192)
    )
    assert plan.num_device_blocks > 0


@pytest.mark.parametrize("at", STATES)
async def test_each_call_is_legal_in_its_states_only(fresh_worker: WorkerDriver, model: Path, at: str) -> None:
    await bring_to(fresh_worker, at, model)
    for name, legal in LEGAL.items():
        if at in legal:
            continue
        # Nothing is written to a step stream that is refused: it may have ended by then, and gRPC would hide why.
        refused = fresh_worker.stub.ExecuteModel().read() if name == "ExecuteModel" else call(fresh_worker, name, model)
        error = await fails(refused)
        assert error.reason is Reason.WRONG_STATE, name
        assert at in error.message
        assert state(await fresh_worker.info()) == at
    legal_here = [name for name, legal in LEGAL.items() if at in legal]
    changing = [name for name in CHANGING if name in legal_here][:1]
    for name in [name for name in legal_here if name not in CHANGING] + changing * (at != "CACHE_READY"):
        await call(fresh_worker, name, model)


async def test_it_tells_what_it_became(fresh_worker: WorkerDriver, model: Path) -> None:
    info = await fresh_worker.info()
    assert (info.api_version, info.epoch, info.device, info.configuration_digest) == ("v1", 0, "", "")
    assert info.worker_id
    assert info.incarnation
    assert not info.HasField("model")
    events = await fresh_worker.load(model)
    progress = [event.progress for event in events[:-1]]
    assert progress[-1].done_bytes == progress[-1].total_bytes > 0
    assert all(one.done_bytes <= two.done_bytes for one, two in itertools.pairwise(progress))
    loaded = events[-1].loaded
    assert (loaded.architecture, loaded.vocab_size, loaded.dtype) == ("LlamaForCausalLM", 384, pb.DTYPE_FLOAT32)
    assert loaded.parameter_bytes > 384 * 64 * 4
    cache = await fresh_worker.initialize_cache()
    assert (cache.block_size, cache.num_device_blocks, cache.num_host_blocks) == (BLOCK_SIZE, 65, 16)
    assert cache.cache_block_bytes == 2 * 2 * 2 * BLOCK_SIZE * 16 * 4
    assert cache.batch_invariant
    assert cache.determinism_id
    info = await fresh_worker.info()
    assert (info.model, info.cache, info.configuration_digest) == (loaded, cache, "digest")
    assert info.device.startswith("CPU")


async def test_the_determinism_id_is_that_of_weights_and_dtype(socket_folder: Path, model: Path) -> None:
    async def identity(name: str, dtype: int, **settings: Any) -> str:
        folder = socket_folder / name
        folder.mkdir()
        async with running_worker(folder, **settings) as worker:
            return (await worker.prepare(model, dtype)).determinism_id

    first = await identity("a", pb.DTYPE_FLOAT32)
    assert await identity("b", pb.DTYPE_FLOAT32, num_threads=2) == first
    assert await identity("c", pb.DTYPE_BFLOAT16) != first


async def test_blocks_are_counted_and_the_memory_is_accounted_for(fresh_worker: WorkerDriver, model: Path) -> None:
    await fresh_worker.load(model)
    plan = await fresh_worker.stub.DetermineNumAvailableBlocks(profile_request())
    assert plan.block_size == 32
    assert plan.num_host_blocks == (1 << 20) // plan.cache_block_bytes
    # Twice what 8 sequences of 2048 tokens hold, and block 0.
    assert plan.num_device_blocks == 2 * 8 * 2048 // 32 + 1
    memory = plan.memory
    assert memory.budget_bytes == memory.total_bytes // 2
    assert memory.activation_bytes > 8 * 384 * 4
    assert (
        memory.cache_bytes <= memory.budget_bytes - memory.weights_bytes - memory.activation_bytes - memory.other_bytes
    )
    assert memory.cache_bytes >= (plan.num_device_blocks + plan.num_host_blocks) * plan.cache_block_bytes
    again = await fresh_worker.stub.DetermineNumAvailableBlocks(profile_request(block_size=16))
    assert again.block_size == 16
    assert again.cache_block_bytes * 2 == plan.cache_block_bytes
    # The state is the same, and nothing was allocated.
    assert state(await fresh_worker.info()) == "LOADED"
    error = await fails(
        fresh_worker.stub.DetermineNumAvailableBlocks(
            profile_request(block_size=7, device_memory_utilization=0.0, max_num_seqs=0, max_num_batched_tokens=0)
        )
    )
    assert {violation.field for violation in error.violations} == {
        "block_size",
        "device_memory_utilization",
        "max_num_seqs",
        "max_num_batched_tokens",
    }


async def test_a_length_that_does_not_fit_is_refused_with_what_does(fresh_worker: WorkerDriver, model: Path) -> None:
    await fresh_worker.load(model)
    error = await fails(fresh_worker.initialize_cache(num_device_blocks=9, max_model_len=65))
    assert error.reason is Reason.FIELD_INVALID
    assert "the 64 tokens that the blocks hold" in error.message
    error = await fails(fresh_worker.initialize_cache(num_device_blocks=1000, max_model_len=2049))
    assert "the model's 2048 tokens" in error.message
    error = await fails(fresh_worker.initialize_cache(num_device_blocks=1, block_size=3, max_num_seqs=0))
    assert {violation.field for violation in error.violations} == {"num_device_blocks", "block_size", "max_num_seqs"}
    await fresh_worker.initialize_cache(num_device_blocks=9, max_model_len=64)


async def test_pools_that_cannot_be_had_are_refused(fresh_worker: WorkerDriver, model: Path) -> None:
    await fresh_worker.load(model)
    error = await fails(fresh_worker.initialize_cache(num_host_blocks=2**31 - 1, block_size=256))
    assert error.reason is Reason.NEVER_FITS
    assert state(await fresh_worker.info()) == "LOADED"
    await fresh_worker.initialize_cache()


async def test_sizes_that_cannot_be_are_refused_as_what_they_are(
    fresh_worker: WorkerDriver, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    error = await fails(fresh_worker.stub.InitDevice(pb.InitDeviceRequest(device_type=99)))  # type: ignore[arg-type]
    assert error.reason is Reason.FIELD_INVALID
    await fresh_worker.load(model)
    most = 2**32 - 1
    profile = {"device_memory_utilization": 0.5, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    for name in ("max_num_batched_tokens", "max_num_seqs", "block_size"):
        request = pb.DetermineNumAvailableBlocksRequest(**(profile | {name: most}))
        error = await fails(fresh_worker.stub.DetermineNumAvailableBlocks(request))
        assert (error.reason, [violation.field for violation in error.violations]) == (Reason.FIELD_INVALID, [name])
    sizes = ("max_num_batched_tokens", "max_num_seqs", "block_size", "num_device_blocks", "num_host_blocks")
    for name in (*sizes, "max_model_len"):
        error = await fails(fresh_worker.initialize_cache(**{name: most}))
        assert (error.reason, {violation.field for violation in error.violations}) == (Reason.FIELD_INVALID, {name})
    assert "Traceback" not in caplog.text
    await fresh_worker.initialize_cache()


async def test_a_large_pool_takes_memory_only_where_it_is_written(fresh_worker: WorkerDriver, model: Path) -> None:
    """The pool is far larger than this test may grow."""
    await fresh_worker.load(model)
    before = _resident_bytes()
    cache = await fresh_worker.initialize_cache(num_device_blocks=1_000_000)
    assert cache.num_device_blocks * cache.cache_block_bytes > 3 << 30
    assert _resident_bytes() - before < 1 << 29


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


async def test_a_model_that_is_not_there_leaves_the_state(fresh_worker: WorkerDriver, model: Path) -> None:
    await bring_to(fresh_worker, "DEVICE_READY", model)
    for missing in ("/nowhere/at/all", str(model / "config.json")):
        error = await fails(_load(fresh_worker, missing))
        assert error.reason is Reason.MODEL_NOT_LOADED
        assert state(await fresh_worker.info()) == "DEVICE_READY"
    assert (await _load(fresh_worker, str(model)))[-1].HasField("loaded")


async def _load(worker: WorkerDriver, model: str) -> list[pb.LoadModelResponse]:
    return [event async for event in worker.stub.LoadModel(pb.LoadModelRequest(model=model))]


async def test_a_format_that_is_not_known_is_refused_and_one_without_files_loads(
    fresh_worker: WorkerDriver, tmp_path: Path, model: Path
) -> None:
    shutil.copy(model / "config.json", tmp_path)
    await bring_to(fresh_worker, "DEVICE_READY", model)
    unknown = pb.LoadModelRequest(model=str(tmp_path), format=77)  # type: ignore[arg-type]
    error = await fails(anext(aiter(fresh_worker.stub.LoadModel(unknown))))
    assert error.reason is Reason.FIELD_INVALID
    assert "is not known to this worker" in error.message
    request = pb.LoadModelRequest(model=str(tmp_path), format=pb.LOAD_FORMAT_RANDOM)
    *_, last = [event async for event in fresh_worker.stub.LoadModel(request)]
    assert last.loaded.parameter_bytes > 0


async def test_a_load_goes_on_when_its_caller_leaves(fresh_worker: WorkerDriver, model: Path) -> None:
    await bring_to(fresh_worker, "DEVICE_READY", model)
    call = fresh_worker.stub.LoadModel(pb.LoadModelRequest(model=str(model)))
    assert isinstance(await call.read(), pb.LoadModelResponse)
    call.cancel()
    await fresh_worker.wait_for(lambda info: state(info) == "LOADED")


@pytest.mark.parametrize(("name", "at", "after"), [("InitDevice", 0, 1), ("InitializeCache", 2, 3)])
async def test_a_set_up_goes_on_when_its_caller_leaves(
    fresh_worker: WorkerDriver, model: Path, name: str, at: int, after: int
) -> None:
    await bring_to(fresh_worker, STATES[at], model)
    begun, gate = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(begun.set)
        assert gate.wait(20)

    fresh_worker.server.worker._thread.post(hold)
    await asyncio.wait_for(begun.wait(), 20)
    calling = asyncio.create_task(call(fresh_worker, name, model))
    await asyncio.sleep(0)
    # Refused while the first runs, which has therefore arrived.
    assert "is running" in (await fails(call(fresh_worker, name, model))).message
    calling.cancel()
    await asyncio.wait({calling})
    for _ in range(3):
        assert "is running" in (await fails(call(fresh_worker, name, model))).message
    gate.set()
    await fresh_worker.wait_for(lambda info: state(info) == STATES[after])


async def test_a_second_load_is_refused_while_the_first_runs(fresh_worker: WorkerDriver, model: Path) -> None:
    await bring_to(fresh_worker, "DEVICE_READY", model)
    first = fresh_worker.stub.LoadModel(pb.LoadModelRequest(model=str(model)))
    second = fresh_worker.stub.LoadModel(pb.LoadModelRequest(model=str(model)))
    outcomes = []
    for one in (first, second):
        try:
            outcomes.append([event async for event in one][-1].WhichOneof("event"))
        except grpc.aio.AioRpcError as error:
            outcomes.append(from_rpc_error(error).reason)
    assert sorted(outcomes) == ["WRONG_STATE", "loaded"]


async def test_the_device_must_be_allowed(fresh_worker: WorkerDriver) -> None:
    error = await fails(fresh_worker.stub.InitDevice(pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CUDA)))
    assert error.reason is Reason.FIELD_INVALID
    assert "--worker-device cpu" in error.message
    assert state(await fresh_worker.info()) == "CREATED"


@pytest.mark.parametrize(("requested", "allowed"), [("auto", "cpu"), ("cpu", "auto"), ("cpu", "cpu")])
def test_the_cpu_is_chosen(requested: str, allowed: str) -> None:
    assert choose_device(requested, AllowedDevice(allowed)) == torch.device("cpu")


@pytest.mark.parametrize(("requested", "allowed"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_contradictions_are_refused(requested: str, allowed: str) -> None:
    with pytest.raises(BlockyardError, match=f"--worker-device {allowed}"):
        choose_device(requested, AllowedDevice(allowed))


def test_a_worker_computes_on_the_gpu_that_it_was_started_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made_current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    assert choose_device("auto", AllowedDevice("auto", 1)) == torch.device("cuda", 1)
    assert made_current == [1]
    assert choose_device("cpu", AllowedDevice("auto", 1)) == torch.device("cpu")
    with pytest.raises(BlockyardError, match=r"sees 2 GPUs here, .* --worker-device-index 2"):
        choose_device("cuda", AllowedDevice("auto", 2))


async def test_shutdown_is_answered_twice_and_asks_the_process_to_end(fresh_worker: WorkerDriver) -> None:
    for _ in range(2):
        await fresh_worker.stub.Shutdown(pb.ShutdownRequest(reason="test"))
    await asyncio.wait_for(fresh_worker.server.stopping.wait(), 20)
