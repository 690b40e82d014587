"""The numbers that workers without a model make of a prompt: a hash of all its tokens, and of what is wanted."""

from __future__ import annotations

import math
import struct

from blockyard.common.v1 import pooling_pb2

NUM_NUMBERS = 8
"""Numbers of a vector, where no other number is asked for."""
NUM_LABELS = 3
# Of these the prompt is computed from its first token on.
OF_ALL_ROWS = (pooling_pb2.POOLING_KIND_FIRST, pooling_pb2.POOLING_KIND_MEAN, pooling_pb2.POOLING_KIND_TOKENS)


def pool_numbers(pooling: bytes, name: int) -> bytes:
    """Makes the numbers, float32, of a prompt whose tokens have this name."""
    asked = pooling_pb2.Pooling.FromString(pooling)
    if asked.kind in (pooling_pb2.POOLING_KIND_CLASSIFY, pooling_pb2.POOLING_KIND_LABEL_LOGITS):
        numbers = _draw(name, len(asked.label_token_ids) or NUM_LABELS)
        if not asked.leaves_raw:
            numbers = [number / sum(numbers) for number in numbers]
    else:
        numbers = _draw(name, NUM_NUMBERS)[: asked.dimensions or NUM_NUMBERS]
        if asked.normalise:
            length = math.sqrt(sum(number * number for number in numbers))
            numbers = [number / length for number in numbers]
    return struct.pack(f"<{len(numbers)}f", *numbers)


def _draw(name: int, count: int) -> list[float]:
    return [(1 + hash((name, place)) % 1000) / 1000 for place in range(count)]
