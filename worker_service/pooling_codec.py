"""Decodes and encodes what WorkerService says of pooling."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from blockyard.common.v1 import pooling_pb2
from blockyard.model_config.pooling.rule import PoolingKind, Task
from worker_service.step import Pooling

if TYPE_CHECKING:
    from blockyard.worker.v1 import worker_pb2
    from worker_service.step import Pooled

TASKS: dict[int, Task | None] = {
    pooling_pb2.TASK_UNSPECIFIED: None,
    **{pooling_pb2.Task.Value(f"TASK_{task.name}"): task for task in Task},
}
_KINDS = {pooling_pb2.PoolingKind.Value(f"POOLING_KIND_{kind.name}"): kind for kind in PoolingKind}


def encode_task(task: Task) -> pooling_pb2.Task.ValueType:
    """Encodes what a model is served for."""
    return pooling_pb2.Task.Value(f"TASK_{task.name}")


def decode_pooling(message: pooling_pb2.Pooling) -> Pooling:
    """Decodes what a sequence asks for, and checks nothing."""
    return Pooling(
        _KINDS.get(message.kind),
        tuple(message.label_token_ids),
        message.normalise,
        message.dimensions,
        message.leaves_raw,
        message.second_from,
    )


def encode_pooled(pooled: Pooled, message: worker_pb2.ExecuteModelResponse) -> None:
    """Encodes what was made of sequences."""
    if pooled.sequence_ids:
        message.pooled_sequence_ids.extend(pooled.sequence_ids)
        message.pooled_sizes.extend(map(len, pooled.values))
        message.pooled_values = np.concatenate(pooled.values).astype("<f4", copy=False).tobytes()
