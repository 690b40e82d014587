"""Judges whether a model can be served with a configuration, and says why not; loads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.capacity.replica_plan import check_network
from blockyard.contract.parallel import Parallel
from blockyard.errors import BlockyardError
from blockyard.local.hardware import find_hardware
from blockyard.local.model_check import find_refusal, read_model
from blockyard.model_config.fallback import Outline

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.configuration import SystemConfiguration
    from blockyard.model_config.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a model.

    Attributes:
        model: its network, or an outline if transformers' code computes it; None: config.json is refused.
        refusal: why it cannot be served; empty: it can.
    """

    model: DecoderConfig | Outline | None
    refusal: str = ""

    @property
    def by_transformers(self) -> bool:
        """Whether transformers' code computes it."""
        return isinstance(self.model, Outline)


def judge(folder: Path, configuration: SystemConfiguration, *, tries: bool = True) -> Verdict:
    """Judges a model's folder by its config.json.

    `tries`: whether to build a model that transformers' code computes, in a process that takes seconds; otherwise it
    counts as served.
    """
    parallel, device = configuration.parallel, configuration.device
    model = None
    try:
        model = read_model(folder, configuration)
        if not isinstance(model, Outline):
            sizes = Parallel(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
            check_network(model, configuration, find_hardware(device), sizes)
    except BlockyardError as error:
        return Verdict(model, error.message)
    refusal = find_refusal(folder, device.dtype) if isinstance(model, Outline) and tries else ""
    return Verdict(model, refusal or "")
