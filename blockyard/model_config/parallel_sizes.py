"""The parallel sizes that a model allows: ranks that share a layer, and pipeline stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import Violation
from blockyard.model_config.fields import unusable
from blockyard.model_config.leaves import MAX_LEAVES, down_leaves, output_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.contract.parallel import Parallel
    from blockyard.model_config.decoder_config import DecoderConfig


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
    if config.pooling is not None or any(layer.attention.norms_whole_rows for layer in config.layers):
        return (1,)
    most = min(output_leaves(config), down_leaves(config))
    sizes = (1 << power for power in range(most.bit_length()))
    return tuple(size for size in sizes if _divides_heads(config, size) and _leaves_no_rank_empty(config, size))


def _divides_heads(config: DecoderConfig, size: int) -> bool:
    kv_heads = config.num_kv_heads
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
