"""Counts how many of several models this machine can hold at a time, before anything starts."""

from __future__ import annotations

import dataclasses
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
    networks = [_read(each) for each in configurations]
    if not all(networks):
        log.warning("one model is loaded at a time: what transformers' code needs is not known before it is loaded")
        return 1
    known = [(network, each) for network, each in zip(networks, configurations, strict=True) if network]
    fitting = (number for number in range(len(known), 1, -1) if all(_fits(*each, number) for each in known))
    return next(fitting, 1)


def _read(configuration: SystemConfiguration) -> DecoderConfig | None:
    model = configuration.model
    network = read_model(resolve_model(model.model, model.revision, "config"), configuration)
    return network if isinstance(network, DecoderConfig) else None


def _fits(network: DecoderConfig, configuration: SystemConfiguration, num_places: int) -> bool:
    hardware = find_hardware(configuration.device)
    alone = _plan(network, configuration, hardware)
    device = configuration.device
    share = dataclasses.replace(device, device_memory_utilization=device.device_memory_utilization / num_places)
    free = dataclasses.replace(hardware, available_bytes=hardware.available_bytes // num_places)
    beside = _plan(network, dataclasses.replace(configuration, device=share), free)
    return not beside.refusal and beside.max_model_len >= alone.max_model_len


def _plan(network: DecoderConfig, configuration: SystemConfiguration, hardware: Hardware) -> ReplicaPlan:
    parallel = configuration.parallel
    sizes = ParallelSizes(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    return plan_replica(network, configuration, hardware, sizes)
