"""Encodes and decodes poolings, and columns of pooled numbers: sizes, and one string of float32."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from blockyard.common.v1 import pooling_pb2
from blockyard.contract.codec.enums import EnumCodec
from blockyard.contract.pooling import Pooling, PoolingKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FLOAT_BYTES = 4
_KINDS = EnumCodec(PoolingKind, pooling_pb2.PoolingKind.items(), "POOLING_KIND_")


def encode_pooling(pooling: Pooling) -> pooling_pb2.Pooling:
    return pooling_pb2.Pooling(
        kind=_KINDS.encode(pooling.kind) if pooling.kind else pooling_pb2.POOLING_KIND_UNSPECIFIED,
        label_token_ids=pooling.label_token_ids,
        normalise=pooling.normalise,
        dimensions=pooling.dimensions,
        leaves_raw=pooling.leaves_raw,
        second_from=pooling.second_from,
    )


def decode_pooling(message: pooling_pb2.Pooling) -> Pooling:
    """Decodes what to make of a prompt; checks nothing."""
    return Pooling(
        kind=_KINDS.find(message.kind),
        label_token_ids=tuple(message.label_token_ids[:]),
        normalise=message.normalise,
        dimensions=message.dimensions,
        leaves_raw=message.leaves_raw,
        second_from=message.second_from,
    )


def split_values(sizes: Iterable[int], values: bytes) -> list[bytes]:
    """Splits numbers, little endian, into those of each sequence, of which there are `sizes`."""
    ends = list(itertools.accumulate((FLOAT_BYTES * size for size in sizes), initial=0))
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def join_values(each: Sequence[bytes]) -> tuple[list[int], bytes]:
    """Joins the numbers of several sequences: returns how many each has, and all of them."""
    return [len(values) // FLOAT_BYTES for values in each], b"".join(each)
