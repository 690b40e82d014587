"""KV groups: layers that keep the same tokens, and have a block of each `block_size` tokens together.

A block is a page of one pool, whichever group has it, so all groups have about as many layers: those that see a window
are divided among several groups, and so are the others where there are more of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockyard.model_config.decoder_config import DecoderConfig

MAX_GROUPS = 16
"""A table has a place for each group and block, and each place costs the scheduler some time."""

TYPICAL_TOKENS = 8192
"""Of a sequence: for so many the bytes of blocks are least."""


@dataclass(frozen=True, slots=True)
class KvGroups:
    """The groups of a network's layers.

    `windows`: of each group the keys that a query sees, its own among them; 0: all. `of_layers`: each layer's group.
    `share_place`: each layer takes the place of the one before it, since no later step reads what it keeps.
    """

    windows: tuple[int, ...]
    of_layers: tuple[int, ...]
    share_place: bool = False

    @classmethod
    def of(cls, config: DecoderConfig, device_type: str) -> KvGroups:
        """Divides a network's layers; on a GPU they are one group that keeps everything."""
        if config.encoder:
            # Its keys and values are of no use once a layer is computed.
            return cls((0,), (0,) * config.num_layers, share_place=True)
        reaches = tuple(0 if window is None or window >= config.max_model_len else window for window in config.windows)
        counts = Counter(reaches)
        if device_type != "cpu" or not any(reaches) or len(counts) > MAX_GROUPS:
            return cls.keep_all(len(reaches))
        size = _choose_size(counts)
        windows: list[int] = []
        first: dict[int, int] = {}
        for window in sorted(counts):
            first[window] = len(windows)
            windows += [window] * -(-counts[window] // size)
        # One after the other, so that whatever layers a stage has, its groups have about as many each.
        seen = Counter[int]()
        of_layers: list[int] = []
        for window in reaches:
            of_layers.append(first[window] + seen[window] % windows.count(window))
            seen[window] += 1
        return cls(tuple(windows), tuple(of_layers))

    @classmethod
    def keep_all(cls, num_layers: int) -> KvGroups:
        """Makes one group of all layers, that keeps everything."""
        return cls((0,), (0,) * num_layers)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    def places(self, layers: range) -> list[tuple[int, int]]:
        """Returns of each layer that a rank has its group, and which of the group's it is."""
        return [(self.of_layers[layer], self._place(layer, layers)) for layer in layers]

    def _place(self, layer: int, layers: range) -> int:
        if self.share_place:
            return 0
        return sum(self.of_layers[other] == self.of_layers[layer] for other in range(layers.start, layer))

    def count_layers(self, layers: range) -> int:
        """Returns the layers that a block has room for at a rank: those of the largest group."""
        return 1 if self.share_place else max(Counter(self.of_layers[layer] for layer in layers).values())


def _choose_size(counts: Counter[int]) -> int:
    """Chooses the layers of a group, by the bytes that a sequence takes; of equals the largest."""

    def weigh(size: int) -> tuple[int, int]:
        kept = sum(
            -(-count // size) * min(window or TYPICAL_TOKENS, TYPICAL_TOKENS) for window, count in counts.items()
        )
        return kept * size, -size

    sizes = range(min(counts.values()), max(counts.values()) + 1)
    return min((size for size in sizes if sum(-(-count // size) for count in counts.values()) <= MAX_GROUPS), key=weigh)
