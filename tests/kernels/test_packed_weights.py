"""Packed weights: the same network as from the files, read and not packed; and every file that must not be used."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from crc32c import crc32c

from blockyard.contract.parallel import ALONE, Parallel
from tests.kit.kernels.backends import CPU, INSTRUCTION_SETS, become_another_build, build_kernels
from tests.kit.kernels.tiny_models import tiny_model
from worker_service.models import loader, packed_files
from worker_service.models.determinism import determinism_id
from worker_service.models.loader import RunnableModel, load_model

if TYPE_CHECKING:
    from collections.abc import Generator

KERNELS = INSTRUCTION_SETS[0]
READ = "packed weights were read"


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    build_kernels()


@pytest.fixture(autouse=True)
def all_events(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a tiny model, to be damaged."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(
    folder: Path,
    cache: Path | None,
    *,
    dtype: torch.dtype | None = None,
    quantization: str = "none",
    parallel: Parallel = ALONE,
    kernels: str = KERNELS,
) -> RunnableModel:
    def ignore(done_bytes: int, total_bytes: int) -> None:
        pass

    return load_model(folder, dtype, CPU, ignore, kernels, quantization, "auto", parallel, packed_cache=cache)


def bits(loaded: RunnableModel) -> list[bytes]:
    return [part.numpy().tobytes() for part in loaded.parts]


def assert_same(found: RunnableModel, expected: RunnableModel) -> None:
    assert bits(found) == bits(expected)
    assert found.weights_digest == expected.weights_digest
    assert found.tensors == expected.tensors
    assert found.parameter_bytes == expected.parameter_bytes


def the_file(cache: Path) -> Path:
    (path,) = cache.iterdir()
    return path


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "llama_tied"])
def test_a_second_load_reads_what_the_first_has_packed(
    name: str, quantization: str, cache: Path, caplog: pytest.LogCaptureFixture
):
    folder = tiny_model(name)
    plain = load(folder, None, quantization=quantization)
    first = load(folder, cache, quantization=quantization)
    assert READ not in caplog.messages
    second = load(folder, cache, quantization=quantization)
    assert caplog.messages.count(READ) == 1
    assert [loaded.origin.source for loaded in (plain, first, second)] == ["files", "files", "packed"]
    for loaded in (first, second):
        assert_same(loaded, plain)
        fingerprint = loaded.model.fingerprint()
        assert fingerprint == plain.model.fingerprint()
        assert determinism_id(loaded, fingerprint) == determinism_id(plain, fingerprint)


LOADS = """
import pathlib, sys, torch
from worker_service.models.loader import load_model
folder, cache, kernels = sys.argv[1:]
load_model(pathlib.Path(folder), None, torch.device("cpu"), lambda *_: None, kernels, packed_cache=pathlib.Path(cache))
print(" ".join(sys.modules))
"""


def test_torch_is_not_made_to_load_its_compiler(cache: Path):
    """An op on tensors without numbers can do so, which takes longer than to read the weights of a small model."""
    folder = tiny_model("qwen2")
    load(folder, cache)
    told = subprocess.run([sys.executable, "-c", LOADS, folder, cache, KERNELS], stdout=subprocess.PIPE, check=True)
    modules = told.stdout.decode().split()
    assert "worker_service.models.packed_files" in modules
    assert "torch._dynamo" not in modules


@pytest.mark.parametrize("parallel", [Parallel(2, 1, 0), Parallel(2, 1, 1), Parallel(1, 2, 1)])
def test_each_rank_has_a_file_of_its_own(parallel: Parallel, cache: Path, caplog: pytest.LogCaptureFixture):
    folder = tiny_model("llama")
    load(folder, cache)
    first = load(folder, cache, parallel=parallel)
    assert len(list(cache.iterdir())) == 2
    assert READ not in caplog.messages
    assert_same(load(folder, cache, parallel=parallel), first)
    assert READ in caplog.messages


def footer_of(path: Path) -> tuple[int, int]:
    """Where the footer begins, and the size of the file."""
    content = path.read_bytes()
    end = packed_files._END.size
    text_bytes = packed_files._END.unpack(content[-end:])[0]
    return len(content) - end - text_bytes, len(content)


@pytest.mark.parametrize("place", ["first", "middle", "last of the parts", "footer", "length", "checksum", "mark"])
@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_file_that_is_damaged_anywhere_is_written_anew(
    damage: str, place: str, folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
):
    expected = load(folder, cache)
    path = the_file(cache)
    begin, size = footer_of(path)
    mark = size - len(packed_files.MARK)
    places = {"first": 0, "middle": begin // 2, "last of the parts": begin - 1, "footer": (begin + mark) // 2}
    offset = {**places, "length": mark - 12, "checksum": mark - 1, "mark": size - 1}[place]
    if damage == "cut":
        os.truncate(path, offset)
    else:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)
    assert_same(load(folder, cache), expected)
    assert "packed weights are not used: the weights are read and packed" in caplog.messages
    assert READ not in caplog.messages
    load(folder, cache)
    assert READ in caplog.messages


# What replaces a field of a footer whose checksum is right, as another version of this code or an editor may write it.
FOOTERS: dict[str, Any] = {
    "key": {"key": None},
    "no key": {},
    "facts": {"facts": []},
    "facts without a field": {"facts": {"weights_digest": "0"}},
    "facts of other types": {"facts": {"weights_digest": 0, "tensors": {}, "has_two_tables": 0, "companions": {}}},
    "parts": {"parts": ["1"]},
    "negative parts": {"parts": [-1]},
    "too few checksums": {"crc": []},
    "one field too many": {"more": 1},
}


@pytest.mark.parametrize("name", FOOTERS)
def test_a_whole_footer_that_lacks_fields_costs_a_warning(
    name: str, folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
):
    plain = load(folder, cache)
    path = the_file(cache)
    begin, size = footer_of(path)
    content = path.read_bytes()
    footer = json.loads(content[begin : size - packed_files._END.size])
    footer |= FOOTERS[name]
    if name == "no key":
        del footer["key"]
    text = json.dumps(footer).encode()
    end = packed_files._END.pack(len(text), crc32c(text), packed_files.MARK)
    path.write_bytes(content[:begin] + text + end)
    assert_same(load(folder, cache), plain)
    assert READ not in caplog.messages
    assert "packed weights are not used: the weights are read and packed" in caplog.messages
    assert_same(load(folder, cache), plain)
    assert READ in caplog.messages


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_place_that_is_no_file_costs_a_warning(
    kind: str, folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
):
    plain = load(folder, cache)
    path = the_file(cache)
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    assert_same(load(folder, cache), plain)
    assert "packed weights are not used: the weights are read and packed" in caplog.messages


def test_changed_files_are_read_anew_and_leave_one_file(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture):
    load(folder, cache)
    weights = folder / "model.safetensors"
    status = weights.stat()
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    load(folder, cache)
    assert READ not in caplog.messages
    assert any("weight files" in str(vars(record)) for record in caplog.records)
    the_file(cache)
    configuration = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(configuration | {"rms_norm_eps": 1e-3}))
    load(folder, cache)
    assert READ not in caplog.messages
    load(folder, cache)
    assert READ in caplog.messages


def test_dtypes_and_kernels_do_not_mix(cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    folder = tiny_model("llama")
    for dtype in (torch.float32, torch.bfloat16):
        load(folder, cache, dtype=dtype)
    load(folder, cache, dtype=torch.float32, quantization="int8")
    assert len(list(cache.iterdir())) == 3
    with monkeypatch.context() as patch:
        become_another_build(patch)
        load(folder, cache, dtype=torch.float32)
    assert READ not in caplog.messages
    load(folder, cache, kernels="reference")
    assert len(list(cache.iterdir())) == 3, "torch's own layout lies in memory of its own"


@pytest.fixture
def small_files() -> Generator[None]:
    """No file of this process can become larger than 10,000 bytes, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_cache_that_is_full_costs_nothing_but_the_next_start(
    cache: Path, caplog: pytest.LogCaptureFixture, small_files: None
):
    folder = tiny_model("llama")
    loaded = load(folder, cache)
    assert loaded.model.fingerprint() == load(folder, None).model.fingerprint()
    assert "packed weights cannot be written" in caplog.messages
    assert not list(cache.iterdir()), "nothing is left"


def test_a_cache_may_not_be_a_file(cache: Path, caplog: pytest.LogCaptureFixture):
    cache.write_text("")
    load(tiny_model("llama"), cache)
    assert "packed weights cannot be written" in caplog.messages


def test_other_parts_are_refused(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    """What the key does not show shows in the parts' sizes: the last guard before foreign bytes."""
    monkeypatch.setattr(loader, "make_key", lambda *arguments: {"dtype": "", "quantization": "", "layout": []})
    load(folder, cache)
    changed = Path(shutil.copytree(tiny_model("qwen2"), folder.parent / "other"))
    monkeypatch.setattr(loader, "cached_path", lambda *arguments: the_file(cache))
    plain = load(changed, None)
    assert_same(load(changed, cache), plain)
