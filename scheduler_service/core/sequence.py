"""Sequences, beams and groups: the records that the core works on. The scheduler owns them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from blockyard.contract.scheduling import SequenceError, SequenceRecord
from scheduler_service.core.beam_search.beams import BeamSearchState

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from blockyard.contract.sampling import BeamSearch, FinishReason, PredictionUsage
    from scheduler_service.core.values import GroupSpec


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

    - `token_ids`: the known tokens, prompt and output. The ids of tokens in flight are not known yet;
    - `num_scheduled`: the tokens that have KV once all steps in flight are executed;
    - `num_computed`: the tokens that have KV according to the answers.

    While `is_prefilling`, known tokens wait for KV. Afterwards exactly one token waits, known or in flight, so the
    length with placeholders is `num_scheduled + 1`.

    While a step in flight lets the worker draft for it, the number of tokens in flight is not known either. Then
    `num_scheduled` is the most tokens that have KV afterwards; the answer takes back what it did not bring.

    `owner`, `priority`, `max_length`, `stop_from` and `stop_token_ids` copy values of the group that are read often.
    A beam's `max_length` grows with it: it is never scheduled past the token that was chosen for it.
    """

    __slots__ = (
        "block_hashes",
        "block_ids",
        "decode_snapshot",
        "error",
        "finish_reason",
        "fixed_host",
        "fixed_ids",
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
        "prediction",
        "priority",
        "publish_at",
        "score",
        "sequence_id",
        "sequence_index",
        "snapshots",
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
        self.stop_from = group.prompt_length + group.spec.min_tokens  # the first place of a stop token
        self.stop_token_ids = group.spec.stop_token_ids
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None  # once it has ended
        self.error: SequenceError | None = None  # if it failed
        self.score: float | None = None  # of a beam search, once it has ended
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []  # of the generated tokens, if the request asks for them
        self.pooled = b""  # pooled numbers of the prompt, if the request asks for them
        self.prediction: PredictionUsage | None = None  # if something was drafted that the request predicts
        self.is_prefilling = True
        self.num_scheduled = 0
        self.num_computed = 0
        self.last_step_id = 0  # the last step that computes or starts this sequence
        self.is_known = False  # the worker has it
        self.hurries = False  # others were preempted for it, and it has no token yet
        self.forked_from: Sequence | None = None  # for a beam, until the worker has it
        # Device blocks, those of the KV groups side by side. 0: swapped out, behind a window, or so far ahead in a
        # prefill that a group with a window has no block yet.
        self.block_ids: list[int] = []
        self.host_blocks: dict[int, int] = {}  # place in the table: host block
        # Blocks that it has from its beginning to its end, on the device or on the host: see FixedBlocks.
        self.fixed_ids: list[int] = []
        self.fixed_host: list[int] = []
        # Positions at which its state will be copied, and the last one of these behind its prefill: see Snapshots.
        self.snapshots: list[int] = []
        self.decode_snapshot = 0
        self.grow_at = 0  # when num_scheduled is this, a decode needs a new block or a copy
        self.block_hashes: list[bytes] = []  # of full blocks, as far as they were needed
        self.publish_at = 0  # when num_computed is this, another block is full
        self.num_found = 0  # blocks of tokens that were cached on admission
        self.num_ready = 0  # blocks of tokens with a block in every KV group; 0 after the prefill

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.group.prompt_length :]

    @property
    def has_last_in_flight(self) -> bool:
        """Whether the last token is in flight, so that nothing more is computed for now."""
        return not self.is_prefilling and self.num_scheduled + 1 >= self.max_length

    def make_record(self) -> SequenceRecord:
        return SequenceRecord(
            self.output_token_ids,
            self.finish_reason,
            self.logprobs.copy(),
            self.score,
            self.error,
            self.pooled,
            self.prediction,
        )

    def finish(self, reason: FinishReason, num_tokens: int | None = None) -> None:
        """Ends the sequence. Only the first `num_tokens` of the generated tokens count; None: all."""
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        if num_tokens is not None:
            del self.token_ids[self.group.prompt_length + num_tokens :]
            del self.logprobs[num_tokens:]

    def __repr__(self) -> str:
        return f"<sequence {self.sequence_id} {self.status.name} {self.num_scheduled}/{len(self.token_ids)}>"


