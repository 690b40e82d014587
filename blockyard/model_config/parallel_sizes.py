"""The parallel sizes that a model allows: ranks that share a layer, and pipeline stages.

Ranks cut products at leaves: slices of the inner dimension that are summed separately (`add_leaves`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from blockyard.errors import Violation
from blockyard.model_config.fields import unusable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.contract.parallel import Parallel
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


def down_leaves(config: DecoderConfig, inner_features: int) -> int:
    """Returns the number of leaves of the last product of an MLP or an expert."""
    return count_leaves(inner_features, _stored_unit(config, inner_features))


def mixer_leaves(config: DecoderConfig) -> int:
    """Returns the number of leaves of a recurrence's last product; 0 without a recurrence."""
    recurrent = config.recurrent
    if recurrent is None:
        return 0
    unit = recurrent.value_dim or 1
    return count_leaves(recurrent.out_features, math.lcm(unit, _stored_unit(config, recurrent.out_features)))


def _stored_unit(config: DecoderConfig, in_features: int) -> int:
    # A width that does not fit into groups belongs to a weight that is not quantized.
    if config.stored is None or config.stored.misfit(in_features):
        return 1
    return config.stored.leaf_unit(in_features)


# Vocabulary tables are split in units of whole panels.
VOCABULARY_UNIT = 32

# No model has more layers than this.
MAX_STAGES = 1024


def vocabulary_share(vocab_size: int, num_ranks: int) -> int:
    """Returns how many tokens of the vocabulary each rank holds; the last rank may hold fewer."""
    return -(-vocab_size // (VOCABULARY_UNIT * num_ranks)) * VOCABULARY_UNIT


def legal_tensor_sizes(config: DecoderConfig) -> tuple[int, ...]:
    """Returns the allowed tensor-parallel sizes in ascending order.

    Each rank needs whole leaves of both products that are split along K, whole heads, and at least one token of the
    vocabulary. If there are more ranks than KV heads, several ranks hold the same KV head.
    """
    # A norm over whole rows would need the features of other ranks.
    if config.pooling is not None or any(attention.norms_whole_rows for attention in config.attentions):
        return (1,)
    feeds = (down_leaves(config, size) for size in config.inner_sizes)
    most = min(output_leaves(config), mixer_leaves(config) or MAX_LEAVES, *feeds)
    sizes = (1 << power for power in range(most.bit_length()))
    return tuple(size for size in sizes if _divides_heads(config, size) and _leaves_no_rank_empty(config, size))


def _divides_heads(config: DecoderConfig, size: int) -> bool:
    kv_heads, recurrent = config.num_kv_heads, config.recurrent
    if recurrent is not None and (recurrent.num_key_heads % size or recurrent.num_value_heads % size):
        return False
    return config.num_heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def _leaves_no_rank_empty(config: DecoderConfig, size: int) -> bool:
    return (size - 1) * vocabulary_share(config.vocab_size, size) < config.vocab_size


def check_sizes(config: DecoderConfig, parallel: Parallel) -> None:
    """Raises BlockyardError MODEL_NOT_LOADED for sizes that the model does not allow, naming the allowed ones."""
    if config.pooling is not None and parallel.world_size > 1:
        raise unusable("a model that pools is served by one worker, not by a group")
    legal = legal_tensor_sizes(config)
    if parallel.tensor_parallel_size in legal and parallel.pipeline_parallel_size <= config.num_layers:
        return
    raise unusable(
        f"this model allows a tensor-parallel size of {' or '.join(map(str, legal))} and a pipeline-parallel size of 1 "
        f"to {config.num_layers}, not {parallel.tensor_parallel_size} and {parallel.pipeline_parallel_size}: it has "
        f"{config.num_heads} heads, {config.num_kv_heads} of keys and values, and {config.num_layers} layers"
    )


def wrong_parallel(parallel: Parallel) -> Iterable[Violation]:
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if not 1 <= tensor <= MAX_LEAVES or tensor & (tensor - 1):
        yield Violation("parallel.tensor_parallel_size", f"must be a power of two, at most {MAX_LEAVES}")
    if not 1 <= pipeline <= MAX_STAGES:
        yield Violation("parallel.pipeline_parallel_size", f"must be from 1 to {MAX_STAGES}")
    if parallel.rank >= max(1, parallel.world_size):
        yield Violation("parallel.rank", f"must be below {parallel.world_size}, the number of workers")
