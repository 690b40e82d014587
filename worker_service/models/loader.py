"""Loads a model folder onto a device: configuration, backend, weights. Knows no requests and no hub."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.capacity.formats import check_kv_cache, check_quantization, held_in, weight_format
from blockyard.capacity.weights import check_room, weights_bytes
from blockyard.contract.models import Task
from blockyard.contract.parallel import ALONE, Parallel
from blockyard.errors import BlockyardError, Reason
from blockyard.model_config.fallback import check_settings, needs_transformers
from blockyard.model_config.fields import unusable
from blockyard.model_config.parallel_sizes import check_sizes
from blockyard.model_config.share import Share
from blockyard.model_files import model_digest
from blockyard.telemetry import EventLogger
from blockyard_kernels.select import get_backend, make_arena
from worker_service.device.memory import room_for_weights
from worker_service.models.builder import build_decoder
from worker_service.models.model_config import ModelConfig, hold_kv_in, read_config
from worker_service.models.packed_files import (
    Facts,
    Key,
    PackedWeights,
    PackError,
    cached_path,
    make_key,
    pack_name,
    write_pack,
)
from worker_service.models.random_weights import RandomWeights
from worker_service.models.sharded_files import ShardedFiles
from worker_service.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.ops import Backend
    from worker_service.models.decoder import DecoderModel

__all__ = ["ModelConfig", "RunnableModel", "load_model"]

log = EventLogger(__name__)

NO_COMPANIONS: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class WeightsOrigin:
    """The source of a load's weights, and its cost."""

    load_format: str
    """The requested format; see `load_model`."""
    source: str
    """The source that was read: "files" of a checkpoint, "sharded" or "packed" files, or "random" without files."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RunnableModel:
    """A model with its backend, ready to run."""

    model: DecoderModel
    backend: Backend
    config: ModelConfig
    weights_digest: str
    """Hash over every tensor's name, shape, dtype and a sample of its bytes, in hex."""
    model_digest: str
    """SHA-256 of config.json, in hex."""
    parameter_bytes: int
    """Bytes of the packed weights."""
    quantization: str
    """The format of the products' weights: of `blockyard_kernels.select.QUANTIZATIONS`, or the checkpoint's format."""
    folder: Path
    origin: WeightsOrigin
    parallel: Parallel
    """The rank whose share of the weights was loaded."""
    arena: Arena
    tensors: Mapping[str, tuple[int, ...]]
    """The shapes of the checkpoint's tensors, by name, in the order in which they are read."""
    parts: Sequence[Tensor]
    """The parts of the arena that hold the weights, each [bytes] uint8, in the order in which they were taken."""
    can_sleep: bool = True
    """Whether its memory can be released for sleep."""
    version: str = ""
    """The version of the weights; empty for the weights that LoadModel loaded."""

    @property
    def foreign_code(self) -> str:
        """The foreign code that computes the model, with hashes; empty: none."""
        return self.model.foreign_code

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for its users, one sentence each."""
        return self.config.remarks if self.foreign_code else ()

    def require_own_code(self, operation: str) -> None:
        """Raises BlockyardError FEATURE_DISABLED if transformers' code computes the model: it lacks `operation`."""
        if self.foreign_code:
            message = f"{self.config.architecture} does not support {operation}, since transformers' code computes it"
            raise BlockyardError(Reason.FEATURE_DISABLED, message)


