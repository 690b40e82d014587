"""One rank's share of a network: heads, inner features, vocabulary and layers. No tensors.

Column-parallel weights (q, k, v, gate, up, the tables) are split by outputs, row-parallel ones (o, down) by inputs, at
leaf boundaries. If there are more ranks than KV heads, neighbouring ranks hold the same KV head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.model_config.parallel_sizes import mixer_leaves, output_leaves, vocabulary_share

if TYPE_CHECKING:
    from blockyard.contract.parallel import Parallel
    from blockyard.model_config.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share, as ranges of the whole network's heads, features, tokens and layers."""

    heads: range
    kv_heads: range
    vocabulary: range
    layers: range
    output_leaves: int
    """Leaves of this rank's part of the attention's output projection."""
    mixer_leaves: int
    """Leaves of this rank's part of the last product of a recurrence; 0: the network has none."""
    tensor_parallel_size: int
    tensor_rank: int
    is_cut: bool
    """Whether other ranks hold the remaining parts of these layers."""
    is_first_stage: bool
    is_last_stage: bool

    @classmethod
    def of(cls, config: DecoderConfig, parallel: Parallel) -> Share:
        """Returns a rank's share of a network; `check_sizes` must allow the parallel sizes."""
        size, rank = parallel.tensor_parallel_size, parallel.tensor_rank
        unit = vocabulary_share(config.vocab_size, size)
        first_token = min(rank * unit, config.vocab_size)
        first_kv_head = rank * config.num_kv_heads // size
        num_kv_heads = max(1, config.num_kv_heads // size)
        return cls(
            heads=_part(config.num_heads, size, rank),
            kv_heads=range(first_kv_head, first_kv_head + num_kv_heads),
            vocabulary=range(first_token, min(first_token + unit, config.vocab_size)),
            layers=stage_layers(config.num_layers, parallel.pipeline_parallel_size, parallel.pipeline_rank),
            output_leaves=output_leaves(config) // size,
            mixer_leaves=mixer_leaves(config) // size,
            tensor_parallel_size=size,
            tensor_rank=rank,
            is_cut=size > 1,
            is_first_stage=parallel.pipeline_rank == 0,
            is_last_stage=parallel.is_last_stage,
        )

    def part(self, count: int) -> range:
        """Returns this rank's part of `count` heads or features that the ranks share evenly."""
        return _part(count, self.tensor_parallel_size, self.tensor_rank)


def _part(count: int, size: int, rank: int) -> range:
    return range(rank * count // size, (rank + 1) * count // size)


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """Returns the layers of a stage. Sizes differ by at most one; the smaller stages are the first and the last ones.

    Those also have the embedding and the head; the head costs more.
    """
    least, num_larger = divmod(num_layers, num_stages)
    first_larger = (num_stages - num_larger) // 2
    sizes = [least + (first_larger <= index < first_larger + num_larger) for index in range(num_stages)]
    begin = sum(sizes[:stage])
    return range(begin, begin + sizes[stage])
