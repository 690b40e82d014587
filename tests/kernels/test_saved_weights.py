"""What a worker saves and loads again: the same bits; no damaged file, no place outside the root."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch

from blockyard.contract.parallel import ALONE, Parallel
from blockyard.contract.workers import SavedState, SaveRequest, StateFormat, WorkerState
from blockyard.errors import BlockyardError, Reason
from tests.kit.kernels.backends import CPU, INSTRUCTION_SETS, become_another_build, build_kernels
from tests.kit.kernels.tiny_models import make_tiny_model, tiny_model
from worker_service.models.determinism import determinism_id
from worker_service.models.loader import RunnableModel, load_model
from worker_service.set_up import SetUp
from worker_service.weights.saving import Saving

if TYPE_CHECKING:
    from collections.abc import Generator

    from worker_service.weights.residency import Owner

FORMATS = ("sharded", "packed")
RANKS = [Parallel(2, 1, rank) for rank in (0, 1)] + [Parallel(1, 2, rank) for rank in (0, 1)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    build_kernels()


def load(
    folder: Path,
    load_format: str = "auto",
    parallel: Parallel = ALONE,
    *,
    kernels: str = INSTRUCTION_SETS[0],
    quantization: str = "none",
    dtype: torch.dtype | None = None,
) -> RunnableModel:
    return load_model(folder, dtype, CPU, lambda done, total: None, kernels, quantization, load_format, parallel)


class Worker:
    """A worker that has loaded a model."""

    def __init__(self, loaded: RunnableModel) -> None:
        self.set_up = SetUp(loaded=loaded)

    @contextmanager
    def lifecycle(self, operation: str, *states: WorkerState) -> Generator[None]:
        assert self.set_up.state in states
        yield


def save(
    loaded: RunnableModel, save_format: str, root: Path | None, folder: str = "saved", max_bytes: int = 0
) -> SavedState:
    saving = Saving(cast("Owner", Worker(loaded)), root)
    return asyncio.run(saving.save(SaveRequest(StateFormat(save_format), folder, max_bytes), lambda done, total: None))


def refusal_of(folder: Path, load_format: str, parallel: Parallel = ALONE, **how: str) -> str:
    with pytest.raises(BlockyardError) as caught:
        load(folder, load_format, parallel, kernels=how.get("kernels", INSTRUCTION_SETS[0]))
    assert caught.value.reason is Reason.MODEL_NOT_LOADED
    return caught.value.message


def assert_same(found: RunnableModel, expected: RunnableModel) -> None:
    assert [part.numpy().tobytes() for part in found.parts] == [part.numpy().tobytes() for part in expected.parts]
    assert found.weights_digest == expected.weights_digest
    assert found.tensors == expected.tensors
    assert determinism_id(found, "") == determinism_id(expected, "")


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("save_format", FORMATS)
@pytest.mark.parametrize("name", ["llama", "llama_bias", "qwen3"])
def test_what_was_saved_is_loaded_as_the_same_network(name: str, save_format: str, quantization: str, tmp_path: Path):
    original = load(tiny_model(name), quantization=quantization)
    saved = save(original, save_format, tmp_path)
    assert saved.folder == str(tmp_path / "saved")
    assert set(saved.files) >= {"config.json", "tokenizer.json"}
    found = load(tmp_path / "saved", save_format, quantization=quantization)
    assert_same(found, original)
    assert found.model.fingerprint() == original.model.fingerprint()


@pytest.mark.parametrize("kernels", [INSTRUCTION_SETS[0], "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_state_is_of_no_kernels_and_no_dtype(kernels: str, dtype: torch.dtype, tmp_path: Path):
    save(load(tiny_model("llama")), "sharded", tmp_path)
    found, plain = (
        load(folder, load_format, kernels=kernels, dtype=dtype)
        for folder, load_format in ((tmp_path / "saved", "sharded"), (tiny_model("llama"), "auto"))
    )
    assert found.model.fingerprint() == plain.model.fingerprint()
    assert_same(found, plain)


@pytest.mark.parametrize("save_format", FORMATS)
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_ranks_save_into_one_folder_and_load_their_own(name: str, save_format: str, tmp_path: Path):
    for parallel in RANKS:
        folder = f"{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size}"
        save(load(tiny_model(name), parallel=parallel), save_format, tmp_path, folder)
    for parallel in RANKS:
        folder = tmp_path / f"{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size}"
        assert_same(load(folder, save_format, parallel), load(tiny_model(name), parallel=parallel))
    with pytest.raises(BlockyardError, match="already exists"):
        save(load(tiny_model(name), parallel=RANKS[0]), save_format, tmp_path, "2x1")


def test_two_tables_stay_two(tmp_path: Path):
    """Of models whose config.json says that they are one, and that have two all the same."""
    folder = make_tiny_model("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    for save_format in FORMATS:
        for parallel in (ALONE, *RANKS[:2]):
            original = load(folder, parallel=parallel)
            assert original.model.has_two_tables
            name = f"{save_format}{parallel.tensor_parallel_size}"
            save(original, save_format, tmp_path, name)
            assert_same(load(tmp_path / name, save_format, parallel), original)


def test_large_weights_are_written_in_several_files_and_saved_again(tmp_path: Path):
    original = load(tiny_model("llama"))
    saved = save(original, "sharded", tmp_path, max_bytes=100_000)
    parts = [name for name in saved.files if name.startswith("model-rank-0-part-")]
    assert len(parts) > 3
    again = load(tmp_path / "saved", "sharded")
    save(again, "sharded", tmp_path, "again")
    assert_same(load(tmp_path / "again", "sharded"), original)


PACK = "model-rank-{}.packed"
SAVED_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]
FILES = [
    *(("sharded", name) for name in (*SAVED_FILES, "model-rank-0-part-0.safetensors", "sharded-rank-0.json")),
    *(("packed", name) for name in (*SAVED_FILES, "model-rank-0.packed")),
]


@pytest.fixture(scope="module")
def saved_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    for save_format in FORMATS:
        save(load(tiny_model("llama")), save_format, root, save_format)
    return root


def test_all_files_are_damaged_below(saved_folders: Path):
    assert {(path.parent.name, path.name) for path in saved_folders.glob("*/*")} == set(FILES)


@pytest.mark.parametrize("damage", ["first bit", "middle bit", "last bit", "cut", "emptied", "removed"])
@pytest.mark.parametrize(("save_format", "name"), FILES)
def test_every_file_that_is_changed_is_refused(
    save_format: str, name: str, damage: str, saved_folders: Path, tmp_path: Path
):
    folder = tmp_path / "copy"
    shutil.copytree(saved_folders / save_format, folder)
    path = folder / name
    content = bytearray(path.read_bytes())
    if damage == "removed":
        path.unlink()
    elif damage in ("cut", "emptied"):
        os.truncate(path, len(content) // 2 if damage == "cut" else 0)
    else:
        content[{"first bit": 0, "middle bit": len(content) // 2, "last bit": -1}[damage]] ^= 1
        path.write_bytes(content)
    assert refusal_of(folder, save_format)


@pytest.fixture(scope="module")
def saved_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By format, the folder of two ranks, as they leave it when the last one has finished."""
    root = tmp_path_factory.mktemp("saved_by_two")
    for save_format in FORMATS:
        for parallel in RANKS[:2]:
            save(load(tiny_model("qwen2"), parallel=parallel), save_format, root, save_format)
    return root


