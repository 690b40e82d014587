"""Safetensors files as they are read here: tensors in place, and headers that tell of what is not there."""

from __future__ import annotations

import gc
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from blockyard.errors import BlockyardError, Reason
from worker_service.models.weight_files import MAX_HEADER_BYTES, WeightFiles


def open_files(folder: Path) -> WeightFiles:
    return WeightFiles(folder, lambda done_bytes, total_bytes: None)


def write(folder: Path, header: Any, data: bytes = b"", *, header_bytes: int | None = None) -> None:
    content = json.dumps(header).encode()
    length = struct.pack("<Q", len(content) if header_bytes is None else header_bytes)
    (folder / "model.safetensors").write_bytes(length + content + data)


def complaint_of(folder: Path) -> str:
    with pytest.raises(BlockyardError) as caught:
        open_files(folder)
    assert caught.value.reason is Reason.MODEL_NOT_LOADED
    return caught.value.message


def mappings_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_read_as_they_were_written(tmp_path: Path, dtype: torch.dtype) -> None:
    made = {
        "odd": torch.randn(3, 5),
        "one": torch.randn(1),
        "large": torch.randn(300, 1000),
        "none": torch.zeros(0, 7),
        "scalar": torch.randn(()),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in made.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = open_files(tmp_path)
    assert "odd" in files
    assert "__metadata__" not in files
    assert files.unread == sorted(tensors)
    for name, tensor in tensors.items():
        read = files.read(name, tensor.shape)
        assert read.dtype is dtype
        assert torch.equal(read, tensor)
    assert files.unread == []


def test_a_tensor_lies_in_its_file_for_as_long_as_it_lives(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(1000, 1000), "b": torch.randn(1000, 1000)}, path)
    files = open_files(tmp_path)
    assert mappings_of(path) == 0, "nothing is mapped before it is read"
    first, second = files.read("a", (1000, 1000)), files.read("b", (1000, 1000))[3:5]
    gc.collect()
    assert mappings_of(path) == 2
    del first
    assert mappings_of(path) == 1
    assert second.sum().isfinite()
    del second
    assert mappings_of(path) == 0


def test_what_is_written_to_a_tensor_stays_out_of_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    files = open_files(tmp_path)
    files.read("a", (4,)).zero_()
    assert torch.equal(files.read("a", (4,)), torch.ones(4))


def entry(begin: object, end: object, shape: object = (2,), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry(0, 9)},
        {"a": entry(4, 8)},
        {"a": entry(8, 0)},
        {"a": entry(-8, 0)},
        {"a": entry(4, 12)},
        {"a": entry(0, 8, shape=[3])},
        {"a": entry(0, 8, shape=[-2])},
        {"a": entry(0, 8, shape=None)},
        {"a": entry("begin", "end")},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": 3},
        ["a"],
        3,
    ],
    ids=repr,
)
def test_a_header_that_tells_of_what_is_not_there(tmp_path: Path, header: object) -> None:
    write(tmp_path, header, bytes(8))
    assert "model.safetensors is damaged or not complete" in complaint_of(tmp_path)


@pytest.mark.parametrize("header_bytes", [MAX_HEADER_BYTES + 1, 2**63, 5, 10_000])
def test_a_header_of_another_length(tmp_path: Path, header_bytes: int) -> None:
    write(tmp_path, {"a": entry(0, 8)}, bytes(8), header_bytes=header_bytes)
    assert "model.safetensors is damaged or not complete" in complaint_of(tmp_path)


def test_a_kind_of_number_that_nobody_needs_is_no_damage(tmp_path: Path) -> None:
    header = {"quantized": entry(8, 9, shape=[2], dtype="F4"), "a": entry(0, 8)}
    write(tmp_path, header, bytes(9))
    files = open_files(tmp_path)
    assert torch.equal(files.read("a", (2,)), torch.zeros(2))
    with pytest.raises(BlockyardError, match="quantized is stored as F4"):
        files.read("quantized", (2,))
