"""Paths that nobody means well with, at each rpc of a worker that takes one, and files that wait behind good ones.

Each is refused with a typed error and in bounded work, and steps go on meanwhile.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.common.v1 import administration_pb2
from blockyard.errors import Reason
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.hostile_paths import PATHS, TYPED, lay_traps
from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from tests.unit.worker_service.driver import WorkerDriver, fails, new_sequence, running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from blockyard.errors import BlockyardError

# The root's own path is a few parts long; a path of 1,024 bytes has 512.
MAX_LOOKS = 2000
METHODS = ("AddLora", "SaveState", "ReloadWeights", "LoadModel")
# SaveState makes a folder of this name, or finds that the name is taken; an empty model is the one that is loaded.
RIGHT = {("SaveState", "the home of nobody"), ("ReloadWeights", "empty"), ("LoadModel", "empty")}


@pytest.fixture
def root(tmp_path: Path, model: Path) -> Path:
    """A folder with adapters, models and traps."""
    root = tmp_path / "root"
    make_tiny_adapter(root / "good", model, 1)
    make_tiny_adapter(tmp_path / "elsewhere", model, 2)
    lay_traps(root)
    return root


@pytest.fixture
async def rooted(socket_folder: Path, root: Path) -> AsyncIterator[WorkerDriver]:
    roots = dict.fromkeys(("worker_lora_root", "worker_model_root", "worker_save_root"), str(root))
    async with running_worker(socket_folder, **roots) as driver:
        await driver.stub.InitDevice(pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, dtype=pb.DTYPE_FLOAT32))
        yield driver


async def load(worker: WorkerDriver, model: Path) -> None:
    limits = pb.LoraLimits(max_loras=1, max_lora_rank=8, max_cpu_loras=1)
    async for _ in worker.stub.LoadModel(pb.LoadModelRequest(model=str(model), lora=limits)):
        pass
    await worker.initialize_cache()


async def call(worker: WorkerDriver, method: str, path: str) -> Any:
    if method == "AddLora":
        return await worker.stub.AddLora(pb.AddLoraRequest(lora_id=1, name="a", path=path))
    request: Any = {
        "SaveState": pb.SaveStateRequest(format=administration_pb2.STATE_FORMAT_SHARDED, folder=path),
        "ReloadWeights": pb.ReloadWeightsRequest(model=path),
        "LoadModel": pb.LoadModelRequest(model=path),
    }[method]
    return [event async for event in getattr(worker.stub, method)(request)]


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[threading.Thread]]:
    """Notes which thread looks at the file system, at each part of a path that is resolved."""
    looks: list[threading.Thread] = []
    with monkeypatch.context() as patch:

        def lstat(*arguments: Any, **options: Any) -> os.stat_result:
            looks.append(threading.current_thread())
            return real(*arguments, **options)

        real = os.lstat
        patch.setattr(posixpath.os, "lstat", lstat)
        yield looks


async def refuse_all(
    worker: WorkerDriver, method: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, BlockyardError | None]:
    errors: dict[str, BlockyardError | None] = {}
    for name, path in PATHS.items():
        if (method, name) in RIGHT:
            continue
        with counted(monkeypatch) as looks:
            errors[name] = await fails(call(worker, method, path))
        assert threading.current_thread() not in looks, (name, "the event loop looks at the file system")
        assert len(looks) <= MAX_LOOKS, name
    return errors


@pytest.mark.parametrize("method", METHODS)
async def test_a_hostile_path_is_refused_in_bounded_work(
    rooted: WorkerDriver, model: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if method != "LoadModel":
        await load(rooted, model)
    before = (await rooted.info()).state
    errors = await refuse_all(rooted, method, monkeypatch)
    assert {name: error for name, error in errors.items() if error is None or error.reason not in TYPED} == {}
    assert (await rooted.info()).state == before


async def test_no_step_is_lost_by_adapters_that_cannot_be(
    rooted: WorkerDriver, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(rooted, model)
    steps = rooted.open(1)
    new = new_sequence(1, [5, 6, 7], [1, 2])
    await steps.sampled(new_sequences=[new], sequence_ids=[1], num_new_tokens=[3])
    await refuse_all(rooted, "AddLora", monkeypatch)
    await rooted.stub.AddLora(pb.AddLoraRequest(lora_id=1, name="a", path="good"))
    assert len(await steps.decode(1, 3)) == 3


FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "folder", "device", "link out of the root", "loop"])
async def test_files_of_adapters_are_regular_ones_below_the_root(
    rooted: WorkerDriver, root: Path, model: Path, file: str, kind: str
) -> None:
    await load(rooted, model)
    place = root / "good" / file
    place.rename(root.parent / file)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        target = {"link to a pipe": "../pipe", "device": "/dev/zero", "loop": file}
        place.symlink_to(target.get(kind, f"../../elsewhere/{file}"))
    error = await fails(rooted.stub.AddLora(pb.AddLoraRequest(lora_id=1, name="a", path="good"), timeout=20))
    assert (error.reason, file in error.message) == (Reason.MODEL_NOT_LOADED, True)
    # The next one is read, and a link that stays below the root is followed.
    place.rmdir() if kind == "folder" else place.unlink()
    (root.parent / file).rename(root / file)
    place.symlink_to(f"../{file}")
    await rooted.stub.AddLora(pb.AddLoraRequest(lora_id=1, name="a", path="good"), timeout=20)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "link out of the root"])
async def test_files_of_other_weights_are_regular_ones_below_the_root(
    rooted: WorkerDriver, root: Path, model: Path, file: str, kind: str
) -> None:
    await load(rooted, model)
    other = shutil.copytree(model, root / "other")
    (other / file).unlink()
    if kind == "pipe":
        os.mkfifo(other / file)
    else:
        (other / file).symlink_to(model / file)
    error = await fails(call(rooted, "ReloadWeights", str(other)))
    assert (error.reason, file in error.message) == (Reason.MODEL_NOT_LOADED, True)


async def test_an_index_names_no_files_outside_of_the_root(rooted: WorkerDriver, root: Path, model: Path) -> None:
    await load(rooted, model)
    other = shutil.copytree(model, root / "other")
    (other / "model.safetensors").rename(root.parent / "weights.safetensors")
    (other / "model.safetensors.index.json").write_text('{"weight_map": {"any": "../../weights.safetensors"}}')
    error = await fails(call(rooted, "ReloadWeights", str(other)))
    assert (error.reason, "weights.safetensors" in error.message) == (Reason.MODEL_NOT_LOADED, True)


async def test_names_are_bounded(rooted: WorkerDriver, model: Path) -> None:
    await load(rooted, model)
    long = "x" * 100_000
    for method, request in (
        ("AddLora", pb.AddLoraRequest(lora_id=1, name=long, path="good")),
        ("ReloadWeights", pb.ReloadWeightsRequest(version=long)),
        ("ReloadWeights", pb.ReloadWeightsRequest(model=str(model), revision=long)),
        ("ReloadWeights", pb.ReloadWeightsRequest(revision="../../..")),
        ("BeginWeightUpdate", pb.BeginWeightUpdateRequest(version=long, ticket=b"x" * 16)),
    ):
        call: Any = getattr(rooted.stub, method)(request)
        error = await fails(call.read() if method == "ReloadWeights" else call)
        assert error.reason is Reason.FIELD_INVALID, method
