"""Packed weights in one file for each rank, with the bytes that they have in memory, so that a load needs no packing.

The file has the parts of the arena, in the order in which they were taken; then a footer in JSON, its length, its
CRC32C and a magic number. The footer has a CRC32C of each MiB of each part, and a key of everything that determines the
layout. A file with another key or a changed byte is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import torch
from crc32c import crc32c

from blockyard.model_config.share import Share
from blockyard.paths import open_file, read_file
from worker_service.models.source import source_digest
from worker_service.models.weight_files import Numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from blockyard.contract.parallel import Parallel
    from blockyard_kernels.arena import Arena
    from blockyard_kernels.ops import Backend
    from worker_service.models.model_config import ModelConfig

# The number changes with the format.
MARK = b"BLOCKYARD PACKED WEIGHTS 1\n"
_END = struct.Struct(f"<QI{len(MARK)}s")
CHECKED_BYTES = 1 << 20
# Bytes that a thread reads at a time: they are still in the processor's cache when their checksum is computed.
_READ_BYTES = 8 << 20
_MAX_THREADS = 4

Key = dict[str, Any]


class PackError(Exception):
    """A packed file cannot be used, for the reason in the message."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The values of a footer besides the key and the checksums."""

    weights_digest: str
    """As in `RunnableModel`: the digest of the files from which the weights came."""
    tensors: Mapping[str, Sequence[int]]
    """As in `RunnableModel`."""
    has_two_tables: bool
    """As in `DecoderModel`."""
    companions: Mapping[str, str]
    """SHA-256 in hex of other files of the same folder, by name."""


@dataclass(frozen=True, slots=True)
class _Footer:
    """The end of the file, after the parts."""

    key: Key
    facts: Facts
    parts: Sequence[int]
    """The bytes of each part."""
    crc: Sequence[int]
    """The CRC32C of each MiB of each part."""

    @classmethod
    def decode(cls, text: bytes) -> _Footer:
        """Decodes a footer; raises PackError unless it has all fields, each of its type."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["facts"] = Facts(**fields["facts"])
            footer = cls(**fields)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise PackError("the footer lacks fields") from None
        if not footer.is_whole:
            raise PackError("the footer has impossible fields")
        return footer

    @property
    def is_whole(self) -> bool:
        """Whether all fields are of their types, and the parts have as many checksums as they need."""
        facts = self.facts
        return (
            isinstance(self.key, dict)
            and isinstance(facts.weights_digest, str)
            and isinstance(facts.has_two_tables, bool)
            and isinstance(facts.companions, dict)
            and all(isinstance(digest, str) for digest in facts.companions.values())
            and isinstance(facts.tensors, dict)
            and all(map(_are_counts, facts.tensors.values()))
            and _are_counts(self.parts)
            and _are_counts(self.crc)
            and len(self.crc) == sum(-(-num_bytes // CHECKED_BYTES) for num_bytes in self.parts)
        )


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def make_key(
    config: ModelConfig, backend: Backend, quantization: str, parallel: Parallel, folder: Path, model_digest: str
) -> Key:
    """Collects everything that determines the bytes of packed weights; files with equal keys are interchangeable.

    Args:
        config: the model's configuration.
        backend: the backend that packs.
        quantization: the format of the products' weights.
        parallel: the rank whose weights these are.
        folder: the folder of the weights: size and time of its safetensors files count.
        model_digest: the digest of its config.json.
    """
    return {
        "config.json": model_digest,
        "configuration": hashlib.sha256(repr(replace(config, quantized_kv=None)).encode()).hexdigest(),
        "kernels": f"{backend.name} {backend.identity}",
        "version of Blockyard": source_digest(),
        "dtype": str(config.dtype).removeprefix("torch."),
        "quantization": quantization,
        "layout": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank],
        "share": repr(Share.of(config, parallel)),
        "weight files": [
            [str(path.relative_to(folder)), *_size_and_time(path)]
            for path in sorted([*folder.glob("*.safetensors*"), *folder.glob("[0-9]*/*.safetensors*")])
        ],
    }


def _size_and_time(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        # A dangling link is reported by the code that reads the file, if it is read.
        return 0, 0
    return status.st_size, status.st_mtime_ns


def pack_name(rank: int) -> str:
    """Returns the name of a rank's file in a folder of packed weights."""
    return f"model-rank-{rank}.packed"


