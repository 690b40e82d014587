"""Makes the answers of steps from their results. Knows no rows and no epochs."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from blockyard.errors import BlockyardError, Reason
from worker_service.step import Pooled, Step, StepOutput, StepTimes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard_kernels.sampling import Flags
    from worker_service.batch.forward_batch import ForwardBatch
    from worker_service.batch.row_requests import RowRequests
    from worker_service.grammars.matchers import GrammarState
    from worker_service.runner.model_runner import RunnerOutput
    from worker_service.sampling.sampler import BeamCandidates, Sampled


def make_result(
    step: Step, forward_batch: ForwardBatch, output: RunnerOutput, times: StepTimes, skipped: Flags | None = None
) -> StepOutput:
    """Makes the answer to a step from its results.

    Args:
        step: the executed step.
        forward_batch: the step's forward batch.
        output: the output of the network and the sampler.
        times: the times of the step's parts.
        skipped: [R], whether a sampled row does not count, since it had ended before; such a row has not failed.
    """
    sampled, candidates, layout = output.sampled, output.candidates, forward_batch.layout
    sequence_ids, token_ids, beam_ids = layout.sampled.sequence_ids, sampled.token_ids, layout.beams.sequence_ids
    failures: tuple[tuple[int, BlockyardError], ...] = ()
    dropped, skipped_ids = sampled.failed, layout.skipped_ids
    if skipped is not None and np.count_nonzero(skipped):
        dropped, skipped_ids = dropped | skipped, (*skipped_ids, *layout.sampled.ids(skipped))
    num_tokens: tuple[int, ...] = () if sampled.counts is None else tuple(sampled.counts.tolist())
    if np.count_nonzero(dropped) or np.count_nonzero(candidates.failed):
        failures = (*_failures(layout.sampled, sampled), *_failures(layout.beams, candidates))
        sequence_ids = layout.sampled.ids(~dropped)
        if sampled.counts is None:
            token_ids = token_ids[~dropped]
        else:
            num_tokens = tuple(sampled.counts[~dropped].tolist())
        beam_ids = layout.beams.ids(~candidates.failed)
    pooled, lost = _split(output.pooled)
    failures = (*failures, *((sequence_id, _not_finite("the pooled values are")) for sequence_id in lost))
    if forward_batch.rejections:
        rejected = {sequence_id for sequence_id, _ in forward_batch.rejections}
        skipped_ids = tuple(sequence_id for sequence_id in skipped_ids if sequence_id not in rejected)
        failures = (*failures, *forward_batch.rejections)
    forced, predictions = _count_sources(forward_batch, sampled, dropped)
    return StepOutput(
        step.epoch,
        step.step_id,
        sequence_ids,
        tuple(token_ids.tolist()),
        skipped_ids,
        failures,
        logprob_sequence_ids=_with_logprobs(layout.sampled, sampled),
        logprobs=sampled.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        beam_sequence_ids=beam_ids,
        beam_candidates=candidates.logprobs,
        pooled=pooled,
        times=times,
        num_tokens=num_tokens,
        num_draft_tokens=0 if layout.runs is None else int(layout.runs.num_drafts.sum()),
        num_accepted_tokens=0 if sampled.counts is None else int(np.maximum(sampled.counts - 1, 0).sum()),
        num_forced_tokens=forced[0],
        num_accepted_forced_tokens=forced[1],
        predictions=predictions,
    )


def _count_sources(
    forward_batch: ForwardBatch, sampled: Sampled, dropped: Flags
) -> tuple[tuple[int, int], tuple[tuple[int, int, int], ...]]:
    """Counts the drafts, and the right ones, that grammars force, and by sequence those that requests predict."""
    runs, proposal = forward_batch.layout.runs, forward_batch.proposal
    if runs is None or proposal is None or sampled.counts is None:
        return (0, 0), ()
    owners = np.flatnonzero(runs.num_drafts)
    num_right = np.maximum(sampled.counts[owners] - 1, 0)
    forced = int(proposal.num_forced.sum()), int(np.minimum(num_right, proposal.num_forced).sum())
    counts = np.stack([proposal.num_drafts, num_right]) - proposal.num_forced
    places = np.flatnonzero(proposal.are_predicted & ~dropped[owners])
    ids = [forward_batch.layout.sampled.sequence_ids[owner] for owner in owners[places].tolist()]
    return forced, tuple(zip(ids, *np.maximum(counts[:, places], 0).tolist(), strict=True))


def _with_logprobs(requests: RowRequests, sampled: Sampled) -> tuple[int, ...]:
    """Returns the sequence of each token that has log probabilities."""
    if sampled.counts is None:
        return requests.ids(sampled.has_logprobs)
    owners = np.arange(len(requests)).repeat(sampled.counts)[sampled.has_logprobs]
    return tuple(requests.sequence_ids[owner] for owner in owners.tolist())


def _failures(requests: RowRequests, output: Sampled | BeamCandidates) -> Iterator[tuple[int, BlockyardError]]:
    if not np.count_nonzero(output.failed):
        return
    for sequence_id in requests.ids(output.failed & ~output.finite):
        yield sequence_id, _not_finite("the model's logits are")
    for place in np.flatnonzero(output.failed & output.finite).tolist():
        yield requests.sequence_ids[place], _no_token(requests.lists[place].grammar)


def _no_token(grammar: GrammarState | None) -> BlockyardError:
    if grammar is None:
        message = "no token is possible here: allowed_token_ids, bad_words and min_tokens together exclude every token"
        return BlockyardError(Reason.NO_TOKEN_POSSIBLE, message)
    message = "no token is possible here: allowed_token_ids or bad_words forbid what the grammar needs next"
    return grammar.failure or BlockyardError(Reason.GRAMMAR_DEAD_END, message)


def _not_finite(what: str) -> BlockyardError:
    message = f"{what} not finite numbers: the model's weights may be damaged, or too large for the dtype"
    return BlockyardError(Reason.NOT_FINITE, message)


def _split(pooled: Pooled) -> tuple[Pooled, tuple[int, ...]]:
    """Removes the sequences with numbers that are not finite, and returns the rest and the ids of the removed ones."""
    is_finite = [bool(np.isfinite(values).all()) for values in pooled.values]
    if all(is_finite):
        return pooled, ()
    kept = tuple(compress(pooled.sequence_ids, is_finite)), tuple(compress(pooled.values, is_finite))
    return Pooled(*kept), tuple(compress(pooled.sequence_ids, [not good for good in is_finite]))