def load_model(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    on_progress: Callable[[int, int], None],
    kernels: str = "auto",
    quantization: str = "none",
    load_format: str = "auto",
    parallel: Parallel = ALONE,
    *,
    batch_invariant: bool = False,
    can_sleep: bool = False,
    packed_cache: Path | None = None,
    task: Task = Task.UNSPECIFIED,
    model_code: str = "auto",
    kv_cache_dtype: str = "auto",
) -> RunnableModel:
    """Loads a model, one tensor at a time: memory stays near one copy of the weights.

    Args:
        folder: config.json and safetensors files, as `blockyard.model_files.resolve_model` gives it.
        dtype: the dtype to compute in; None: the dtype of config.json.
        device: the device to load to.
        on_progress: called with (bytes read, bytes in all) after each tensor.
        kernels: one of `blockyard_kernels.select.CPU_KERNELS` or `GPU_KERNELS`, by the device.
        quantization: one of `blockyard_kernels.select.QUANTIZATIONS`.
        load_format: "auto"; "sharded" or "packed" for saved weights; "random" for random ones, made on the device.
        parallel: this rank's place; its share of the weights is loaded.
        batch_invariant: whether a GPU must give a row the same bits in every step.
        can_sleep: whether a GPU's memory must allow to be released for sleep; a CPU's memory always does.
        packed_cache: the folder that keeps packed weights of "auto" for the next load; None: they are not kept.
        task: the task for which the model is served; UNSPECIFIED: the task in its files.
        model_code: one of `blockyard.model_config.fallback.MODEL_CODES`.
        kv_cache_dtype: the dtype of KV blocks; "auto": the model's.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, with a message that says what to do.
    """
    started = time.perf_counter()
    if needs_transformers(folder, model_code):
        asked = {"quantization": quantization, "load_format": load_format, "kv_cache_dtype": kv_cache_dtype}
        check_settings(folder, **asked, num_workers=parallel.world_size, task=task)
        place = folder, dtype, device
        return _load_by_transformers(*place, on_progress, kernels, started, batch_invariant=batch_invariant)
    config = hold_kv_in(kv_cache_dtype, read_config(folder, dtype, task))
    _check(config, parallel, device, kernels, quantization, kv_cache_dtype)
    held = config.stored.method if config.stored is not None else quantization
    try:
        backend = get_backend(device, config.dtype, kernels, quantization, batch_invariant=batch_invariant)
    except ValueError as error:
        raise unusable(str(error)) from None
    target = _Target(config, backend, held, parallel, folder, load_format, can_sleep or device.type == "cpu", started)
    pack = target.find_pack(packed_cache)
    loaded = _load_packed(pack, target, on_progress) if pack else None
    if loaded is None:
        loaded = target.build(open_weights(config, folder, device, load_format, on_progress, parallel))
    _log_loaded(loaded, held_in(config, quantization))
    if pack and pack.is_cached and loaded.origin.source != "packed":
        _write_cached(pack, loaded)
    return loaded


def _load_by_transformers(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    on_progress: Callable[[int, int], None],
    kernels: str,
    started: float,
    *,
    batch_invariant: bool,
) -> RunnableModel:
    """Loads a model that transformers' code computes. Only this function imports transformers."""
    from worker_service.models.fallback.loading import load_network  # noqa: PLC0415  an optional feature

    found = load_network(folder, dtype, device, on_progress, kernels, batch_invariant=batch_invariant)
    for remark in found.config.remarks:
        log.warning(remark, architecture=found.config.architecture)
    _log_doubts("auto", found.files.unread)
    loaded = RunnableModel(
        found.model,
        found.backend,
        found.config,
        found.files.finish(),
        model_digest(folder),
        found.model.parameter_bytes,
        "none",
        folder,
        WeightsOrigin("auto", "files", time.perf_counter() - started),
        ALONE,
        found.arena,
        found.files.tensors,
        (),
    )
    _log_loaded(loaded, loaded.config.dtype_name)
    return loaded


@dataclass(frozen=True, slots=True)
class _Target:
    config: ModelConfig
    backend: Backend
    quantization: str
    parallel: Parallel
    folder: Path
    load_format: str
    can_sleep: bool
    started: float
    """The time of the load's start, by time.perf_counter()."""

    def build(self, files: WeightFiles | RandomWeights | PackedWeights) -> RunnableModel:
        arena = make_arena(self.backend.device, can_be_given_up=self.can_sleep)
        model = build_decoder(self.config, self.backend, files, self.parallel, arena)
        _log_doubts(self.load_format, files.unread)
        return RunnableModel(
            model,
            self.backend,
            self.config,
            files.finish(),
            model_digest(self.folder),
            model.parameter_bytes,
            self.quantization,
            self.folder,
            WeightsOrigin(self.load_format, _source_of(files, self.load_format), time.perf_counter() - self.started),
            self.parallel,
            arena,
            files.tensors,
            tuple(arena.parts),
            self.can_sleep,
        )

    def find_pack(self, cache: Path | None) -> _Pack | None:
        """Returns the path where packed weights lie or may be written; None if there is no such path."""
        if not self.backend.packs_into_arenas or self.backend.device.type != "cpu":
            return None
        digest = model_digest(self.folder)
        key = make_key(self.config, self.backend, self.quantization, self.parallel, self.folder, digest)
        if self.load_format == "packed":
            return _Pack(self.folder / pack_name(self.parallel.rank), key, is_cached=False)
        if self.load_format == "auto" and cache is not None:
            return _Pack(cached_path(cache, key, self.folder), key, is_cached=True)
        return None


