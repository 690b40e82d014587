"""One rank's share of a model in safetensors files of its own, so that each rank reads only what it holds.

The tensors have transformers' names and their original dtypes, and are cut to this rank's share. A manifest in JSON has
the layout, the source of the weights, and the SHA-256 of every file; it is written last.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from blockyard.model_config.fields import unusable
from blockyard.model_config.share import Share
from blockyard.paths import open_file, read_file
from blockyard_kernels.shapes import PLAIN_LINEAR, LinearSpec
from worker_service.models.builder import NetworkBuilder
from worker_service.models.projections import take
from worker_service.models.weight_files import Numbers, WeightFiles, Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from blockyard.contract.parallel import Parallel
    from blockyard_kernels.arena import Arena
    from blockyard_kernels.mixture.ops import ExpertShape, ExpertWeights, PackedExperts
    from blockyard_kernels.ops import Backend, PackedLinear
    from blockyard_kernels.packed import WeightRows
    from worker_service.models.model_config import ModelConfig

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a rank's files."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    rank: int
    weights_digest: str
    """As in `RunnableModel`: the digest of the files from which the weights came."""
    tensors: Mapping[str, Sequence[int]]
    """As in `RunnableModel`: the tensors of the whole model."""
    files: Mapping[str, str]
    """SHA-256 in hex of all files of the rank, by name."""
    format: int = FORMAT

    @property
    def layout(self) -> str:
        """The rank and the sizes for which the tensors were cut, in words."""
        return _describe(self.tensor_parallel_size, self.pipeline_parallel_size, self.rank)


def _describe(tensor_parallel_size: int, pipeline_parallel_size: int, rank: int) -> str:
    return (
        f"rank {rank} of tensor_parallel_size {tensor_parallel_size}, pipeline_parallel_size {pipeline_parallel_size}"
    )


def manifest_name(rank: int | str) -> str:
    return f"sharded-rank-{rank}.json"


def part_name(rank: int, part: int) -> str:
    """Returns the name of a safetensors file: vLLM's."""
    return f"model-rank-{rank}-part-{part}.safetensors"


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes a manifest with a SHA-256 of itself; raises OSError."""
    described = asdict(manifest)
    path.write_text(json.dumps({**described, "sha256": _digest(described)}, indent=1))


def _digest(described: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path, parallel: Parallel, root: Path | None = None) -> Manifest:
    """Reads the manifest of a rank's files. `root`: as in `open_file`.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, if it is missing or damaged, or has another layout.
    """
    path = folder / manifest_name(parallel.rank)
    if not path.is_file():
        others = sorted(folder.glob(manifest_name("*")))
        if not others:
            raise unusable(f"{folder} has no {path.name}: it holds no sharded state, or it was not saved to its end")
        path = others[0]
    try:
        described = json.loads(read_file(path, root))
        if described.pop("sha256") != _digest(described) or described["format"] != FORMAT:
            raise ValueError
        manifest = Manifest(**{field.name: described[field.name] for field in fields(Manifest)})
    except OSError as error:
        raise unusable(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise unusable(f"{path} is damaged, or of another version: save the model again") from None
    wanted = _describe(parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank)
    if manifest.layout != wanted:
        raise unusable(
            f"{path} was saved for {manifest.layout}, and this worker is {wanted}: start it in that layout, or load "
            "the original weights"
        )
    return manifest


def hash_file(path: Path, root: Path | None = None) -> str:
    """Returns the SHA-256 of a file in hex; raises OSError. `root`: as in `open_file`."""
    with open_file(path, root) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ShardedFiles(WeightFiles):
    """The tensors of a rank's files, by name: parts, where the rank has only a part."""

    def __init__(
        self,
        folder: Path,
        parallel: Parallel,
        on_progress: Callable[[int, int], None],
        root: Path | None = None,
    ) -> None:
        """Reads and verifies all files of this rank completely. `root`: as in `WeightFiles`.

        Raises:
            BlockyardError: MODEL_NOT_LOADED, if files are missing or changed, or have another layout.
        """
        self._manifest = read_manifest(folder, parallel, root)
        for name, digest in self._manifest.files.items():
            try:
                found = hash_file(folder / name, root)
            except OSError as error:
                raise unusable(f"{folder / name} cannot be read: {error.strerror}") from None
            if found != digest:
                raise unusable(f"{folder / name} is not the file that was saved: save the model again")
        paths = [folder / name for name in self._manifest.files if name.endswith(".safetensors")]
        super().__init__(folder, on_progress, paths, root=root)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the whole model's tensors, by name, in the order in which they were read at first."""
        return {name: tuple(shape) for name, shape in self._manifest.tensors.items()}

    def pass_over(self, name: str, shape: Sequence[int]) -> None:
        """Does nothing: the tensor is in another rank's files."""

    def check(self, tensors: Mapping[str, Sequence[int]]) -> None:
        """Raises BlockyardError MODEL_NOT_LOADED unless these are the model's tensors."""
        if self.tensors != {name: tuple(shape) for name, shape in tensors.items()}:
            raise unusable(f"{self._folder} holds other tensors than those of the model that was loaded")

    def _check_shape(self, name: str, found: Sequence[int], shape: Sequence[int]) -> None:
        if any(part > whole for part, whole in zip(found, shape, strict=True)):
            super()._check_shape(name, found, shape)

    def finish(self) -> str:
        """Reports the end of the read, and returns the digest of the files from which the weights came."""
        super().finish()
        return self._manifest.weights_digest


