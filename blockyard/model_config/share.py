"""What one rank holds of a network: heads, inner features, tokens, layers. Knows no tensors.

Column-parallel weights (q, k, v, gate, up, the tables) are cut by outputs, row-parallel ones (o, down) by inputs, at
borders of their leaves. Where there are more ranks than KV heads, neighbours hold the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.model_config.leaves import down_leaves, output_leaves
from blockyard.model_config.parallel_sizes import vocabulary_share

if TYPE_CHECKING:
    from blockyard.contract.parallel import Parallel
    from blockyard.model_config.decoder_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a rank, as ranges of what the whole network has."""

    heads: range
    kv_heads: range
    mlp: range
    """Of intermediate_size."""
    vocabulary: range
    layers: range
    output_leaves: int
    """Of the attention's output projection, as far as this rank holds it."""
    down_leaves: int
    is_cut: bool
    """Whether other ranks hold the rest of these layers."""
    is_first_stage: bool
    is_last_stage: bool

    @classmethod
    def of(cls, config: DecoderConfig, parallel: Parallel) -> Share:
        """Cuts a network whose sizes `check_sizes` allows."""
        size, rank = parallel.tensor_parallel_size, parallel.tensor_rank
        unit = vocabulary_share(config.vocab_size, size)
        first_token = min(rank * unit, config.vocab_size)
        first_kv_head = rank * config.num_kv_heads // size
        num_kv_heads = max(1, config.num_kv_heads // size)
        return cls(
            heads=_part(config.num_heads, size, rank),
            kv_heads=range(first_kv_head, first_kv_head + num_kv_heads),
            mlp=_part(config.intermediate_size, size, rank),
            vocabulary=range(first_token, min(first_token + unit, config.vocab_size)),
            layers=stage_layers(config.num_layers, parallel.pipeline_parallel_size, parallel.pipeline_rank),
            output_leaves=output_leaves(config) // size,
            down_leaves=down_leaves(config) // size,
            is_cut=size > 1,
            is_first_stage=parallel.pipeline_rank == 0,
            is_last_stage=parallel.is_last_stage,
        )


def _part(count: int, size: int, rank: int) -> range:
    return range(rank * count // size, (rank + 1) * count // size)


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """Returns the layers of a stage: sizes differ by at most one, the smaller ones stand at both ends.

    There the embedding and the head are, too; the head costs more.
    """
    least, num_larger = divmod(num_layers, num_stages)
    first_larger = (num_stages - num_larger) // 2
    sizes = [least + (first_larger <= index < first_larger + num_larger) for index in range(num_stages)]
    begin = sum(sizes[:stage])
    return range(begin, begin + sizes[stage])
