"""Checks a model's config.json before anything starts, whether Blockyard's or transformers' code computes it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

from blockyard.contract.models import parse_task
from blockyard.local.supervisor import ROOT
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
        kv_cache_dtype=configuration.cache.kv_cache_dtype,
    )
    return outline


_TRIAL = "worker_service.models.fallback.trial"
_TRIAL_SECONDS = 120.0


@cache
def find_refusal(folder: Path, dtype: str) -> str | None:
    """Finds why a worker would refuse a model that transformers' code computes, by its config.json alone.

    Args:
        folder: of the model.
        dtype: as of `read_outline`.

    Returns:
        The sentence; empty: it would not. None: it cannot be tried here.
    """
    command = [sys.executable, "-m", _TRIAL, str(folder.absolute()), dtype]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return None
    return json.loads(done.stdout.splitlines()[-1])["refusal"] if done.returncode == 0 else None
