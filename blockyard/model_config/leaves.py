"""Counts a product's leaves: slices of its inner dimension that are summed separately (`add_leaves`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockyard.model_config.decoder_config import DecoderConfig

MAX_LEAVES = 8
# The least length of a leaf, if the inner dimension has at least twice that: shorter leaves are slow.
MIN_LEAF_FEATURES = 256
# A leaf's length is a multiple of this: whole words of every dtype, and whole interleaved runs of every backend.
LEAF_MULTIPLE = 8


def count_leaves(in_features: int, unit_features: int = 1) -> int:
    """Returns the number of leaves of a weight.

    Args:
        in_features: length of the inner dimension.
        unit_features: features that one leaf must hold together, such as a head's.
    """
    unit = math.lcm(unit_features, LEAF_MULTIPLE)
    leaves = MAX_LEAVES
    while leaves > 1 and (
        in_features % (leaves * unit) or 2 * MIN_LEAF_FEATURES <= in_features < leaves * MIN_LEAF_FEATURES
    ):
        leaves //= 2
    return leaves


def output_leaves(config: DecoderConfig) -> int:
    """Returns the number of leaves of the attention's output projection."""
    width = config.num_heads * config.head_dim
    return count_leaves(width, math.lcm(config.head_dim, _stored_unit(config, width)))


def down_leaves(config: DecoderConfig) -> int:
    """Returns the number of leaves of the MLP's down projection."""
    return count_leaves(config.intermediate_size, _stored_unit(config, config.intermediate_size))


def _stored_unit(config: DecoderConfig, in_features: int) -> int:
    # A width that does not fit into groups belongs to a weight that is not quantized.
    if config.stored is None or config.stored.misfit(in_features):
        return 1
    return config.stored.leaf_unit(in_features)
