"""Decodes and encodes the messages of operators' requests: KV groups, profiles, heads of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.common.v1 import administration_pb2
from blockyard.contract.codec.workers import DTYPES
from blockyard.contract.workers import Dtype
from blockyard.model_config.decoder_config import Attention
from blockyard.worker.v1 import worker_pb2
from worker_service.observe.profiler import Profile, ProfileDetail, ProfileOptions
from worker_service.weights.update import TensorHead

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker_service.set_up import SetUp

PROFILE_DETAILS = {
    administration_pb2.PROFILE_DETAIL_STEPS: ProfileDetail.STEPS,
    administration_pb2.PROFILE_DETAIL_OPERATIONS: ProfileDetail.OPERATIONS,
}
# Bytes of one message; the rest of a file waits until it is sent.
PIECE_BYTES = 1 << 20


def encode_kv_groups(set_up: SetUp) -> list[worker_pb2.KvGroup]:
    """Encodes the layers that keep the same tokens, and those with a state, once a worker has pools."""
    if set_up.loaded is None or set_up.executor is None:
        return []
    model, blocks = set_up.loaded.model, set_up.executor.cache.block_format
    groups: list[worker_pb2.KvGroup] = []
    for group, window in enumerate(model.kv_groups.windows):
        layers = [layer for layer in model.share.layers if model.kv_groups.of_layers[layer] == group]
        mixers = (model.config.layers[layer].mixer for layer in layers)
        windows = [mixer.window or 0 for mixer in mixers if isinstance(mixer, Attention)]
        groups.append(
            worker_pb2.KvGroup(
                layers=layers,
                kind=worker_pb2.KV_KIND_WINDOW if window else worker_pb2.KV_KIND_FULL,
                block_size=blocks.block_size,
                num_kv_heads=blocks.num_kv_heads,
                head_dim=blocks.head_dim,
                dtype=DTYPES.encode(Dtype(str(blocks.dtype).removeprefix("torch."))),
                sliding_window=max(windows, default=0),
                page_bytes=blocks.block_bytes,
            )
        )
    if (states := model.plan_states(blocks.block_bytes)) is not None:
        layers = [model.share.layers[index] for index in states.places]
        kind = worker_pb2.KV_KIND_STATE
        groups.append(worker_pb2.KvGroup(layers=layers, kind=kind, page_bytes=blocks.block_bytes))
    return groups


def decode_head(message: administration_pb2.TensorHead) -> TensorHead:
    crc32 = message.crc32 if message.HasField("crc32") else None
    return TensorHead(message.name, message.dtype, tuple(message.shape), message.sha256, crc32, message.sample_sha256)


def encode_profile_options(options: ProfileOptions) -> administration_pb2.ProfileOptions:
    detail = administration_pb2.ProfileDetail.Value(f"PROFILE_DETAIL_{options.detail.value}")
    return administration_pb2.ProfileOptions(detail=detail, max_steps=options.max_steps)


def encode_profile(profile: Profile) -> Iterator[worker_pb2.StopProfileResponse]:
    """Encodes a profile: its summary, then its file in pieces."""
    summary = administration_pb2.ProfileSummary(
        detail=encode_profile_options(profile.options).detail,
        num_steps=profile.num_steps,
        num_bytes=len(profile.data),
        worker=profile.worker,
    )
    yield worker_pb2.StopProfileResponse(summary=summary)
    for start in range(0, len(profile.data), PIECE_BYTES):
        yield worker_pb2.StopProfileResponse(data=profile.data[start : start + PIECE_BYTES])
