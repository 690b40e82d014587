"""Looks at a model's config.json before anything starts: who would compute it, and whether that is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.model_config.fallback import check_settings, needs_transformers, read_outline
from blockyard.model_config.network import read_network
from blockyard.model_config.pooling.rule import Task

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.configuration import SystemConfiguration
    from blockyard.model_config.decoder_config import DecoderConfig
    from blockyard.model_config.fallback import Outline


def task_of(configuration: SystemConfiguration) -> Task | None:
    """Returns what the model is to be served for; None: as its files say."""
    return None if configuration.load.task == "auto" else Task(configuration.load.task)


def read_model(folder: Path, configuration: SystemConfiguration) -> DecoderConfig | Outline:
    """Reads a model as workers with these settings do: its network, or what is known where transformers' code has it.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, with every reason that config.json shows.
    """
    device = configuration.device
    if not needs_transformers(folder, configuration.worker.model_code):
        return read_network(folder, device.dtype, task_of(configuration))
    outline = read_outline(folder, device.dtype)
    check_settings(
        folder,
        quantization=device.quantization,
        load_format=configuration.load.load_format,
        num_workers=configuration.parallel.world_size,
        task=task_of(configuration),
    )
    return outline
