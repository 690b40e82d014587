"""KV groups: layers that keep the same tokens and share each block of `block_size` tokens.

All groups take blocks of one size from one pool, so all groups have about the same number of layers: windowed layers
are divided among several groups, and so are full-attention layers if they are more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.model_config.decoder_config import Attention
from blockyard.model_config.fields import unusable

if TYPE_CHECKING:
    from blockyard.model_config.decoder_config import DecoderConfig

MAX_GROUPS = 16
"""The most KV groups: each group adds entries to a sequence's block table, which cost the scheduler time."""

NO_GROUP = -1

TYPICAL_TOKENS = 8192
"""The sequence length for which the division into groups minimizes the bytes of blocks."""


@dataclass(frozen=True, slots=True)
class KvGroups:
    """The groups of a network's layers.

    `windows`: each group's sliding window, 0: full attention. `of_layers`: each layer's group, NO_GROUP for a layer
    without attention. `share_place`: all layers write to the same place of a block, since no later step reads it
    (encoders).
    """

    windows: tuple[int, ...]
    of_layers: tuple[int, ...]
    share_place: bool = False

    @classmethod
    def of(cls, config: DecoderConfig, device_type: str) -> KvGroups:
        """Divides a network's layers into groups; on a GPU all layers form one group that keeps all tokens."""
        if config.encoder:
            # An encoder's keys and values are not needed once their layer is computed.
            return cls((0,), (0,) * config.num_layers, share_place=True)
        reaches = tuple(0 if window is None or window >= config.max_model_len else window for window in config.windows)
        counts = Counter(reaches)
        has_attention = [isinstance(layer.mixer, Attention) for layer in config.layers]
        if device_type != "cpu" or not any(reaches) or len(counts) > MAX_GROUPS:
            return cls((0,), tuple(0 if has else NO_GROUP for has in has_attention))
        size = _choose_size(counts)
        windows: list[int] = []
        first: dict[int, int] = {}
        for window in sorted(counts):
            first[window] = len(windows)
            windows += [window] * -(-counts[window] // size)
        # Round robin, so that in any pipeline stage the groups have about the same number of layers.
        seen = Counter[int]()
        groups: list[int] = []
        for window in reaches:
            groups.append(first[window] + seen[window] % windows.count(window))
            seen[window] += 1
        each = iter(groups)
        return cls(tuple(windows), tuple(next(each) if has else NO_GROUP for has in has_attention))

    @classmethod
    def keep_all(cls, num_layers: int) -> KvGroups:
        """Creates one group of all layers that keeps all tokens."""
        return cls((0,), (0,) * num_layers)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def places(self, layers: range) -> list[tuple[int, int]]:
        """Returns for each layer of a rank its group and its index within the group; NO_GROUP: it has no attention."""
        return [(self.of_layers[layer], self._place(layer, layers)) for layer in layers]

    def _place(self, layer: int, layers: range) -> int:
        if self.share_place:
            return 0
        return sum(self.of_layers[other] == self.of_layers[layer] for other in range(layers.start, layer))

    def count_layers(self, layers: range) -> int:
        """Returns how many layers a block holds at a rank: as many as the largest group has.

        Raises:
            BlockyardError: MODEL_NOT_LOADED, if no layer of the rank has attention.
        """
        if self.share_place:
            return 1
        counts = Counter(self._groups_of(layers)).values()
        if not counts:
            raise unusable(
                f"layers {layers.start} to {layers.stop - 1} are a stage without attention, which has no blocks "
                "for states: use fewer stages"
            )
        return max(counts)

    def _groups_of(self, layers: range) -> list[int]:
        return [group for layer in layers if (group := self.of_layers[layer]) != NO_GROUP]


def _choose_size(counts: Counter[int]) -> int:
    """Chooses the number of layers of a group that minimizes a sequence's bytes; of equals the largest."""

    def weigh(size: int) -> tuple[int, int]:
        kept = sum(
            -(-count // size) * min(window or TYPICAL_TOKENS, TYPICAL_TOKENS) for window, count in counts.items()
        )
        return kept * size, -size

    sizes = range(min(counts.values()), max(counts.values()) + 1)
    return min((size for size in sizes if sum(-(-count // size) for count in counts.values()) <= MAX_GROUPS), key=weigh)
