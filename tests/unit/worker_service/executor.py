"""Drives a step executor with a tiny model, without a socket."""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from blockyard_kernels.capture import CaptureSizes
from worker_service.batch.input_batch import InputBatch
from worker_service.batch.rows import BatchLimits
from worker_service.cache_engine import BlockFormat, CacheEngine
from worker_service.drafting.drafter import Drafter
from worker_service.grammars.matchers import make_grammars
from worker_service.runner.pooling_runner import make_runner
from worker_service.step import NewRow, Step
from worker_service.steps.step_executor import StepExecutor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.sampling import SamplingParams
    from blockyard_kernels.drafting import DraftingOps
    from worker_service.lora.slots import AdapterSlots
    from worker_service.models.loader import RunnableModel
    from worker_service.step import Logprobs, StepOutput
    from worker_service.steps.rank_steps import RankSteps

BLOCK_SIZE = 8
MAX_DRAFT_TOKENS, MAX_DRAFT_ROWS = 6, 24


def make_executor(
    loaded: RunnableModel,
    *,
    num_device_blocks: int = 64,
    num_host_blocks: int = 4,
    max_model_len: int = 96,
    max_captured_tokens: int = 0,
    ranks: RankSteps | None = None,
    is_invariant: bool = True,
    slots: AdapterSlots | None = None,
    drafting: DraftingOps | None = None,
) -> StepExecutor:
    """An executor of a loaded model, which replays steps of up to so many tokens where its backend can.

    `drafting`: from where it drafts, if it does.
    """
    runner = make_runner(loaded, slots)
    if ranks is not None:
        runner.join(ranks.silence)
    assert runner.prove_batch_invariance() == is_invariant
    cache = CacheEngine(BlockFormat.of(loaded.model, BLOCK_SIZE), num_device_blocks, num_host_blocks, loaded.backend)
    # Whatever an earlier owner left behind must not matter.
    cache.device_pool.fill_(float("nan"))
    if max_captured_tokens:
        loaded.model.reserve_positions(max_model_len)
        sizes = CaptureSizes(max_captured_tokens, 4, BLOCK_SIZE, loaded.config.sliding_window, max_model_len)
        runner.capture(cache.device_pool, sizes)
    drafts = (MAX_DRAFT_TOKENS, MAX_DRAFT_ROWS) if drafting else (0, 0)
    windows = loaded.model.kv_groups.windows
    limits = BatchLimits.of(loaded.config, windows, max_model_len, 16, BLOCK_SIZE, 1000, drafts)
    drafter = Drafter(drafting, follows_grammars=ranks is None) if drafting else None
    return StepExecutor(InputBatch(limits, make_grammars(loaded), drafter), cache, runner, ranks)


def new_sequence(
    sequence_id: int, token_ids: Sequence[int], block_ids: Sequence[int], sampling: SamplingParams, **fields: Any
) -> NewRow:
    """A sequence that starts; all that is known of it is its prompt unless told otherwise."""
    fields = {"sequence_index": 0, "prompt_length": len(token_ids), "num_computed_tokens": 0} | fields
    return NewRow(
        sequence_id,
        token_ids=np.array(token_ids, np.int64),
        block_ids=np.array(block_ids, np.int64),
        sampling=sampling,
        **fields,
    )


def candidates_of(logprobs: Logprobs) -> list[list[tuple[int, float, int]]]:
    """Gives each token's candidates: (id, log probability, rank), and rank 0 where there are none."""
    ranks = logprobs.ranks.tolist() or [0] * len(logprobs.token_ids)
    flat = iter(zip(logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), ranks, strict=True))
    rows = [list(islice(flat, count)) for count in logprobs.num_candidates.tolist()]
    assert next(flat, None) is None
    return rows


class Epoch:
    """Numbers the steps of an epoch."""

    def __init__(self, executor: StepExecutor, epoch: int) -> None:
        self._executor = executor
        self._epoch = epoch
        self._step_id = 0
        executor.begin_epoch(epoch)

    def make(self, **fields: Any) -> Step:
        """Makes the next step. Columns may be lists; `work` are pairs of sequence ids and counts."""
        work = fields.pop("work", ())
        inputs = fields.pop("inputs", ())
        self._step_id += 1
        return Step(
            self._epoch,
            self._step_id,
            sequence_ids=tuple(sequence_id for sequence_id, _ in work),
            num_new_tokens=np.array([count for _, count in work], np.int64),
            input_sequence_ids=tuple(sequence_id for sequence_id, _ in inputs),
            input_token_ids=np.array([token_id for _, token_id in inputs], np.int64),
            **fields,
        )

    def answer(self, **fields: Any) -> StepOutput:
        """Executes a step, refused or not; see `make`."""
        return self._executor.execute(self.make(**fields), time.perf_counter())

    def execute(self, **fields: Any) -> StepOutput:
        """Executes a step that must be taken."""
        result = self.answer(**fields)
        assert result.refusal is None, result.refusal
        return result