@pytest.mark.parametrize("damage", ["bit", "cut", "removed", "the other rank's"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("save_format", "name"),
    [("sharded", "model-rank-{}-part-0.safetensors"), ("sharded", "sharded-rank-{}.json"), ("packed", PACK)],
)
def test_a_rank_refuses_its_own_file_and_the_others_load(
    save_format: str, name: str, rank: int, damage: str, saved_by_two: Path, tmp_path: Path
):
    folder = Path(shutil.copytree(saved_by_two / save_format, tmp_path / "copy"))
    path = folder / name.format(rank)
    content = bytearray(path.read_bytes())
    if damage == "removed":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, len(content) - 1)
    elif damage == "bit":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        shutil.copy(folder / name.format(1 - rank), path)
    assert refusal_of(folder, save_format, RANKS[rank])
    load(folder, save_format, RANKS[1 - rank])


def test_another_layout_is_refused_with_both(tmp_path: Path):
    for save_format in FORMATS:
        save(load(tiny_model("llama"), parallel=RANKS[1]), save_format, tmp_path, save_format)
    told = refusal_of(tmp_path / "sharded", "sharded")
    assert "saved for rank 1 of tensor_parallel_size 2, pipeline_parallel_size 1" in told
    assert "this worker is rank 0 of tensor_parallel_size 1, pipeline_parallel_size 1" in told
    (tmp_path / "packed" / "model-rank-1.packed").rename(tmp_path / "packed" / "model-rank-0.packed")
    assert "layout ([2, 1, 1], not [1, 1, 0])" in refusal_of(tmp_path / "packed", "packed")


