"""Sequences and the groups they belong to: records without behaviour. Their owner is the scheduler."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from scheduler_service.core.output import FinishReason, GroupSpec


class SequenceStatus(Enum):
    """Where a sequence stands. A child that is not forked yet waits too, but in no queue."""

    WAITING = 1
    RUNNING = 2
    SWAPPED = 3
    FINISHED = 4


class Sequence:
    """One sampled continuation.

    Three counts of tokens, `num_computed <= num_scheduled < len(token_ids) + steps in flight + 1`:

    - `token_ids`: known, prompt and output. Of a token in flight only the existence is known;
    - `num_scheduled`: those that have KV once all steps in flight are executed;
    - `num_computed`: those that have KV according to the answers.

    While `is_prefilling`, known tokens wait for their KV; afterwards exactly one token, known or in flight, does, so
    the length with placeholders is `num_scheduled + 1`.

    `owner`, `priority`, `max_length`, `stop_from`, `stop_token_ids` repeat what the group knows: they are read often.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "finish_reason",
        "group",
        "grow_at",
        "host_blocks",
        "is_known",
        "is_prefilling",
        "last_step_id",
        "logprobs",
        "max_length",
        "num_computed",
        "num_scheduled",
        "owner",
        "priority",
        "publish_at",
        "sequence_id",
        "sequence_index",
        "status",
        "stop_from",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, sequence_id: int, sequence_index: int, group: Group) -> None:
        self.sequence_id = sequence_id
        self.sequence_index = sequence_index
        self.group = group
        self.owner = group.spec.owner
        self.priority = group.spec.priority
        self.max_length = group.max_length
        self.stop_from = group.prompt_length + group.spec.min_tokens  # the first place that a stop token can take
        self.stop_token_ids = group.spec.stop_token_ids
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None  # why it ended, once it has
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []  # what was told with its tokens, if anything
        self.is_prefilling = True
        self.num_scheduled = 0
        self.num_computed = 0
        self.last_step_id = 0  # the last step that computes this sequence, or in which it began
        self.is_known = False  # the worker was told of it
        self.block_ids: list[int] = []  # device blocks; 0 where there is none while swapped out
        self.host_blocks: dict[int, int] = {}  # place in the table: host block
        self.grow_at = 0  # with so many tokens scheduled, a decode needs a block: for its slot, or to stop sharing
        self.block_hashes: list[bytes] = []  # of its full blocks, as far as they were needed
        self.publish_at = 0  # with so many tokens computed, another block is full

    @property
    def output_token_ids(self) -> list[int]:
        """What was generated."""
        return self.token_ids[self.group.prompt_length :]

    def finish(self, reason: FinishReason, num_tokens: int | None = None) -> None:
        """It has ended. Of the tokens generated the first `num_tokens` count; None: all."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        if num_tokens is not None:
            del self.token_ids[self.group.prompt_length + num_tokens :]
            del self.logprobs[num_tokens:]

    def __repr__(self) -> str:
        return f"<sequence {self.sequence_id} {self.status.name} {self.num_scheduled}/{len(self.token_ids)}>"


class Group:
    """A request: `n` sequences with one prompt. The first live one prefills it for all, the others are forked.

    `unforked` are those that wait for that; as long as there are any, one other sequence of the group is queued, the
    *leader*.
    """

    __slots__ = (
        "arrived_at",
        "max_length",
        "num_cached_tokens",
        "prompt_logprobs",
        "sequences",
        "spec",
        "unforked",
    )

    def __init__(self, spec: GroupSpec, first_sequence_id: int, max_length: int, arrived_at: float) -> None:
        self.spec = spec
        self.max_length = max_length
        self.arrived_at = arrived_at
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[Any] = []
        self.sequences = [Sequence(first_sequence_id + index, index, self) for index in range(spec.n)]
        self.sequences[0].token_ids = list(spec.prompt_token_ids)
        self.unforked = self.sequences[1:]

    def continue_from(self, outputs: Many[Many[int]], ended: Many[FinishReason | None]) -> None:
        """Let a new request be where it was elsewhere: by index the tokens of each sequence and why it ended, if so."""
        for sequence, token_ids, reason in zip(self.sequences, outputs, ended, strict=True):
            sequence.finish_reason = reason
            sequence.status = SequenceStatus.FINISHED if reason else SequenceStatus.WAITING
            sequence.token_ids = [*self.spec.prompt_token_ids, *token_ids]
        self.lead_anew()

    def lead_anew(self) -> None:
        """Nothing of it is computed: choose who prefills the prompt, and who is forked then.

        Once a sequence has output, it and the others are prefilled each by itself: nobody's logits are theirs too.
        """
        live = self.live
        self.unforked = [] if self.num_outputs else live[1:]
        for sequence in live:
            if sequence in self.unforked:
                sequence.token_ids = []
            elif not sequence.token_ids:
                sequence.token_ids = list(self.spec.prompt_token_ids)

    def end_waiting(self, index: int | None, reason: FinishReason, num_tokens: int | None = None) -> bool:
        """End it, or one of its sequences, while no scheduler has it. Of the tokens the first `num_tokens` count.

        False: there was nothing to end.
        """
        chosen = [sequence for sequence in self.live if index in (None, sequence.sequence_index)]
        for sequence in chosen:
            sequence.finish(reason, num_tokens)
        self.lead_anew()
        return bool(chosen)

    def reassign(self, owner: str) -> None:
        """Somebody else is told of its tokens from now on."""
        self.spec = replace(self.spec, owner=owner)
        for sequence in self.sequences:
            sequence.owner = owner

    @property
    def live(self) -> list[Sequence]:
        """Its sequences that have not ended."""
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    @property
    def num_outputs(self) -> int:
        """Tokens generated, of all sequences."""
        return sum(max(len(sequence.token_ids) - self.prompt_length, 0) for sequence in self.sequences)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.prompt_token_ids)

    @property
    def num_rows(self) -> int:
        """Rows of a step that the leader must find free: the children are forked all at once."""
        return 1 + len(self.unforked)

    @property
    def leader(self) -> Sequence:
        """The one that prefills for those not forked yet. Only while there are such."""
        live = (sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED)
        return next(sequence for sequence in live if sequence not in self.unforked)

    @property
    def is_finished(self) -> bool:
        """Whether all its sequences ended."""
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)
