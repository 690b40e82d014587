"""Sequences and their groups: the records that the core works on. The scheduler owns them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from scheduler_service.core.beam_search.beams import BeamSearch

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from scheduler_service.core.values import BeamSpec, FinishReason, GroupSpec, SequenceError


class SequenceStatus(Enum):
    """The state of a sequence. A child that is not forked yet waits too, but in no queue.

    PARKED: a beam without blocks, with nothing to compute until all of its group have proposed.
    """

    WAITING = 1
    RUNNING = 2
    SWAPPED = 3
    FINISHED = 4
    PARKED = 5


class Sequence:
    """One sampled continuation.

    Three counts of tokens, `num_computed <= num_scheduled < len(token_ids) + steps in flight + 1`:

    - `token_ids`: known, prompt and output. Of a token in flight only the existence is known;
    - `num_scheduled`: those that have KV once all steps in flight are executed;
    - `num_computed`: those that have KV according to the answers.

    While `is_prefilling`, known tokens wait for their KV; afterwards exactly one token, known or in flight, does, so
    the length with placeholders is `num_scheduled + 1`.

    `owner`, `priority`, `max_length`, `stop_from`, `stop_token_ids` repeat what the group knows: they are read often.
    A beam's `max_length` grows with it: it is never scheduled past the token that was chosen for it.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "error",
        "finish_reason",
        "forked_from",
        "group",
        "grow_at",
        "host_blocks",
        "hurries",
        "is_known",
        "is_prefilling",
        "last_step_id",
        "logprobs",
        "max_length",
        "num_computed",
        "num_found",
        "num_ready",
        "num_scheduled",
        "owner",
        "pooled",
        "priority",
        "publish_at",
        "score",
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
        self.error: SequenceError | None = None  # why it failed, if it did
        self.score: float | None = None  # of a beam search's, once it has ended
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []  # of its tokens, if they are wanted
        self.pooled = b""  # the numbers made of its prompt, if these are wanted and there
        self.is_prefilling = True
        self.num_scheduled = 0
        self.num_computed = 0
        self.last_step_id = 0  # the last step that computes this sequence, or in which it began
        self.is_known = False  # the worker has it
        self.hurries = False  # it began at the expense of others, and has no token yet
        self.forked_from: Sequence | None = None  # for a beam, until the worker has it
        # Device blocks, those of each KV group side by side. 0 where there is none: swapped out, behind a window, or so
        # far ahead in a prefill that windows have no block yet.
        self.block_ids: list[int] = []
        self.host_blocks: dict[int, int] = {}  # place in the table: host block
        self.grow_at = 0  # with so many tokens scheduled, a decode needs a block: for its slot, or to stop sharing
        self.block_hashes: list[bytes] = []  # of its full blocks, as far as they were needed
        self.publish_at = 0  # with so many tokens computed, another block is full
        self.num_found = 0  # blocks of tokens that were cached when it began
        self.num_ready = 0  # blocks of tokens of which all groups have their blocks; 0 once it matters no more

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens that were generated."""
        return self.token_ids[self.group.prompt_length :]

    def finish(self, reason: FinishReason, num_tokens: int | None = None) -> None:
        """Ends the sequence. Of the tokens generated the first `num_tokens` count; None: all."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        if num_tokens is not None:
            del self.token_ids[self.group.prompt_length + num_tokens :]
            del self.logprobs[num_tokens:]

    def __repr__(self) -> str:
        return f"<sequence {self.sequence_id} {self.status.name} {self.num_scheduled}/{len(self.token_ids)}>"


class Beams:
    """The beams that a search follows, as sequences.

    `sequences`: by rank. `candidates`: what each of them proposed since the last choice. All of them have one length.
    The ids of those dropped come again: later than the step in which the worker forgets them.
    """

    __slots__ = ("candidates", "free_ids", "has_branched", "search", "sequences")

    def __init__(self, beams: BeamSpec, group: Group, first_sequence_id: int) -> None:
        spec = group.spec
        self.search = BeamSearch(beams, spec.stop_token_ids, spec.min_tokens, spec.num_beam_candidates)
        self.free_ids = deque(range(first_sequence_id, first_sequence_id + 2 * beams.width))
        self.candidates: dict[Sequence, tuple[tuple[int, float], ...]] = {}
        self.has_branched = False
        self.sequences = [self.make_sequence(group)]
        self.sequences[0].token_ids = list(spec.prompt_token_ids)
        self.sequences[0].max_length = group.prompt_length + 1

    def make_sequence(self, group: Group) -> Sequence:
        """Another one, with the id that is free for longest."""
        return Sequence(self.free_ids.popleft(), 0, group)

    @property
    def has_all_candidates(self) -> bool:
        """Whether the next tokens can be chosen."""
        return len(self.candidates) == len(self.sequences)


