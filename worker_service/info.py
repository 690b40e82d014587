"""Describes the worker for a scheduler. Knows no messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.contract.scheduling import Adapter
from blockyard.contract.workers import Dtype, LoadedModel, LoraInfo, Placement, Quantization, WorkerInfo

if TYPE_CHECKING:
    from worker_service.lora.adapter import AdapterWeights
    from worker_service.lora.store import LoraStore
    from worker_service.models.loader import RunnableModel
    from worker_service.worker import Worker

API_VERSION = "v1"


def describe_worker(worker: Worker, worker_id: str, placement: Placement) -> WorkerInfo:
    """Describes a worker. `placement`: the placement with which the process was started."""
    set_up = worker.set_up
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=worker.incarnation,
        api_version=API_VERSION,
        state=worker.state,
        epoch=worker.epoch,
        configuration_digest=set_up.configuration_digest,
        device=worker.device_name,
        model=describe_model(set_up.loaded) if set_up.loaded else None,
        cache=set_up.cache,
        draining=worker.is_draining,
        group=worker.membership.info,
        placement=placement,
        sleep=set_up.sleep,
        lora=describe_loras(set_up.loras) if set_up.loras else None,
    )


def describe_model(loaded: RunnableModel) -> LoadedModel:
    config = loaded.config
    return LoadedModel(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        model_digest=loaded.model_digest,
        parameter_bytes=loaded.parameter_bytes,
        weights_digest=loaded.weights_digest,
        weights_version=loaded.version,
        task=config.task,
        whole_prompts=config.encoder is not None,
        warnings=loaded.warnings,
        dtype=Dtype(str(config.dtype).removeprefix("torch.")),
        quantization=Quantization(loaded.quantization),
        stored_format=config.stored.title if config.stored is not None else "",
    )


def describe_loras(store: LoraStore) -> LoraInfo:
    adapters = (describe_adapter(store, adapter) for _, adapter in sorted(store.adapters.items()))
    return LoraInfo(store.limits, tuple(adapters))


def describe_adapter(store: LoraStore, adapter: AdapterWeights) -> Adapter:
    request = adapter.request
    return Adapter(
        lora_id=request.lora_id,
        name=request.name,
        path=request.path,
        digest=adapter.digest,
        rank=adapter.rank,
        targets=adapter.targets,
        num_bytes=adapter.num_bytes,
        pinned=request.lora_id in store.pinned,
        num_virtual_tokens=adapter.num_virtual_tokens,
    )
