"""Snapshots of states: the prefix cache of models whose layers have one.

A prefix is of use only with the state behind it. So a sequence's fixed blocks are copied where it stands at a position
that others may begin from, and the copies are found by the hash of the tokens up to there. They are held until the step
that makes them is answered; then they are evictable like all that is cached. Nobody waits or gives way for one.

Positions are multiples of `every` tokens: the last one before the end of a prompt, those up to which another prompt has
the same tokens, and some in between; behind the prompt each, in place of the sequence's one before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from scheduler_service.core.blocks.prefix_lookup import name_of_state
from scheduler_service.core.values import BlockPair

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from scheduler_service.core.blocks.block_pool import BlockPool
    from scheduler_service.core.blocks.prefix_lookup import Prefix, PrefixLookup
    from scheduler_service.core.sequence import Sequence
    from scheduler_service.core.step import StepBuilder

MIN_DISTANCE = 4096
"""Tokens of a long prompt between two snapshots that no other prompt has asked for."""


class _Snapshot(NamedTuple):
    """The copies of a sequence's fixed blocks, at `position`. `is_decode`: it stands behind what was prefilled."""

    sequence: Sequence
    position: int
    block_ids: list[int]
    is_decode: bool


class Snapshots:
    """Chooses positions, and has blocks copied there. `every` 0: there are no snapshots."""

    __slots__ = ("_allocate", "_device", "_prefixes", "_taken", "every")

    def __init__(self, every: int, device: BlockPool, prefixes: PrefixLookup, allocate: Callable[[], int]) -> None:
        self.every = every
        self._device = device
        self._prefixes = prefixes
        self._allocate = allocate
        self._taken: dict[int, list[_Snapshot]] = {}  # by the step that makes them

    def reset(self) -> None:
        self._taken.clear()

    def plan(self, sequence: Sequence, prefix: Prefix) -> None:
        """Chooses the positions of a sequence that begins behind a cached prefix; the last one is behind its prompt."""
        every, first = self.every, prefix.position
        last = (len(sequence.token_ids) - 1) // every * every
        between = range(first // MIN_DISTANCE * MIN_DISTANCE + MIN_DISTANCE, last, MIN_DISTANCE)
        wanted = {position // every * every for position in between}
        wanted |= {last, min(prefix.num_reached // every * every, last)}
        sequence.snapshots = [*sorted(position for position in wanted if position > first), last + every]

    def count_until(self, sequence: Sequence) -> int:
        """Counts the tokens that a prefill may compute until it stands at the next position."""
        position = sequence.num_scheduled
        return next(each for each in sequence.snapshots if each > position) - position

    def take(self, step: StepBuilder, children: Collection[Sequence], num_spare: int) -> None:
        """Has the states copied with which the sequences of a step begin, as long as `num_spare` blocks stay free.

        `children`: those that get their parent's state in this very step.
        """
        for sequence, num_new_tokens in zip(step.rows, step.num_new_tokens, strict=True):
            position = sequence.num_scheduled - num_new_tokens
            if not num_new_tokens or position < sequence.snapshots[0]:
                continue
            at = sequence.snapshots.pop(0)
            is_decode = not sequence.snapshots
            if is_decode:
                sequence.snapshots.append(at + self.every)
            if at == position and sequence not in children:
                self._take(sequence, position, step, num_spare, is_decode=is_decode)

    def _take(self, sequence: Sequence, position: int, step: StepBuilder, num_spare: int, *, is_decode: bool) -> None:
        if self._device.num_free - len(sequence.fixed_ids) < num_spare:
            return
        is_known = position <= len(sequence.token_ids)
        if is_known and self._prefixes.find_states(sequence, position, reads_host=False):
            return
        block_ids = [self._allocate() for _ in sequence.fixed_ids]
        step.copies += [BlockPair(*pair) for pair in zip(sequence.fixed_ids, block_ids, strict=True)]
        snapshot = _Snapshot(sequence, position, block_ids, is_decode)
        self._taken.setdefault(step.step_id, []).append(snapshot)

    def publish(self, step_id: int) -> None:
        """Makes the snapshots of an answered step findable.

        A sequence may have ended before it came to the position, which was not known when the step was made.
        """
        for sequence, position, block_ids, is_decode in self._taken.pop(step_id, ()):
            if sequence.num_computed >= position <= len(sequence.token_ids):
                state_hash = self._prefixes.hash_at(sequence, position)
                for place, block in enumerate(block_ids):
                    self._device.publish(block, name_of_state(state_hash, place))
                if is_decode:
                    self._forget(sequence, len(block_ids))
                    sequence.decode_snapshot = position
            for block in block_ids:
                self._device.release(block)

    def _forget(self, sequence: Sequence, num_blocks: int) -> None:
        """Forgets the snapshot of a sequence's output before this one: who goes on from here needs the later one."""
        if sequence.decode_snapshot:
            state_hash = self._prefixes.hash_at(sequence, sequence.decode_snapshot)
            for place in range(num_blocks):
                self._device.forget(name_of_state(state_hash, place))

    @property
    def held(self) -> Iterator[int]:
        """The blocks that are held until their step is answered."""
        taken = self._taken.values()
        return (block for snapshots in taken for snapshot in snapshots for block in snapshot.block_ids)