def test_packed_weights_are_for_the_same_kernels(saved_folders: Path, monkeypatch: pytest.MonkeyPatch):
    become_another_build(monkeypatch)
    refusal = refusal_of(saved_folders / "packed", "packed")
    assert "kernels (" in refusal
    assert "model-rank-0.packed cannot be used" in refusal


@pytest.mark.parametrize("save_format", FORMATS)
def test_a_folder_says_how_it_is_to_be_loaded(save_format: str, saved_folders: Path):
    assert f"--load-format {save_format}" in refusal_of(saved_folders / save_format, "auto")
    assert "it holds no sharded state" in refusal_of(tiny_model("llama"), "sharded")


def test_weights_that_changed_on_the_disk_are_not_saved(tmp_path: Path):
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    loaded = load(folder)
    shutil.copy(make_tiny_model("llama_tied", tmp_path / "other") / "model.safetensors", folder)
    shutil.copy(make_tiny_model("llama_linear", tmp_path / "third") / "model.safetensors", folder)
    with pytest.raises(BlockyardError, match="differ from the worker"):
        save(loaded, "sharded", tmp_path)
    assert not (tmp_path / "saved").exists()
    with pytest.raises(BlockyardError, match="save them sharded"):
        save(load(folder, kernels="reference"), "packed", tmp_path)


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("", Reason.FIELD_INVALID),
        (".", Reason.FIELD_INVALID),
        ("../outside", Reason.FIELD_INVALID),
        ("a/../../outside", Reason.FIELD_INVALID),
        ("/tmp/outside", Reason.PERMISSION_DENIED),
        ("link/inside", Reason.PERMISSION_DENIED),
        ("link", Reason.FIELD_INVALID),
        ("there", Reason.FIELD_INVALID),
        ("nul\0", Reason.FIELD_INVALID),
        ("x" * 300, Reason.FIELD_INVALID),
        ("a/" * 100_000, Reason.FIELD_INVALID),
        ("loop/inside", Reason.FIELD_INVALID),
    ],
)
def test_no_place_but_a_new_folder_below_the_root_is_written(folder: str, reason: Reason, tmp_path: Path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    for path in (root / "there", outside):
        path.mkdir(parents=True)
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    with pytest.raises(BlockyardError) as caught:
        save(load(tiny_model("llama")), "packed", root, folder)
    assert caught.value.reason is reason
    assert sorted(path.name for path in root.iterdir()) == ["link", "loop", "there"]
    assert not list(outside.iterdir())


def test_nothing_is_saved_without_a_root(tmp_path: Path):
    with pytest.raises(BlockyardError, match="a worker that was started with --worker-save-root") as caught:
        save(load(tiny_model("llama")), "packed", None)
    assert caught.value.reason is Reason.FEATURE_DISABLED
    save(load(tiny_model("llama")), "packed", tmp_path, str(tmp_path / "below" / "it"))
    assert (tmp_path / "below" / "it" / "config.json").exists()


@pytest.mark.parametrize("save_format", FORMATS)
@pytest.mark.parametrize("parallel", [ALONE, RANKS[0]])
def test_of_a_save_that_finds_the_disk_full_nothing_is_left(save_format: str, parallel: Parallel, tmp_path: Path):
    loaded = load(tiny_model("llama"), parallel=parallel)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file of this process can become larger than this: the system's refusal is that of a disk without room.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(BlockyardError, match="the disk is full") as caught:
            save(loaded, save_format, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.reason is Reason.NEVER_FITS
    assert not list(tmp_path.iterdir())
