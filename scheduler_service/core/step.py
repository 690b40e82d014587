"""Builds a step, and keeps what is needed to check its answer. Decides nothing."""

from __future__ import annotations

import math
from operator import or_, sub
from typing import NamedTuple

from scheduler_service.core.config import StepMismatch
from scheduler_service.core.cost import StepWork
from scheduler_service.core.sequence import Group, Sequence, SequenceStatus
from scheduler_service.core.values import BlockPair, Fork, NewSequence, SchedulerOutput, StepResult

MAX_NEW_BYTES = 16 * 1024 * 1024
"""Most bytes of new sequences in a step, unless there is only one: a message stays well below its limit of 64 MiB."""
# The most bytes of a token id in a message.
_BYTES_OF_ID = 5


class StepInFlight(NamedTuple):
    """A step without an answer yet, with all that is needed to check the answer.

    `sampled`: the sequences that get a token, in the order of the step; `sampled_ids`: their ids. `pieces`: sequences
    that get none, with the number of their tokens that have KV afterwards. `completed`: groups whose prompt this step
    finishes. `work`: what its timings measure. `beams`: sequences that propose tokens. `pooled`: sequences whose
    prompt is pooled into numbers. `drafts`: how many tokens the worker may draft for each of `sampled`; empty: none.
    """

    step_id: int
    sampled: list[Sequence]
    sampled_ids: tuple[int, ...]
    pieces: list[tuple[Sequence, int]]
    completed: list[Group]
    work: StepWork
    beams: list[Sequence]
    pooled: list[Sequence]
    drafts: tuple[int, ...]

    @property
    def sequences(self) -> list[Sequence]:
        return [*self.sampled, *self.beams, *self.pooled, *(sequence for sequence, _ in self.pieces)]

    def match(self, result: StepResult) -> list[Sequence]:
        """Returns the sequences that the answer has tokens of. Raises StepMismatch if this is not the step's answer."""
        if result.step_id != self.step_id:
            raise StepMismatch(
                f"the answer is to step {result.step_id}, and step {self.step_id} is the oldest in flight"
            )
        sampled, expected = self.sampled, self.sampled_ids
        if result.skipped_sequence_ids or result.failures:
            sampled = self._without_ended(self.sampled, result)
            expected = tuple([sequence.sequence_id for sequence in sampled])
        if result.sequence_ids != expected:
            raise StepMismatch(f"step {self.step_id} did not sample the sequences that it had to")
        if result.num_tokens:
            self._match_runs(sampled, result)
        elif len(result.token_ids) != len(expected):
            raise StepMismatch(f"step {self.step_id} did not sample one token of each sequence")
        if result.predictions and not {each[0] for each in result.predictions} <= set(expected):
            raise StepMismatch(f"step {self.step_id} counts predictions of sequences that it did not sample")
        if self.beams or result.beam_candidates:
            self._match_beams(result)
        if self.pooled or result.pooled:
            self._match_pooled(result)
        return sampled

    def _match_runs(self, sampled: list[Sequence], result: StepResult) -> None:
        """Checks the numbers of tokens: one of each sequence; if it may draft, none, or one more for each draft."""
        counts, drafts = result.num_tokens, self.find_drafts(sampled)
        is_whole = len(counts) == len(sampled) and sum(counts) == len(result.token_ids)
        if (
            not is_whole
            or max(map(sub, counts, drafts), default=1) > 1
            or (0 in counts and not all(map(or_, counts, drafts)))
        ):
            raise StepMismatch(f"step {self.step_id} sampled other numbers of tokens than it allowed")

    def find_drafts(self, sampled: list[Sequence]) -> tuple[int, ...]:
        """Returns how many tokens the worker might draft for each of these sequences, some of those of the step."""
        if not self.drafts:
            return (0,) * len(sampled)
        if sampled is self.sampled:
            return self.drafts
        drafts = dict(zip(self.sampled, self.drafts, strict=True))
        return tuple([drafts[sequence] for sequence in sampled])

    def _match_pooled(self, result: StepResult) -> None:
        expected = [sequence.sequence_id for sequence in self._without_ended(self.pooled, result)]
        if [sequence_id for sequence_id, _ in result.pooled] != expected:
            raise StepMismatch(f"step {self.step_id} did not pool the sequences that it had to")

    def _match_beams(self, result: StepResult) -> None:
        expected = {beam.sequence_id for beam in self._without_ended(self.beams, result)}
        if expected != set(result.beam_candidates or ()):
            raise StepMismatch(
                f"the answer to step {self.step_id} has candidates of other beams than the step asked for"
            )

    def _without_ended(self, sequences: list[Sequence], result: StepResult) -> list[Sequence]:
        """Leaves out sequences that were skipped or failed. Only a sequence that has ended may be skipped."""
        skipped = set(result.skipped_sequence_ids)
        for sequence in sequences:
            if sequence.sequence_id in skipped and sequence.status is not SequenceStatus.FINISHED:
                message = (
                    f"the answer to step {self.step_id} skips sequence {sequence.sequence_id}, which has not ended"
                )
                raise StepMismatch(message)
        skipped.update(sequence_id for sequence_id, _ in result.failures)
        return [sequence for sequence in sequences if sequence.sequence_id not in skipped]


