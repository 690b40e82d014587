"""The part of a step that only ranks of a group have: its deadline, its digests, and which answers are sent.

Used by the device thread alone. A world of one has none of this.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from blockyard.errors import BlockyardError, Reason
from worker_service.collectives.gathering import make_silence
from worker_service.step import Step, StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy.typing as npt

    from blockyard.contract.parallel import Parallel
    from blockyard_kernels.collectives import Ranks
    from worker_service.batch.forward_batch import ForwardBatch
    from worker_service.collectives.group import RankGroup
    from worker_service.runner.model_runner import RunnerOutput

    Column = Sequence[int] | npt.NDArray[np.generic]

DIGEST_BYTES = 8

FAILED = -1


class StepDigest:
    """The two chains of one epoch: of the inputs of each step, as this rank resolved them, and of sampled tokens.

    A chain depends on every step of the epoch so far. So whole block tables need not be hashed, but only what changes
    them.
    """

    def __init__(self) -> None:
        self._inputs = self._outputs = bytes(DIGEST_BYTES)

    @property
    def inputs(self) -> int:
        """The digest of all steps so far, 64 bits."""
        return int.from_bytes(self._inputs, "little")

    @property
    def outputs(self) -> int:
        """The digest of all tokens sampled so far, 64 bits."""
        return int.from_bytes(self._outputs, "little")

    def add_inputs(self, step: Step, forward_batch: ForwardBatch) -> None:
        self._inputs = _chain(self._inputs, _input_columns(step, forward_batch))

    def add_outputs(self, forward_batch: ForwardBatch, output: RunnerOutput) -> None:
        """Adds the tokens that a step sampled. All ranks of the last stage have the same tokens."""
        sampled = output.sampled
        others = output.candidates.failed, forward_batch.layout.skipped_ids
        if sampled.counts is None:
            # The token of a failed row has no meaning.
            columns = (np.where(sampled.failed, FAILED, sampled.token_ids), *others)
        else:
            columns = (sampled.token_ids, sampled.counts, sampled.failed, *others)
        self._outputs = _chain(self._outputs, columns)


def _input_columns(step: Step, forward_batch: ForwardBatch) -> Iterator[Column]:
    yield (step.step_id,)
    yield step.sequence_ids
    yield step.num_new_tokens
    yield forward_batch.token_ids
    yield forward_batch.seq_lens
    for pairs in (step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy):
        yield pairs.sources
        yield pairs.destinations
    yield step.appended_sequence_ids
    yield step.appended_block_ids
    for sequence_id, block_ids in step.replaced_tables:
        yield (sequence_id,)
        yield block_ids
    yield step.activated_lora_slots
    yield step.activated_lora_ids
    if len(step.max_draft_tokens):
        yield step.max_draft_tokens
        yield step.draft_prices
    for new in step.new_sequences:
        yield new.sequence_id, new.lora_id
        yield new.block_ids
        if len(new.fixed_block_ids):
            yield new.fixed_block_ids
    for fork in step.forks:
        yield fork.parent_id, fork.child_id
        yield fork.block_ids
        if len(fork.fixed_block_ids):
            yield fork.fixed_block_ids
    for sequence_id, fixed_ids in step.replaced_fixed_tables:
        yield (sequence_id,)
        yield fixed_ids


def _chain(before: bytes, columns: Iterable[Column]) -> bytes:
    """Hashes the digest before and columns, each with its length, as 64-bit integers in little-endian order."""
    digest = blake2b(before, digest_size=DIGEST_BYTES)
    for column in columns:
        digest.update(len(column).to_bytes(8, "little"))
        if len(column):
            # Sequence ids have 64 bits without a sign.
            numbers = column if isinstance(column, np.ndarray) else np.array(column, np.uint64)
            digest.update(numbers.astype("<u8" if numbers.dtype.kind == "u" else "<i8", copy=False).tobytes())
    return digest.digest()


class RankSteps:
    """The steps of one rank, under one epoch at a time."""

    def __init__(self, parallel: Parallel, find_group: Callable[[int | None], RankGroup | None]) -> None:
        """`find_group`: finds the group of an epoch, which exists before its first step, or whichever was last."""
        self.silence = make_silence(parallel)
        self._parallel = parallel
        self._find_group = find_group
        self._group: RankGroup | None = None
        self._digest = StepDigest()

    def begin_epoch(self, epoch: int) -> None:
        """Takes the group of an epoch, and begins its digests."""
        self._group, self._digest = self._find_group(epoch), StepDigest()

    @property
    def ranks(self) -> Ranks:
        return self.silence if self._group is None else self._group

    def require_group(self) -> RankGroup:
        """Returns the current group, before any epoch; raises BlockyardError WRONG_STATE without a group."""
        group = self._find_group(None)
        if group is None:
            raise BlockyardError(Reason.WRONG_STATE, "the ranks compute together: form a group first")
        return group

    def run(self, step: Step, execute: Callable[[], StepOutput]) -> StepOutput:
        """Executes a step within its time limit, which begins now, and adds this rank's digests to the answer.

        Raises BlockyardError GROUP_BROKEN if the group was broken before or after, and WRONG_STATE without a group.
        """
        if self._group is None:
            raise BlockyardError(Reason.WRONG_STATE, f"no group was formed for epoch {step.epoch}")
        if step.step_id == 1 and self._parallel.pipeline_parallel_size > 1 and not step.ids_from_scheduler:
            raise BlockyardError(
                Reason.WRONG_STATE, "a pipeline stage sees no samples: the epoch must begin with ids_from_scheduler"
            )
        lifetime = self._group.lifetime
        with lifetime.work(step.timeout_seconds):
            result = execute()
            # An operation that was aborted may have left anything in its buffers, and said nothing.
            lifetime.require_whole()
            result.times.forward_seconds -= lifetime.waited_seconds
            result.times.stage_wait_seconds = lifetime.waited_seconds
        return self._as_rank(step, result)

    def on_inputs(self, step: Step, forward_batch: ForwardBatch) -> None:
        self._digest.add_inputs(step, forward_batch)

    def on_outputs(self, forward_batch: ForwardBatch, output: RunnerOutput) -> None:
        if self._parallel.is_last_stage:
            self._digest.add_outputs(forward_batch, output)

    def _as_rank(self, step: Step, result: StepOutput) -> StepOutput:
        digests = self._digest.inputs, self._digest.outputs if self._parallel.is_last_stage else 0
        if self._parallel.is_sampling_rank:
            return replace(result, digests=digests)
        return StepOutput(step.epoch, step.step_id, times=result.times, digests=digests)

    def is_silent(self, step: Step) -> bool:
        """Returns whether this rank sends no answer to a step that it did not refuse."""
        return step.quiet and not self._parallel.is_sampling_rank

    def on_refusal(self, refusal: BlockyardError) -> None:
        """Ends the group, so that no peer waits for a rank that has refused a step of the epoch."""
        if self._group is not None:
            self._group.lifetime.abort(f"rank {self._parallel.rank} refused a step: {refusal.message}")
