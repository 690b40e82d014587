"""The loss of a worker as one more way of being preempted: what was emitted stays, what was computed is made again.

KV is a cache, and what is not answered did not happen. So every live sequence waits again, in order of precedence, to
be prefilled with its prompt and the tokens that its owner has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_service.core.output import OwnerUpdate
from scheduler_service.core.sequence import SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler_service.core.limits import SchedulerConfig
    from scheduler_service.core.policy import Queues
    from scheduler_service.core.sequence import Group, Sequence


def count_replayed(groups: Iterable[Group]) -> dict[str, OwnerUpdate]:
    """What each owner's requests lose: the tokens, prompt and output, that must be computed once more.

    A request that the worker had not been told of, and that has no output, loses nothing.
    """
    updates: dict[str, OwnerUpdate] = {}
    for group in groups:
        begun = [s for s in group.sequences if s.status is not SequenceStatus.FINISHED and _has_begun(s)]
        if begun:
            update = updates.setdefault(group.spec.owner, OwnerUpdate())
            update.recovered.append((group.spec.request_id, sum(len(sequence.token_ids) for sequence in begun)))
    return updates


def _has_begun(sequence: Sequence) -> bool:
    return sequence.is_known or len(sequence.token_ids) > sequence.group.prompt_length


def requeue(queues: Queues) -> None:
    """Let everybody wait who ran, was swapped out or waited, in this order. The worker knows nobody.

    Children whose fork was not answered wait for their leader again: the prompt is computed once for all of them.
    """
    led: set[str] = set()
    for sequence in queues.take_all():
        group = sequence.group
        _start_anew(sequence)
        if len(sequence.token_ids) > group.prompt_length:
            queues.waiting.push(sequence)
        elif group.spec.request_id not in led:
            led.add(group.spec.request_id)
            queues.waiting.push(sequence)
        else:
            sequence.token_ids = []
            group.unforked.append(sequence)


def _start_anew(sequence: Sequence) -> None:
    sequence.status = SequenceStatus.WAITING
    sequence.is_prefilling = True
    sequence.is_known = False
    sequence.num_scheduled = sequence.num_computed = 0
    sequence.last_step_id = 0
    sequence.block_ids = []
    sequence.host_blocks = {}
    # Their size may be another one.
    sequence.block_hashes = []


def fit(group: Group, config: SchedulerConfig) -> list[Sequence]:
    """Limit a group to other pools. Returns the sequences that are too long to go on. Raises NeverFits."""
    group.max_length = config.find_max_length(group.prompt_length, group.spec.max_tokens)
    for sequence in group.sequences:
        sequence.max_length = group.max_length
    live = [sequence for sequence in group.sequences if sequence.status is not SequenceStatus.FINISHED]
    return [sequence for sequence in live if len(sequence.token_ids) >= group.max_length]


class Suspects:
    """Groups of which the worker may have died. One of them at a time is computed, until it gives a token.

    The next death then tells: of those in hand only one has given no token since the last.
    """

    __slots__ = ("_num_outputs",)

    def __init__(self) -> None:
        self._num_outputs: dict[Group, int] = {}

    def replace(self, groups: Iterable[Group]) -> None:
        """These are suspect now, and no others."""
        self._num_outputs = {group: _count_outputs(group) for group in groups}

    def may_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may run beside those that do."""
        if not self._num_outputs:
            return True
        self._num_outputs = {
            group: count for group, count in self._num_outputs.items() if _count_outputs(group) == count
        }
        if sequence.group not in self._num_outputs:
            return True
        return not any(group is not sequence.group and _is_active(group) for group in self._num_outputs)


def _count_outputs(group: Group) -> int:
    return sum(max(len(sequence.token_ids) - group.prompt_length, 0) for sequence in group.sequences)


def _is_active(group: Group) -> bool:
    return any(s.status in (SequenceStatus.RUNNING, SequenceStatus.SWAPPED) for s in group.sequences)