class StepBuilder:
    __slots__ = (
        "_num_tokens",
        "activated_loras",
        "appended_block_ids",
        "appended_sequence_ids",
        "beams",
        "completed",
        "copies",
        "draft_prices",
        "drafts",
        "forks",
        "has_preempted",
        "inputs",
        "max_prefill_tokens",
        "max_rows",
        "new_sequences",
        "num_decodes",
        "num_new_bytes",
        "num_new_tokens",
        "num_prefill_tokens",
        "num_tokens_left",
        "pieces",
        "pooled",
        "replaced",
        "replaced_fixed",
        "restarted_ids",
        "rows",
        "sampled",
        "step_id",
        "swap_in",
        "swap_out",
        "takes_memory",
    )

    def __init__(self, step_id: int, num_tokens: int) -> None:
        self.step_id = step_id
        self._num_tokens = num_tokens
        self.num_tokens_left = num_tokens
        self.max_prefill_tokens = num_tokens
        self.max_rows = math.inf  # prefills may be added while there are fewer
        self.num_prefill_tokens = 0
        self.has_preempted = False
        self.num_decodes = 0  # of the first sequences that are sampled
        self.drafts: tuple[int, ...] = ()  # of these
        self.draft_prices: tuple[int, ...] = ()
        self.rows: list[Sequence] = []
        self.num_new_tokens: list[int] = []
        self.sampled: list[Sequence] = []
        self.beams: list[Sequence] = []
        self.pooled: list[Sequence] = []
        self.inputs: list[Sequence] = []
        self.pieces: list[tuple[Sequence, int]] = []
        self.completed: list[Group] = []
        self.new_sequences: list[NewSequence] = []
        self.num_new_bytes = 0
        self.restarted_ids: list[int] = []
        self.forks: list[Fork] = []
        self.appended_sequence_ids: list[int] = []
        self.appended_block_ids: list[int] = []
        self.replaced: dict[int, Sequence] = {}
        self.replaced_fixed: dict[int, Sequence] = {}
        self.swap_out: list[BlockPair] = []
        self.swap_in: list[BlockPair] = []
        self.takes_memory = False
        self.copies: list[BlockPair] = []
        self.activated_loras: list[tuple[int, int]] = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing is computed, moved or begun."""
        return not (self.rows or self.new_sequences or self.swap_out or self.swap_in or self.copies)

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """Adds sequences that get one token each. These are the first rows."""
        self.rows = sequences
        self.sampled = sequences.copy()
        self.num_decodes = len(sequences)
        self.num_new_tokens = [1] * len(sequences)
        self.num_tokens_left -= len(sequences)

    def split_decodes(self) -> None:
        """Takes beams out of the sampled decodes: they propose tokens, from the last token that was chosen for them."""
        new = {sequence.sequence_id for sequence in self.new_sequences}
        self.sampled = [sequence for sequence in self.rows if sequence.group.beams is None]
        self.num_decodes = len(self.sampled)
        self.beams = [sequence for sequence in self.rows if sequence.group.beams]
        self.inputs = [sequence for sequence in self.beams if sequence.sequence_id not in new]

    def bring_tokens(self) -> None:
        """Sends the worker the last token of every decode, since it appends none itself."""
        new = {sequence.sequence_id for sequence in self.new_sequences}
        self.inputs = [sequence for sequence in self.rows if sequence.sequence_id not in new]

    @property
    def num_prefill_left(self) -> int:
        if len(self.rows) >= self.max_rows:
            return 0
        return min(self.max_prefill_tokens - self.num_prefill_tokens, self.num_tokens_left)

    def add_piece(self, sequence: Sequence, num_new_tokens: int, *, is_last: bool) -> None:
        """Adds a piece of a prefill, which ends at `sequence.num_scheduled`."""
        self.num_prefill_tokens += num_new_tokens
        self.add_row(sequence, num_new_tokens, is_sampled=is_last)
        if is_last and sequence.group.spec.pooling is not None:
            self.pooled.append(self.sampled.pop())

    def add_row(self, sequence: Sequence, num_new_tokens: int, *, is_sampled: bool) -> None:
        """Adds a row: a piece of a prefill, a decode, or a child that samples from its parent's logits."""
        sequence.last_step_id = self.step_id
        self.num_tokens_left -= num_new_tokens
        self.rows.append(sequence)
        self.num_new_tokens.append(num_new_tokens)
        if is_sampled:
            (self.beams if sequence.group.beams else self.sampled).append(sequence)
        else:
            self.pieces.append((sequence, sequence.num_scheduled))

    def takes(self, sequence: Sequence) -> bool:
        """Whether the message has room for another new sequence."""
        return not self.new_sequences or self.num_new_bytes + _count_bytes(sequence) <= MAX_NEW_BYTES

    def add_new(self, sequence: Sequence, max_length: int = 0) -> None:
        """Adds a sequence, with its table, that the worker does not have (any more). `max_length`: if it may draft."""
        if sequence.is_known:
            self.restarted_ids.append(sequence.sequence_id)
        sequence.is_known = True
        sequence.last_step_id = self.step_id
        self.num_new_bytes += _count_bytes(sequence)
        self.new_sequences.append(
            NewSequence(
                sequence_id=sequence.sequence_id,
                sequence_index=sequence.sequence_index,
                token_ids=sequence.token_ids[:],
                prompt_length=sequence.group.prompt_length,
                num_computed_tokens=sequence.num_scheduled,
                block_ids=tuple(sequence.block_ids),
                spec=sequence.group.spec,
                num_beam_candidates=sequence.group.spec.num_beam_candidates,
                max_length=max_length,
                fixed_block_ids=tuple(sequence.fixed_ids),
            )
        )

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        child.is_known = True
        self.forks.append(
            Fork(
                parent.sequence_id,
                child.sequence_id,
                child.sequence_index,
                tuple(child.block_ids),
                tuple(child.fixed_ids),
            )
        )

    def add_appended(self, sequence: Sequence, block: int) -> None:
        """Adds a block to a table, unless the whole table is sent anyway."""
        if sequence.sequence_id not in self.replaced:
            self.appended_sequence_ids.append(sequence.sequence_id)
            self.appended_block_ids.append(block)

    def build(self, finished_ids: list[int]) -> tuple[SchedulerOutput, StepInFlight]:
        """Returns the step to send, and what to remember of it."""
        sequence_ids = tuple([sequence.sequence_id for sequence in self.rows])
        # In the order of the fields: this is made for each step, and names would cost more than the rest of it.
        output = SchedulerOutput(
            self.step_id,
            tuple(self.new_sequences),
            tuple(self.forks),
            sequence_ids,
            tuple(self.num_new_tokens),
            tuple(self.appended_sequence_ids),
            tuple(self.appended_block_ids),
            self._tables(),
            tuple(self.swap_out),
            tuple(self.swap_in),
            tuple(self.copies),
            tuple(finished_ids + self.restarted_ids),
            tuple([(sequence.sequence_id, sequence.token_ids[-1]) for sequence in self.inputs]),
            tuple(self.activated_loras),
            self._draft_column(),
            self.draft_prices,
            self._fixed_tables() if self.replaced_fixed else (),
        )
        sampled_ids = sequence_ids
        if self.pieces or self.beams or self.pooled:
            sampled_ids = tuple([sequence.sequence_id for sequence in self.sampled])
        return output, StepInFlight(
            self.step_id,
            self.sampled,
            sampled_ids,
            self.pieces,
            self.completed,
            self._count_work(),
            self.beams,
            self.pooled,
            self.drafts and self.drafts + (0,) * (len(self.sampled) - len(self.drafts)),
        )

    def _draft_column(self) -> tuple[int, ...]:
        """Returns how many tokens each row may draft; empty: none does."""
        if not self.drafts:
            return ()
        if not self.beams:
            return self.drafts + (0,) * (len(self.rows) - len(self.drafts))
        drafts = dict(zip(self.sampled, self.drafts, strict=False))
        return tuple([drafts.get(sequence, 0) for sequence in self.rows])

    def _tables(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Returns the tables that changed, except those of sequences preempted afterwards."""
        if not self.replaced:
            return ()
        running = SequenceStatus.RUNNING
        return tuple((key, tuple(each.block_ids)) for key, each in self.replaced.items() if each.status is running)

    def _fixed_tables(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        running = SequenceStatus.RUNNING
        items = self.replaced_fixed.items()
        return tuple((key, tuple(each.fixed_ids)) for key, each in items if each.status is running)

    def _count_work(self) -> StepWork:
        num_decodes = self._num_tokens - self.num_tokens_left - self.num_prefill_tokens
        num_swapped_blocks = len(self.swap_out) + len(self.swap_in)
        return StepWork(self.num_prefill_tokens, num_decodes, num_swapped_blocks, self.takes_memory)


def _count_bytes(sequence: Sequence) -> int:
    spec = sequence.group.spec
    num_ids = len(sequence.token_ids) + len(spec.stop_token_ids)
    return len(spec.payload or b"") + _BYTES_OF_ID * num_ids