class Beams:
    """The beams that a search follows, as sequences.

    `sequences`: by rank, all of one length. `candidates`: what each proposed since the last choice. The ids of dropped
    beams are used again, later than the step in which the worker forgets them.
    """

    __slots__ = ("candidates", "free_ids", "has_branched", "search", "sequences")

    def __init__(self, beams: BeamSearch, group: Group, first_sequence_id: int) -> None:
        spec = group.spec
        self.search = BeamSearchState(beams, spec.stop_token_ids, spec.min_tokens, spec.num_beam_candidates)
        self.free_ids = deque(range(first_sequence_id, first_sequence_id + 2 * beams.width))
        self.candidates: dict[Sequence, tuple[tuple[int, float], ...]] = {}
        self.has_branched = False
        self.sequences = [self.make_sequence(group)]
        self.sequences[0].token_ids = list(spec.prompt_token_ids)
        self.sequences[0].max_length = group.prompt_length + 1

    def make_sequence(self, group: Group) -> Sequence:
        """Makes another beam, with the id that has been free for longest."""
        return Sequence(self.free_ids.popleft(), 0, group)

    @property
    def has_all_candidates(self) -> bool:
        return len(self.candidates) == len(self.sequences)


class Group:
    """A request: `n` sequences with one prompt. The first live one, the leader, prefills it; the others are forked.

    `unforked` are the sequences that wait for the fork; meanwhile only the leader is queued. With `beams`, the beams
    are computed instead, and `sequences` get their tokens when the search is over.
    """

    __slots__ = (
        "arrived_at",
        "beams",
        "is_prefilled",
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
        self.is_prefilled = False  # and its owner knows
        self.prompt_logprobs: list[Any] = []
        self.sequences = [Sequence(first_sequence_id + index, index, self) for index in range(spec.n)]
        self.sequences[0].token_ids = list(spec.prompt_token_ids)
        self.unforked = self.sequences[1:] if spec.beams is None else []
        self.beams = Beams(spec.beams, self, first_sequence_id + spec.n) if spec.beams else None

    def continue_from(self, records: Many[SequenceRecord], num_cached_tokens: int) -> None:
        """Restores what a request generated elsewhere: a record of each sequence, by index."""
        self.num_cached_tokens = num_cached_tokens
        for sequence, record in zip(self.sequences, records, strict=True):
            sequence.finish_reason = record.reason
            sequence.status = SequenceStatus.FINISHED if record.reason else SequenceStatus.WAITING
            sequence.token_ids = [*self.spec.prompt_token_ids, *record.token_ids]
            sequence.logprobs = list(record.logprobs)
            sequence.score, sequence.error, sequence.pooled = record.score, record.error, record.pooled_values
            sequence.prediction = record.prediction
        if self.is_finished:
            self.beams = None
        self.lead_anew()

    def lead_anew(self) -> None:
        """Chooses the leader and the sequences to fork from it, while nothing of the group is computed.

        Once a sequence has output, each is prefilled by itself: they no longer share logits.
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
        """Ends the group, or one of its sequences, while no scheduler has it. Only the first `num_tokens` count.

        Returns False if there was nothing to end. The sequences of a beam search end together.
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
        """Ends the sequences together with their beams."""
        self.beams = None
        for sequence in self.sequences:
            sequence.finish(reason)

    def reassign(self, owner: str) -> None:
        self.spec = replace(self.spec, owner=owner)
        for sequence in {*self.sequences, *self.computed}:
            sequence.owner = owner

    @property
    def computed(self) -> list[Sequence]:
        """The sequences that the worker computes: the group's own, or the beams of its search."""
        return self.beams.sequences if self.beams else self.sequences

    @property
    def live(self) -> list[Sequence]:
        """The computed sequences that have not ended."""
        return [sequence for sequence in self.computed if sequence.status is not SequenceStatus.FINISHED]

    @property
    def num_outputs(self) -> int:
        return sum(max(len(sequence.token_ids) - self.prompt_length, 0) for sequence in self.computed)

    @property
    def prompt_length(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def num_rows(self) -> int:
        """Rows that the leader must find free, since all children are forked at once."""
        if self.beams:
            return 1 if self.beams.has_branched else self.spec.num_rows
        return 1 + len(self.unforked)

    @property
    def leader(self) -> Sequence:
        """The sequence that prefills for the unforked ones. Only while there are such."""
        return next(sequence for sequence in self.live if sequence not in self.unforked)

    @property
    def is_finished(self) -> bool:
        return all(sequence.status is SequenceStatus.FINISHED for sequence in self.sequences)
