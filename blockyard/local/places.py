"""Counts how many of several models this machine can hold at a time, before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blockyard.capacity.replica_plan import plan_replica
from blockyard.contract.parallel import ParallelSizes
from blockyard.local.hardware import find_hardware
from blockyard.local.model_check import read_model
from blockyard.model_config.decoder_config import DecoderConfig
from blockyard.model_files import resolve_model
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.capacity.replica_plan import Hardware, ReplicaPlan
    from blockyard.configuration import SystemConfiguration

log = EventLogger(__name__)


def count_places(configurations: Sequence[SystemConfiguration]) -> int:
    """Returns the number of models to load at a time: --max-loaded-models, or as many as fit.

    Each loaded model gets an equal part of the memory. As many fit as have in their parts what they would have alone:
    room for their weights, and for a sequence of the same length.
    """
    wanted = configurations[0].switching.max_loaded_models
    if wanted:
        return min(wanted, len(configurations))
    candidates = [_Candidate.make(each) for each in configurations]
    if not all(candidates):
        log.warning("one model is loaded at a time: what transformers' code needs is not known before it is loaded")
        return 1
    fitting = (
        number for number in range(len(candidates), 1, -1) if all(each and each.fits(number) for each in candidates)
    )
    return next(fitting, 1)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A model, and the length of its sequences if it has the hardware alone."""

    network: DecoderConfig
    configuration: SystemConfiguration
    hardware: Hardware
    max_model_len: int

    @classmethod
    def make(cls, configuration: SystemConfiguration) -> _Candidate | None:
        """Returns None for a model that transformers' code computes."""
        model = configuration.model
        network = read_model(resolve_model(model.model, model.revision, "config"), configuration)
        if not isinstance(network, DecoderConfig):
            return None
        hardware = find_hardware(configuration.device)
        return cls(network, configuration, hardware, _plan(network, configuration, hardware).max_model_len)

    def fits(self, num_places: int) -> bool:
        """Whether the model has the same length in one of so many places."""
        device = self.configuration.device
        share = replace(device, device_memory_utilization=device.device_memory_utilization / num_places)
        free = replace(self.hardware, available_bytes=self.hardware.available_bytes // num_places)
        planned = _plan(self.network, replace(self.configuration, device=share), free)
        return not planned.refusal and planned.max_model_len >= self.max_model_len


def _plan(network: DecoderConfig, configuration: SystemConfiguration, hardware: Hardware) -> ReplicaPlan:
    parallel = configuration.parallel
    sizes = ParallelSizes(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return plan_replica(network, configuration, hardware, sizes)
