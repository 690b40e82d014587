"""How many leaves a product has: the slices of its inner dimension that are summed apart (`add_leaves`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockyard.model_config.decoder_config import DecoderConfig

MAX_LEAVES = 8
# Leaves are at least so long, where the inner dimension is twice as long: shorter ones cost time.
MIN_LEAF_FEATURES = 256
# Whole words of every type, and whole runs of what backends interleave.
LEAF_MULTIPLE = 8


def count_leaves(in_features: int, unit_features: int = 1) -> int:
    """Returns how many leaves a weight has.

    Args:
        in_features: the inner dimension.
        unit_features: what a cut must not split, as a head.
    """
    unit = math.lcm(unit_features, LEAF_MULTIPLE)
    leaves = MAX_LEAVES
    while leaves > 1 and (
        in_features % (leaves * unit) or 2 * MIN_LEAF_FEATURES <= in_features < leaves * MIN_LEAF_FEATURES
    ):
        leaves //= 2
    return leaves


def output_leaves(config: DecoderConfig) -> int:
    """Returns how many leaves the attention's output projection has."""
    width = config.num_heads * config.head_dim
    return count_leaves(width, math.lcm(config.head_dim, _stored_unit(config, width)))


def down_leaves(config: DecoderConfig) -> int:
    """Returns how many leaves the MLP's second product has."""
    return count_leaves(config.intermediate_size, _stored_unit(config, config.intermediate_size))


def _stored_unit(config: DecoderConfig, in_features: int) -> int:
    # Weights that do not fit are left as they are.
    if config.stored is None or config.stored.misfit(in_features):
        return 1
    return config.stored.leaf_unit(in_features)
