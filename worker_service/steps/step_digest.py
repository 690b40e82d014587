"""Digests of an epoch's steps, by which the ranks of a group prove that they received and computed the same.

A digest is a chain: it depends on every step of the epoch so far. So whole block tables need not be hashed, but only
what changes them.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy.typing as npt

    from worker_service.batch.forward_batch import ForwardBatch
    from worker_service.runner.model_runner import RunnerOutput
    from worker_service.step import Step

    Column = Sequence[int] | npt.NDArray[np.generic]

DIGEST_BYTES = 8
FAILED = -1


class StepDigest:
    """The two chains of one epoch: of the inputs of each step, as this rank resolved them, and of sampled tokens."""

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
        # The token of a failed row has no meaning.
        token_ids = np.where(sampled.failed, FAILED, sampled.token_ids)
        columns = (token_ids, output.candidates.failed, forward_batch.layout.skipped_ids)
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
    for new in step.new_sequences:
        yield new.sequence_id, new.lora_id
        yield new.block_ids
    for fork in step.forks:
        yield fork.parent_id, fork.child_id
        yield fork.block_ids


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
