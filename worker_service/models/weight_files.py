"""A model folder's safetensors files: finds them, reads tensors one at a time, and hashes what it reads.

A tensor is mapped only while it is used. A load therefore holds one copy of the weights plus one tensor. Knows names
and shapes, and nothing of networks.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import torch

from blockyard.model_config.fields import read_object, unusable
from blockyard.model_files import tensor_digest
from blockyard.paths import open_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# safetensors' names of the float dtypes of plain weights.
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Dtypes of raw bytes, and of the integers of quantized weights.
_READ_DTYPES = {**STORED_DTYPES, "U8": torch.uint8}
_ALL_DTYPES = {**_READ_DTYPES, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
# The limit of safetensors' own code.
MAX_HEADER_BYTES = 100_000_000


class Numbers(Enum):
    """The kind of a tensor's numbers. Only quantized checkpoints have other kinds than the first."""

    FLOATS = auto()
    SCALES = auto()
    BYTES = auto()
    """Levels of eight bits."""
    WORDS = auto()
    """Levels of four bits, eight to a word."""
    ZEROS = auto()
    """Zero points of four bits, eight to a word."""
    PLACES = auto()


_DTYPES_OF: dict[Numbers, tuple[str, ...]] = {
    # And bytes, for callers that read them as such.
    Numbers.FLOATS: tuple(_READ_DTYPES),
    # float32 has them all.
    Numbers.SCALES: ("F32", "F16", "BF16"),
    Numbers.BYTES: ("I8",),
    Numbers.WORDS: ("I32",),
    Numbers.ZEROS: ("I32",),
    Numbers.PLACES: ("I32", "I64"),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The location of a tensor, from the header of its file."""

    path: Path
    shape: tuple[int, ...]
    stored_dtype: str
    offset: int
    """The place of its first byte in the file."""
    root: Path | None = None
    """A file descriptor of `blockyard.paths.open_file`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor; 0 for an unknown dtype."""
        dtype = _ALL_DTYPES.get(self.stored_dtype)
        return math.prod(self.shape) * dtype.itemsize if dtype is not None else 0


class Weights(Protocol):
    """Tensors by name: from a folder's files, or random."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, shape: Sequence[int], numbers: Numbers = Numbers.FLOATS) -> Tensor:
        """Returns a tensor of this shape, or this rank's part of it. It may be a view of a file: copy it to keep it.

        A meta tensor means that the source fills the packed memory itself.
        """
        ...

    def pass_over(self, name: str, shape: Sequence[int]) -> None:
        """Takes note of a tensor that another stage reads."""


class WeightFiles:
    """All tensors of a model folder, by name."""

    def __init__(
        self,
        folder: Path,
        on_progress: Callable[[int, int], None],
        paths: Sequence[Path] | None = None,
        folders: Sequence[str] = (),
        root: Path | None = None,
    ) -> None:
        """Reads the headers of all files.

        Args:
            folder: holds model.safetensors, or an index and its shards.
            on_progress: called with (bytes read, bytes in all) after each tensor.
            paths: the files, if they have other names.
            folders: subfolders with more files; the names of their tensors begin with the folder's name: "2_Dense.".
            root: the folder below which all files must lie; None: they may lie anywhere.

        Raises:
            BlockyardError: MODEL_NOT_LOADED, if files are missing or damaged, or have another format.
        """
        self._folder = folder
        self._on_progress = on_progress
        self._entries = _read_headers(_find_files(folder, root) if paths is None else paths, root)
        for name in folders:
            inner = _read_headers(_find_files(folder / name, root), root)
            self._entries |= {f"{name}.{tensor}": entry for tensor, entry in inner.items()}
        self._digests: dict[str, bytes] = {}
        self._done_bytes = 0
        self._total_bytes = sum(entry.num_bytes for entry in self._entries.values())

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that were read or passed over, by name, in this order."""
        return {name: self._entries[name].shape for name in self._digests}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, by name, in the order of the files."""
        return {name: entry.shape for name, entry in self._entries.items()}

    def check(self, tensors: Mapping[str, Sequence[int]]) -> None:
        """Raises BlockyardError MODEL_NOT_LOADED unless all these tensors can be read."""
        for name, shape in tensors.items():
            self._find(name, shape, _ALL_DTYPES)

    @property
    def unread(self) -> list[str]:
        return sorted(self._entries.keys() - self._digests.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def read(self, name: str, shape: Sequence[int], numbers: Numbers = Numbers.FLOATS) -> Tensor:
        """Returns a tensor as it is stored. It is a view of the file, which stays mapped while the tensor lives.

        Raises:
            BlockyardError: MODEL_NOT_LOADED, if the tensor is missing, or has another shape or kind.
        """
        entry = self._find(name, shape, _DTYPES_OF[numbers])
        tensor = map_tensor(entry, reads_ahead=True)
        self._note(name, entry, tensor)
        return tensor

    def pass_over(self, name: str, shape: Sequence[int]) -> None:
        """Registers a tensor that another process reads. Only the bytes for the digest are read.

        Raises:
            BlockyardError: as in `read`.
        """
        entry = self._find(name, shape, _ALL_DTYPES)
        self._note(name, entry, map_tensor(entry, reads_ahead=False))

    def _note(self, name: str, entry: TensorEntry, tensor: Tensor) -> None:
        self._digests[name] = sample_digest(name, entry.shape, entry.stored_dtype, tensor)
        self._done_bytes += entry.num_bytes
        self._on_progress(self._done_bytes, self._total_bytes)

    def _find(self, name: str, shape: Sequence[int], dtypes: Collection[str]) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise unusable(f"{self._folder} has no tensor {name}: the weights do not belong to its config.json")
        self._check_shape(f"{entry.path.name}: {name}", entry.shape, shape)
        if entry.stored_dtype not in dtypes:
            raise unusable(
                f"{entry.path.name}: {name} is stored as {entry.stored_dtype}; supported are "
                f"{', '.join(name for name in dtypes if name != 'U8')}: load the model's original weights instead"
            )
        return entry

    def _check_shape(self, name: str, found: Sequence[int], shape: Sequence[int]) -> None:
        if tuple(found) != tuple(shape):
            raise unusable(
                f"{name} has shape {list(found)}, and config.json asks for {list(shape)}: "
                "the weights do not belong to it"
            )

    def finish(self) -> str:
        """Reports the end of the read, and returns the digest of the weights in hex.

        It is the SHA-256 of the tensors' own digests in the order of their names; each of these covers name, shape,
        stored dtype and up to 64 KiB of bytes: all of them, or 64 pieces of 1 KiB at even distances.
        """
        self._on_progress(self._total_bytes, self._total_bytes)
        return weights_digest(self._digests)


def weights_digest(digests: Mapping[str, bytes]) -> str:
    """Hashes the digests of all tensors, in hex; see `WeightFiles.finish`."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def sample_digest(name: str, shape: Sequence[int], stored_dtype: str, tensor: Tensor) -> bytes:
    """Hashes a tensor as it is stored; see `WeightFiles.finish`."""
    return tensor_digest(name, shape, stored_dtype, tensor.flatten().view(torch.uint8).numpy().data)


def map_tensor(entry: TensorEntry, *, reads_ahead: bool) -> Tensor:
    """Maps only this tensor's part of the file, so that its pages are freed with the tensor."""
    dtype = _ALL_DTYPES[entry.stored_dtype]
    if not entry.num_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    begin = entry.offset % mmap.ALLOCATIONGRANULARITY
    try:
        with open_file(entry.path, entry.root) as file:
            # A private mapping, since torch has no read-only tensors.
            memory = mmap.mmap(
                file.fileno(), begin + entry.num_bytes, access=mmap.ACCESS_COPY, offset=entry.offset - begin
            )
    except OSError as error:
        raise unusable(f"{entry.path} cannot be read: {error.strerror}") from None
    if reads_ahead and hasattr(mmap, "MADV_WILLNEED"):
        memory.madvise(mmap.MADV_WILLNEED)
    return torch.frombuffer(memory, dtype=dtype, offset=begin, count=math.prod(entry.shape)).view(entry.shape)


def _read_headers(paths: Sequence[Path], root: Path | None) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for path in paths:
        try:
            entries |= read_header(path, root)
        except OSError as error:
            raise unusable(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, struct.error):
            raise unusable(f"{path} is damaged or not complete: download it again") from None
    return entries


def read_header(path: Path, root: Path | None = None) -> dict[str, TensorEntry]:
    """Reads the location of each tensor of a file; raises ValueError or a similar error if the file is too short.

    `root`: as in `open_file`, whose OSErrors it raises. The format: https://huggingface.co/docs/safetensors#format
    """
    with open_file(path, root) as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"the header has {header_bytes} bytes")
        header = json.loads(file.read(header_bytes))
        data_bytes = file.seek(0, os.SEEK_END) - 8 - header_bytes
    entries: dict[str, TensorEntry] = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        begin, end = map(int, fields["data_offsets"])
        shape, offset = tuple(map(int, fields["shape"])), 8 + header_bytes + begin
        entry = TensorEntry(path, shape, str(fields["dtype"]), offset, root)
        if not 0 <= begin <= end <= data_bytes or entry.num_bytes not in (0, end - begin):
            raise ValueError(f"{name} has wrong offsets")
        entries[name] = entry
    return entries


def _find_files(folder: Path, root: Path | None) -> list[Path]:
    # As in transformers, an index beside a single file is ignored.
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    if (folder / INDEX_FILE).exists():
        return _find_shards(folder, root)
    raise unusable(f"{folder} has no {SINGLE_FILE}: {_advice(folder)}")


def _find_shards(folder: Path, root: Path | None) -> list[Path]:
    try:
        names = sorted(set(read_object(folder / INDEX_FILE, root)["weight_map"].values()))
        missing = [name for name in names if not (folder / name).exists()]
    except (KeyError, AttributeError, TypeError, ValueError):
        raise unusable(f"{folder / INDEX_FILE} is damaged: download it again") from None
    if missing:
        raise unusable(f"{folder} lacks {', '.join(missing)}, which {INDEX_FILE} names: download the missing files")
    return [folder / name for name in names]


def _advice(folder: Path) -> str:
    """Returns the error for a folder without safetensors weights."""
    suffixes = {path.suffix for path in folder.iterdir()}
    if any(folder.glob("sharded-rank-*.json")):
        return "it holds sharded state: load it with --load-format sharded"
    if ".packed" in suffixes:
        return "it holds packed weights: load them with --load-format packed"
    if ".gguf" in suffixes:
        return "GGUF files are not supported; take the model's safetensors version"
    if suffixes & {".bin", ".pt", ".pth"}:
        return (
            "weights in PyTorch's own format are not read, since loading them can run code; convert them with "
            "transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )
    if ".safetensors" in suffixes:
        return f"its safetensors files have other names; the weights must be {SINGLE_FILE}, or shards with {INDEX_FILE}"
    if any((folder / name).exists() for name in ("tokenizer.model", "tokenizer.json")):
        return "it holds a tokenizer only; download the weights too"
    return "download the weights too"