def cached_path(cache: Path, key: Key, folder: Path) -> Path:
    """Returns the path of a model's file in a cache.

    It does not depend on the key: a new file replaces the file of the same model, rank and dtype with an older key, so
    that the cache does not grow with every version.
    """
    slot = [str(folder.resolve()), key["dtype"], key["quantization"], key["layout"]]
    return cache / f"{folder.name}-{hashlib.sha256(json.dumps(slot).encode()).hexdigest()[:16]}.packed"


def write_pack(
    path: Path, key: Key, facts: Facts, parts: Sequence[Tensor], on_progress: Callable[[int, int], None]
) -> None:
    """Writes a file completely or not at all: it is written under another name and then renamed.

    Args:
        path: the path of the file; an existing file is replaced.
        key: the key of `make_key`.
        facts: values for the footer.
        parts: the parts of the arena, each [bytes] uint8 in host memory.
        on_progress: called with (bytes written, bytes in all).

    Raises:
        OSError: the file cannot be written; no part of it is left.
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with unfinished.open("xb") as file:
            checksums = list(_write_parts(file, parts, on_progress))
            text = json.dumps(asdict(_Footer(key, facts, [len(part) for part in parts], checksums))).encode()
            file.write(text + _END.pack(len(text), crc32c(text), MARK))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def _write_parts(file: BinaryIO, parts: Sequence[Tensor], on_progress: Callable[[int, int], None]) -> Iterator[int]:
    done_bytes, total_bytes = 0, sum(map(len, parts))
    for part in parts:
        content = part.numpy().data
        for begin in range(0, len(content), CHECKED_BYTES):
            piece = content[begin : begin + CHECKED_BYTES]
            file.write(piece)
            yield crc32c(piece)
        done_bytes += len(part)
        on_progress(done_bytes, total_bytes)


class PackedWeights:
    """The tensors of a packed file, by name, as meta tensors: the packed bytes are read directly into the arena.

    Same interface as `WeightFiles`. Build a network from it in the arena that `fill` returns, call `finish`, close it.
    """

    def __init__(self, path: Path, key: Key, config: ModelConfig, on_progress: Callable[[int, int], None]) -> None:
        """Opens a file.

        Raises:
            FileNotFoundError: the file does not exist.
            PackError: the file is incomplete, or has another key.
        """
        self._file = open_file(path)
        self._path, self._config, self._on_progress = path, config, on_progress
        self._filling: _FillingArena | None = None
        try:
            self._check(key)
        except BaseException:
            self._file.close()
            raise

    def _check(self, key: Key) -> None:
        footer = self._read_footer()
        if others := [name for name in key if footer.key.get(name) != key[name]]:
            found = ", ".join(f"{name} ({_brief(footer.key.get(name))}, not {_brief(key[name])})" for name in others)
            raise PackError(f"the file was written for other weights or another worker: {found}")
        self.facts = footer.facts
        self._sizes, self._checksums = footer.parts, footer.crc
        self._check_companions()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._filling is not None:
            self._filling.stop()
        self._file.close()

    def _read_footer(self) -> _Footer:
        descriptor = self._file.fileno()
        size = os.fstat(descriptor).st_size
        end = os.pread(descriptor, _END.size, max(0, size - _END.size))
        if len(end) != _END.size or (fields := _END.unpack(end))[2] != MARK or fields[0] > size - _END.size:
            raise PackError("the file is not whole, or of another version")
        text = os.pread(descriptor, fields[0], size - _END.size - fields[0])
        if crc32c(text) != fields[1]:
            raise PackError("the footer is damaged")
        footer = _Footer.decode(text)
        if sum(footer.parts) + len(text) + _END.size != size:
            raise PackError("the file is not whole")
        return footer

    def _check_companions(self) -> None:
        for name, digest in self.facts.companions.items():
            try:
                found = hashlib.sha256(read_file(self._path.parent / name)).hexdigest()
            except OSError:
                found = ""
            if found != digest:
                raise PackError(f"{name} is not the file that was saved with it")

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the checkpoint's tensors, by name, in the order in which they were read."""
        return {name: tuple(shape) for name, shape in self.facts.tensors.items()}

    @property
    def unread(self) -> list[str]:
        """Empty: tensors that the model does not use are not packed."""
        return []

    def __contains__(self, name: str) -> bool:
        # A table that is tied may have been found twice, and is packed once.
        is_head = self._config.head.is_tied and name in {f"{head}.weight" for head in self._config.names.heads}
        return name in self.facts.tensors and (not is_head or self.facts.has_two_tables)

    def read(self, name: str, shape: Sequence[int], numbers: Numbers = Numbers.FLOATS) -> Tensor:
        """Returns a tensor of this shape on the device "meta"."""
        return torch.empty(*shape, dtype=self._config.dtype, device="meta")

    def pass_over(self, name: str, shape: Sequence[int]) -> None:
        """Does nothing."""

    def check(self, tensors: Mapping[str, Sequence[int]]) -> None:
        """Does nothing: the key ensures that these are the tensors."""

    def fill(self, arena: Arena) -> Arena:
        """Returns an arena that hands out the parts of `arena`, and starts to read the file's bytes into each part."""
        self._filling = _FillingArena(arena, self._file.fileno(), self._sizes, self._checksums)
        return self._filling

    def finish(self) -> str:
        """Waits until all bytes are read, and returns the digest of the weights in hex.

        Raises:
            PackError: the file is damaged, or cannot be read. The filled memory must not be used.
        """
        assert self._filling is not None
        self._filling.finish(self._on_progress)
        return self.facts.weights_digest


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