def _source_of(files: WeightFiles | RandomWeights | PackedWeights, load_format: str) -> str:
    if isinstance(files, PackedWeights):
        return "packed"
    return load_format if load_format in ("sharded", "random") else "files"


@dataclass(frozen=True, slots=True)
class _Pack:
    """The path of packed weights, existing or not, and the key that they must have."""

    path: Path
    key: Key
    is_cached: bool


def _load_packed(pack: _Pack, target: _Target, on_progress: Callable[[int, int], None]) -> RunnableModel | None:
    """Loads packed weights. If they are unusable but other files exist, logs the reason and returns None."""
    try:
        with PackedWeights(pack.path, pack.key, target.config, on_progress) as files:
            loaded = target.build(files)
    except FileNotFoundError:
        if pack.is_cached:
            return None
        problem = "there is none"
    except (OSError, PackError) as error:
        problem = str(error)
    else:
        log.info("packed weights were read", path=str(pack.path))
        return loaded
    if not pack.is_cached and not any(pack.path.parent.glob("*.safetensors")):
        raise unusable(f"{pack.path} cannot be used, and there are no safetensors files beside it: {problem}")
    log.warning("packed weights are not used: the weights are read and packed", path=str(pack.path), reason=problem)
    return None


def _write_cached(pack: _Pack, loaded: RunnableModel) -> None:
    """Writes packed weights to the cache for the next start; a failure is only logged."""
    begin = time.perf_counter()
    try:
        pack.path.parent.mkdir(parents=True, exist_ok=True)
        write_pack(pack.path, pack.key, facts_of(loaded), loaded.parts, lambda done_bytes, total_bytes: None)
    except OSError as error:
        log.warning("packed weights cannot be written", path=str(pack.path), reason=error.strerror)
    else:
        seconds = round(time.perf_counter() - begin, 3)
        log.info("packed weights were written, for the next start", path=str(pack.path), seconds=seconds)


def facts_of(loaded: RunnableModel, companions: Mapping[str, str] = NO_COMPANIONS) -> Facts:
    """Collects the metadata of a saved model; `companions`: SHA-256 of files beside it, by name."""
    return Facts(loaded.weights_digest, loaded.tensors, loaded.model.has_two_tables, companions)


def _check(
    config: ModelConfig,
    parallel: Parallel,
    device: torch.device,
    kernels: str,
    quantization: str,
    kv_cache_dtype: str,
) -> None:
    """Logs remarks. Raises BlockyardError MODEL_NOT_LOADED if the weights cannot be sharded or do not fit."""
    for remark in config.remarks:
        log.warning(remark)
    check_sizes(config, parallel)
    check_quantization(quantization, config, device.type, kernels)
    check_kv_cache(kv_cache_dtype, config, device.type, kernels)
    held = weight_format(device.type, config.dtype_name, quantization, kernels)
    num_bytes = weights_bytes(config, Share.of(config, parallel), held)
    check_room(num_bytes, room_for_weights(device), held_in(config, quantization), device.type)


def _log_loaded(loaded: RunnableModel, held: str) -> None:
    log.info(
        "model loaded",
        architecture=loaded.config.architecture,
        kernels=loaded.backend.name,
        held_in=held,
        bytes=loaded.parameter_bytes,
        source=loaded.origin.source,
        seconds=round(loaded.origin.seconds, 3),
    )


def _log_doubts(load_format: str, unread: Sequence[str]) -> None:
    if load_format == "random":
        log.warning("the weights are random: answers are meaningless")
    if unread:
        log.warning("the model does not use some weights of its checkpoint", num_tensors=len(unread), first=unread[0])


def open_weights(
    config: ModelConfig,
    folder: Path,
    device: torch.device,
    load_format: str,
    on_progress: Callable[[int, int], None],
    parallel: Parallel = ALONE,
    root: Path | None = None,
) -> WeightFiles | RandomWeights:
    """Opens a folder's weights, a rank's sharded weights, or random weights; raises BlockyardError MODEL_NOT_LOADED.

    `root`: the folder below which all files must lie; None: they may lie anywhere.
    """
    if load_format == "sharded":
        return ShardedFiles(folder, parallel, on_progress, root)
    if load_format == "random":
        return RandomWeights(config, device, on_progress)
    products = config.pooling.products if config.pooling else ()
    return WeightFiles(
        folder, on_progress, folders=tuple(dense.folder for dense in products if dense.folder), root=root
    )
