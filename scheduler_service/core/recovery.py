"""Treats the loss of a worker as a preemption of all: tokens that were emitted stay, KV is computed again.

KV is a cache, and what is not answered did not happen. So every live sequence waits again, here or at another replica,
to be prefilled with its prompt and the tokens that its owner has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from scheduler_service.core.sequence import Group, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler_service.core.queues.queues import Queues

_STARTED = (SequenceStatus.RUNNING, SequenceStatus.SWAPPED)


class Evacuated(NamedTuple):
    """A request that lost its worker. `num_tokens`: prompt and output tokens to compute again."""

    group: Group
    num_tokens: int


def count_lost(group: Group) -> int:
    """Counts the tokens of a request that must be computed again.

    A sequence that the worker did not have and that has no output loses nothing.
    """
    return sum(len(sequence.token_ids) for sequence in group.live if _has_begun(sequence))


def _has_begun(sequence: Sequence) -> bool:
    return sequence.is_known or len(sequence.token_ids) > sequence.group.prompt_length


def give_up(queues: Queues, live: Iterable[Group]) -> list[Evacuated]:
    """Empties the queues: running, swapped and waiting sequences, in this order. The worker knows none of them.

    Children whose fork was not answered wait for their leader again, so that the prompt is computed once for all. Beams
    keep their proposals; beams without one are prefilled with their tokens.
    """
    groups = list(dict.fromkeys([*(sequence.group for sequence in queues.take_all()), *live]))
    evacuated = [Evacuated(group, count_lost(group)) for group in groups]
    for group in groups:
        for sequence in group.live:
            _start_anew(sequence)
        group.lead_anew()
    return evacuated


def _start_anew(sequence: Sequence) -> None:
    beams = sequence.group.beams
    has_proposed = beams is not None and sequence in beams.candidates
    sequence.status = SequenceStatus.PARKED if has_proposed else SequenceStatus.WAITING
    sequence.forked_from = None
    sequence.is_prefilling = True
    sequence.is_known = False
    sequence.num_scheduled = sequence.num_computed = 0
    sequence.last_step_id = 0
    sequence.block_ids = []
    sequence.host_blocks = {}
    sequence.fixed_ids, sequence.fixed_host = [], []
    sequence.decode_snapshot = 0
    # The next worker may have another block size.
    sequence.block_hashes = []


class Suspects:
    """Requests that may have killed a worker. A replica computes one of them at a time, until it gives a token.

    The replica's next death then decides: only one request in hand has given no token since the last death. One object
    serves all replicas, since a suspect may kill any of them.
    """

    __slots__ = ("num_outputs",)

    def __init__(self) -> None:
        # The number of tokens that each suspect had when it became one. Empty while no worker has died.
        self.num_outputs: dict[Group, int] = {}

    def replace(self, groups: Iterable[Group]) -> None:
        self.num_outputs = {group: group.num_outputs for group in groups}

    def may_start(self, sequence: Sequence, started: Iterable[Sequence]) -> bool:
        """Whether a waiting sequence may run beside those that have started at its replica, running or swapped."""
        self.num_outputs = {group: count for group, count in self.num_outputs.items() if group.num_outputs == count}
        if sequence.group not in self.num_outputs:
            return True
        others = (other for other in started if other.status in _STARTED and other.group is not sequence.group)
        return not any(other.group in self.num_outputs for other in others)