class _FillingArena:
    """Hands out the parts of an arena, and reads a file's parts into them with several threads."""

    def __init__(self, arena: Arena, descriptor: int, sizes: Sequence[int], checksums: Sequence[int]) -> None:
        self._arena = arena
        self._descriptor = descriptor
        self._sizes = iter(sizes)
        self._checksums = iter(checksums)
        self._total_bytes, self._offset = sum(sizes), 0
        self._pool = ThreadPoolExecutor(min(_MAX_THREADS, torch.get_num_threads()), "packed weights")
        self._reads: list[tuple[int, Future[None]]] = []

    @property
    def used_bytes(self) -> int:
        return self._arena.used_bytes

    @property
    def parts(self) -> list[Tensor]:
        return self._arena.parts

    def take(self, num_bytes: int) -> Tensor:
        """Takes a part and begins to fill it; its bytes are there after `finish`."""
        if next(self._sizes, None) != num_bytes:
            raise PackError("the file has other parts than the model")
        part = self._arena.take(num_bytes)
        content = part.numpy().data
        for begin in range(0, num_bytes, _READ_BYTES):
            piece = content[begin : begin + _READ_BYTES]
            checksums = [next(self._checksums) for _ in range(0, len(piece), CHECKED_BYTES)]
            self._reads.append((len(piece), self._pool.submit(self._read, piece, self._offset + begin, checksums)))
        self._offset += num_bytes
        return part

    def _read(self, content: memoryview, offset: int, checksums: Sequence[int]) -> None:
        for number, checksum in enumerate(checksums):
            begin = number * CHECKED_BYTES
            piece = content[begin : begin + CHECKED_BYTES]
            try:
                num_read = os.preadv(self._descriptor, [piece], offset + begin)
            except OSError as error:
                raise PackError(f"the file cannot be read: {error.strerror}") from None
            if num_read != len(piece) or crc32c(piece) != checksum:
                raise PackError(f"the file is damaged at byte {offset + begin}")

    def finish(self, on_progress: Callable[[int, int], None]) -> None:
        """Waits for all reads; raises PackError."""
        done_bytes = 0
        for num_bytes, read in self._reads:
            read.result()
            done_bytes += num_bytes
            on_progress(done_bytes, self._total_bytes)
        if next(self._sizes, None) is not None:
            raise PackError("the file has other parts than the model")

    def stop(self) -> None:
        """Ends the threads; waiting reads are dropped."""
        self._pool.shutdown(cancel_futures=True)

    def rewind(self) -> None:
        self._arena.rewind()

    def give_up(self, *, keeps: bool) -> None:
        self._arena.give_up(keeps=keeps)

    def restore(self) -> None:
        self._arena.restore()
