"""Where the states of recurrent layers lie: units in a sequence's fixed blocks.

A unit is the tail of a layer's convolution, or the float32 matrix of one head. Units lie in blocks in the order of the
layers, the tail first; none crosses a block, so that each can be found by one division.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import ITEM_BYTES
from blockyard.model_config.fields import unusable
from blockyard.model_config.recurrent import Recurrent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blockyard.model_config.decoder_config import DecoderConfig
    from blockyard.model_config.share import Share

UNIT_ALIGNMENT = 64
MATRIX_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class StatePlan:
    """The places of a rank's states.

    `num_blocks`: fixed blocks of each sequence. `block_bytes`: bytes of a block. `places`: where the tail and then each
    head's matrix begin, in bytes, as if a sequence's fixed blocks lay one behind the other; of each layer of the rank
    that has a state, by its index among the rank's layers.
    """

    num_blocks: int
    block_bytes: int
    places: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, config: DecoderConfig, block_bytes: int, share: Share) -> StatePlan:
        """Places the units of a rank's layers.

        Raises:
            BlockyardError: MODEL_NOT_LOADED, if a unit is larger than a block.
        """
        end, found = 0, dict[int, tuple[int, ...]]()
        for index, layer in enumerate(share.layers):
            mixer = config.layers[layer].mixer
            if isinstance(mixer, Recurrent):
                sizes = _unit_bytes(mixer.share(share.tensor_parallel_size), ITEM_BYTES[config.dtype_name])
                found[index], end = place_units(sizes, end, block_bytes)
        return cls(-(-end // block_bytes), block_bytes, found)


def place_units(sizes: Iterable[int], end: int, block_bytes: int) -> tuple[tuple[int, ...], int]:
    """Places units of some bytes behind `end`, none across two blocks; returns their places, and where they end.

    Raises:
        BlockyardError: MODEL_NOT_LOADED, if a unit is larger than a block.
    """
    places: list[int] = []
    for size in sizes:
        if size > block_bytes:
            raise unusable(
                f"a state of {size} bytes does not fit into a block of {block_bytes}: use a larger --block-size"
            )
        if end // block_bytes != (end + size - 1) // block_bytes:
            end = -(-end // block_bytes) * block_bytes
        places.append(end)
        end += -(-size // UNIT_ALIGNMENT) * UNIT_ALIGNMENT
    return tuple(places), end


def _unit_bytes(mixer: Recurrent, item_bytes: int) -> Iterator[int]:
    """Yields the bytes of a layer's units in order."""
    yield (mixer.conv_width - 1) * mixer.conv_features * item_bytes
    for _ in range(mixer.num_value_heads):
        yield mixer.key_dim * mixer.value_dim * MATRIX_ITEM_BYTES