def write_slices(
    config: ModelConfig, files: Weights, parallel: Parallel, folder: Path, max_file_bytes: int
) -> list[Path]:
    """Writes a rank's share of some weights, and returns the paths of the files.

    Args:
        config: the model's configuration.
        files: the weights; each tensor is read or passed over, as in a load.
        parallel: the rank.
        folder: the folder for the files.
        max_file_bytes: the most bytes of a file, unless a single tensor is larger; writing needs as much memory.

    Raises:
        OSError, SafetensorError: a file cannot be written.
        BlockyardError: MODEL_NOT_LOADED, if the weights cannot be read.
    """
    writer = _Writer(folder, parallel.rank, max_file_bytes)
    _SliceReader(config, files, Share.of(config, parallel), writer.add).read()
    writer.flush()
    return writer.paths


class _Writer:
    """Writes tensors into files of a limited size."""

    def __init__(self, folder: Path, rank: int, max_file_bytes: int) -> None:
        self.paths: list[Path] = []
        self._folder = folder
        self._rank = rank
        self._max_file_bytes = max_file_bytes
        self._tensors: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor. A view of a mapped file is only read when it is written."""
        waiting_bytes = sum(waiting.nbytes for waiting in self._tensors.values())
        if self._tensors and waiting_bytes + tensor.nbytes > self._max_file_bytes:
            self.flush()
        self._tensors[name] = tensor.contiguous()

    def flush(self) -> None:
        if self._tensors:
            path = self._folder / part_name(self._rank, len(self.paths))
            save_file(self._tensors, path)
            self.paths.append(path)
            self._tensors = {}


def list_share(config: ModelConfig, names: Sequence[str], parallel: Parallel) -> list[str]:
    """Lists a model's tensors that a rank reads, in order; it does not read tensors of other pipeline stages."""
    share: list[str] = []
    _SliceReader(config, _Names(names), Share.of(config, parallel), lambda name, tensor: share.append(name)).read()
    return share


class _Names:
    """Meta tensors by name. Same interface as `Weights`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str, shape: Sequence[int], numbers: Numbers = Numbers.FLOATS) -> Tensor:
        """Returns a tensor on "meta"."""
        return torch.empty(*shape, device="meta")

    def pass_over(self, name: str, shape: Sequence[int]) -> None:
        """Does nothing."""


class _SliceReader(NetworkBuilder):
    """Reads the weights in the order of a load, and passes on this rank's parts in stored order."""

    def __init__(self, config: ModelConfig, files: Weights, share: Share, take: Callable[[str, Tensor], None]) -> None:
        nowhere: Any = None
        backend: Backend = nowhere
        arena: Arena = nowhere
        super().__init__(config, backend, files, share, arena)
        self._take = take

    def _read(
        self, name: str, *shape: int, part: Sequence[Sequence[slice]] = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        if self._passes_over:
            self._files.pass_over(name, shape)
        else:
            self._take(name, self._read_part(name, shape, part))
        return take(torch.empty(shape, device="meta"), part)

    def _pack(self, weights: WeightRows, bias: Tensor | None = None, spec: LinearSpec = PLAIN_LINEAR) -> PackedLinear:
        nothing: Any = None
        return nothing

    def _pack_router(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return self._pack([weight], bias)

    def _pack_experts(self, experts: Iterable[ExpertWeights], shape: ExpertShape) -> PackedExperts:
        deque(experts, maxlen=0)
        nothing: Any = None
        return nothing

    def _keep(self, tensor: Tensor) -> Tensor:
        return tensor
