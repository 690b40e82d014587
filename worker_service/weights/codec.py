"""Decodes and encodes the messages about memory that is given up and weights that are loaded anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.common.v1 import administration_pb2
from blockyard.errors import Violation, invalid
from blockyard.worker.v1 import worker_pb2
from worker_service.set_up import MemoryTag
from worker_service.weights.update import TensorHead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worker_service.set_up import SleepState
    from worker_service.weights.saving import Saved

TAGS = {
    administration_pb2.MEMORY_TAG_WEIGHTS: MemoryTag.WEIGHTS,
    administration_pb2.MEMORY_TAG_KV_CACHE: MemoryTag.KV_CACHE,
}


def decode_head(message: administration_pb2.TensorHead) -> TensorHead:
    """Decodes a tensor's head."""
    crc32 = message.crc32 if message.HasField("crc32") else None
    return TensorHead(message.name, message.dtype, tuple(message.shape), message.sha256, crc32, message.sample_sha256)


STATE_FORMATS = {
    administration_pb2.STATE_FORMAT_SHARDED: "sharded",
    administration_pb2.STATE_FORMAT_PACKED: "packed",
}


def decode_tags(numbers: Iterable[int]) -> frozenset[MemoryTag]:
    """Decodes tags; raises BlockyardError FIELD_INVALID for an unknown one."""
    known = {int(number): tag for number, tag in TAGS.items()}
    numbers = list(numbers)
    unknown = [number for number in numbers if number not in known]
    if unknown:
        raise invalid([Violation("tags", f"{number} is not known to this worker") for number in unknown])
    return frozenset(known[number] for number in numbers)


def encode_tags(tags: Iterable[MemoryTag]) -> list[administration_pb2.MemoryTag.ValueType]:
    """Encodes tags, in the order of their numbers."""
    return sorted(number for number, tag in TAGS.items() if tag in tags)


def decode_save(request: worker_pb2.SaveStateRequest) -> tuple[str, str, int]:
    """Decodes format, folder and bytes of a file; raises BlockyardError FIELD_INVALID for an unknown format."""
    if request.format not in STATE_FORMATS:
        raise invalid([Violation("format", "must be STATE_FORMAT_SHARDED or STATE_FORMAT_PACKED")])
    return STATE_FORMATS[request.format], request.folder, request.max_file_bytes


def encode_saved(saved: Saved) -> administration_pb2.SavedState:
    """Encodes what was saved."""
    return administration_pb2.SavedState(folder=saved.folder, files=saved.files, num_bytes=saved.num_bytes)


def encode_sleep(state: SleepState) -> worker_pb2.SleepInfo:
    """Encodes what is asleep."""
    return worker_pb2.SleepInfo(
        level=state.level, asleep=encode_tags(state.asleep), weights_are_stale=state.weights_are_stale
    )
