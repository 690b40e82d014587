"""Checks a model's config.json before anything starts, whether Blockyard's or transformers' code computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.contract.models import parse_task
from blockyard.model_config.fallback import check_settings, needs_transformers, read_outline
from blockyard.model_config.network import read_network

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.configuration import SystemConfiguration
    from blockyard.model_config.decoder_config import DecoderConfig
    from blockyard.model_config.fallback import Outline


def read_model(folder: Path, configuration: SystemConfiguration) -> DecoderConfig | Outline:
    """Reads a model as workers would: its network, or an outline if transformers' code computes it.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, with every reason that config.json shows.
    """
    device = configuration.device
    if not needs_transformers(folder, configuration.worker.model_code):
        return read_network(folder, device.dtype, parse_task(configuration.load.task))
    outline = read_outline(folder, device.dtype)
    check_settings(
        folder,
        quantization=device.quantization,
        load_format=configuration.load.load_format,
        num_workers=configuration.parallel.world_size,
        task=parse_task(configuration.load.task),
    )
    return outline
