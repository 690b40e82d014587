"""Loads a model folder onto a device: configuration, backend, weights. Knows no requests and no hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.capacity.formats import check_quantization, weight_format
from blockyard.capacity.weights import check_room, weights_bytes
from blockyard.model_config.fields import unusable
from blockyard.model_config.parallel_sizes import check_sizes
from blockyard.model_config.share import Share
from blockyard.model_files import model_digest
from blockyard.parallel import ALONE
from blockyard.telemetry import EventLogger
from kernels.select import get_backend, make_arena
from worker_service.device.memory import room_for_weights
from worker_service.models.decoder import DecoderModel, build_decoder
from worker_service.models.model_config import ModelConfig, read_config
from worker_service.models.random_weights import RandomWeights
from worker_service.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import torch

    from blockyard.parallel import Parallel
    from kernels.arena import Arena
    from kernels.ops import Backend

__all__ = ["LoadedModel", "ModelConfig", "load_model"]

log = EventLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its backend, ready to run."""

    model: DecoderModel
    backend: Backend
    config: ModelConfig
    weights_digest: str
    """Hash over every tensor's name, shape, dtype and a sample of its bytes, in hex."""
    model_digest: str
    """SHA-256 of config.json, in hex."""
    parameter_bytes: int
    """Bytes of the weights as they are held."""
    quantization: str
    """How the weights of products are held: one of `kernels.select.QUANTIZATIONS`."""
    folder: Path
    """Where it was loaded from."""
    load_format: str
    parallel: Parallel
    """The rank whose share of the weights this is."""
    arena: Arena
    """Where the weights lie, as far as the backend packs them into arenas."""
    tensors: Mapping[str, tuple[int, ...]]
    """The shapes of the tensors that the weights are made of, by name, in the order in which they are read."""
    arena_bytes: int
    """Bytes of the arena that the weights take."""
    can_sleep: bool = True
    """Whether its memory can be given up."""
    version: str = ""
    """The name of the weights: empty for those that LoadModel loaded."""


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
) -> LoadedModel:
    """Loads a model, one tensor at a time: memory stays near one copy of the weights.

    Args:
        folder: config.json and safetensors files, as `blockyard.model_files.resolve_model` gives it.
        dtype: what to compute in; None: as config.json says.
        device: where to.
        on_progress: called with (bytes read, bytes in all) after each tensor.
        kernels: one of `kernels.select.CPU_KERNELS` or `GPU_KERNELS`, by the device.
        quantization: one of `kernels.select.QUANTIZATIONS`.
        load_format: "auto", or "random" for weights that are made on the device, of a folder that has none.
        parallel: this rank's place; its share of the weights is loaded.
        batch_invariant: whether a GPU shall give a row the same bits in every step.
        can_sleep: whether a GPU's memory shall be such that it can be given up; a processor's always can.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, with a message that says what to do.
    """
    config = read_config(folder, dtype)
    for remark in config.remarks:
        log.warning(remark)
    check_sizes(config, parallel)
    files = open_weights(config, folder, device, load_format, on_progress)
    _check_weights(config, parallel, device, kernels, quantization)
    try:
        backend = get_backend(device, config.dtype, kernels, quantization, batch_invariant=batch_invariant)
    except ValueError as error:
        raise unusable(str(error)) from None
    arena = make_arena(device, can_be_given_up=can_sleep)
    model = build_decoder(config, backend, files, parallel, arena)
    _log_doubts(load_format, files.unread)
    return LoadedModel(
        model,
        backend,
        config,
        files.finish(),
        model_digest(folder),
        model.parameter_bytes,
        quantization,
        folder,
        load_format,
        parallel,
        arena,
        files.tensors,
        arena.used_bytes,
        can_sleep or device.type == "cpu",
    )


def _check_weights(
    config: ModelConfig, parallel: Parallel, device: torch.device, kernels: str, quantization: str
) -> None:
    """Refuses weights that cannot be held here; raises BlockyardError MODEL_NOT_LOADED."""
    check_quantization(quantization, config.dtype_name, device.type, kernels)
    held = weight_format(device.type, config.dtype_name, quantization, kernels)
    num_bytes = weights_bytes(config, Share.of(config, parallel), held)
    check_room(num_bytes, room_for_weights(device), config.dtype_name, quantization, device.type)


def _log_doubts(load_format: str, unread: Sequence[str]) -> None:
    if load_format == "random":
        log.warning("the weights are random: answers have no sense")
    if unread:
        log.warning("weights that the model does not use", num_tensors=len(unread), first=unread[0])


def open_weights(
    config: ModelConfig, folder: Path, device: torch.device, load_format: str, on_progress: Callable[[int, int], None]
) -> WeightFiles | RandomWeights:
    """Opens the weights of a folder, or random ones; raises BlockyardError MODEL_NOT_LOADED."""
    if load_format == "random":
        return RandomWeights(config, device, on_progress)
    return WeightFiles(folder, on_progress)