class Group:
    """A request: `n` sequences with one prompt. The first live one prefills it for all, the others are forked.

    `unforked` are those that wait for that; as long as there are any, one other sequence of the group is queued, the
    *leader*. With `beams` it is those that are computed, and `sequences` get their tokens when the search is over.
    """

    __slots__ = (
        "arrived_at",
        "beams",
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
        self.unforked = self.sequences[1:] if spec.beams is None else []
        self.beams = Beams(spec.beams, self, first_sequence_id + spec.n) if spec.beams else None

    def continue_from(self, outputs: Many[Many[int]], ended: Many[FinishReason | None]) -> None:
        """Restores what a request generated elsewhere: by index, each sequence's tokens and why it ended, if so."""
        for sequence, token_ids, reason in zip(self.sequences, outputs, ended, strict=True):
            sequence.finish_reason = reason
            sequence.status = SequenceStatus.FINISHED if reason else SequenceStatus.WAITING
            sequence.token_ids = [*self.spec.prompt_token_ids, *token_ids]
        if self.is_finished:
            self.beams = None
        self.lead_anew()

    def lead_anew(self) -> None:
        """Chooses who prefills the prompt and who is forked then; nothing of the group is computed yet.

        Once a sequence has output, it and the others are prefilled each by itself: nobody's logits are theirs too.
        """
        if self.beams:
            return
        live = self.live
        self.unforked = [] if self.num_outputs else live[1:]
        for sequence in live:
            if sequence in self.unforked:
                sequence.token_ids = []
            elif not sequence.token_ids:
                sequence.token_ids = list(self.spec.prompt_token_ids)

    def end_waiting(self, index: int | None, reason: FinishReason, num_tokens: int | None = None) -> bool:
        """End it, or one of its sequences, while no scheduler has it. Of the tokens the first `num_tokens` count.

        False: there was nothing to end. The sequences of a beam search end together.
        """
        if self.beams and index is not None:
            return False
        chosen = [sequence for sequence in self.live if index in (None, sequence.sequence_index)]
        for sequence in chosen:
            sequence.finish(reason, num_tokens)
        if self.beams:
            self.end_search(reason)
        self.lead_anew()
        return bool(chosen)

    def end_search(self, reason: FinishReason) -> None:
        """Ends its sequences with its beams."""
        self.beams = None
        for sequence in self.sequences:
            sequence.finish(reason)

    def reassign(self, owner: str) -> None:
        """Gives its tokens to another owner from now on."""
        self.spec = replace(self.spec, owner=owner)
        for sequence in {*self.sequences, *self.computed}:
            sequence.owner = owner

    @property
    def computed(self) -> list[Sequence]:
        """Those that the worker computes: its sequences, or the beams that will become them."""
        return self.beams.sequences if self.beams else self.sequences

    @property
    def live(self) -> list[Sequence]:
        """Those that are computed and have not ended."""
        return [sequence for sequence in self.computed if sequence.status is not SequenceStatus.FINISHED]

    @property
    def num_outputs(self) -> int:
        """Tokens generated, of all that are computed."""
        return sum(max(len(sequence.token_ids) - self.prompt_length, 0) for sequence in self.computed)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.spec.prompt_token_ids)

    @property
    def num_rows(self) -> int:
        """Rows of a step that the leader must find free: the children are forked all at once."""
        if self.beams:
            return 1 if self.beams.has_branched else self.spec.num_rows
        return 1 + len(self.unforked)

    @property
    def leader(self) -> Sequence:
        """The one that prefills for those not forked yet. Only while there are such."""
        return next(sequence for sequence in self.live if sequence not in self.unforked)

    @property
    def is_finished(self) -> bool:
        """Whether all its sequences ended."""
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)
