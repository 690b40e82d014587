"""Drafts over a real socket: what the scheduler asks for, what it is told, and what a decode cost at warm-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.unit.worker_service.driver import StepDriver, WorkerDriver, fails, new_sequence, sampling

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.worker.v1 import worker_pb2 as pb

PROMPT = list(range(5, 25))
TABLE = [1, 2, 3, 4, 5, 6, 7]
LENGTH = 44


async def start(worker: WorkerDriver, **fields: object) -> tuple[StepDriver, list[int]]:
    """Starts a sequence in a new epoch -> (its stream, its first token)."""
    stream = worker.open((await worker.info()).epoch + 1)
    new = new_sequence(1, PROMPT, TABLE, max_length=LENGTH, **fields)
    first = await stream.sampled(new_sequences=[new], sequence_ids=[1], num_new_tokens=[len(PROMPT)])
    return stream, [first[1]]


async def draft(stream: StepDriver, allowed: int) -> pb.ExecuteModelResponse:
    return await stream.step(sequence_ids=[1], num_new_tokens=[1], max_draft_tokens=[allowed])


async def test_an_answer_tells_the_tokens_of_each_sequence(fresh_worker: WorkerDriver, model: Path) -> None:
    await fresh_worker.prepare(model, max_draft_tokens=6, max_draft_rows=12)
    stream, alone = await start(fresh_worker)
    alone += await stream.decode(1, LENGTH - len(PROMPT) - 1)
    predicted = sampling(predicted_token_ids=[*PROMPT[-2:], *alone], logprobs=1)
    stream, found = await start(fresh_worker, sampling=predicted)
    found += (await stream.sampled(sequence_ids=[1], num_new_tokens=[1])).values()
    num_drafted = num_accepted = 0
    while len(found) < len(alone):
        answer = await draft(stream, 6)
        counts = list(answer.num_tokens) or [1]
        assert sum(counts) == len(answer.token_ids) == len(answer.logprob_sequence_ids)
        assert answer.num_accepted_tokens == counts[0] - 1
        # All drafts stand in what the request predicts, behind the same ids.
        expected = (
            ([1], [answer.num_draft_tokens], [answer.num_accepted_tokens]) if answer.num_draft_tokens else ([],) * 3
        )
        told = answer.predicted_sequence_ids, answer.num_predicted_tokens, answer.num_accepted_predicted_tokens
        assert tuple(map(list, told)) == expected
        found += answer.token_ids
        num_drafted, num_accepted = num_drafted + answer.num_draft_tokens, num_accepted + answer.num_accepted_tokens
    assert found == alone
    assert num_accepted > 10
    assert num_drafted >= num_accepted
    late = await draft(stream, 6)
    assert (list(late.sequence_ids), list(late.skipped_sequence_ids)) == ([], [1])


async def test_drafts_of_the_prompt_are_no_predictions(fresh_worker: WorkerDriver, model: Path) -> None:
    await fresh_worker.prepare(model, max_draft_tokens=6, max_draft_rows=12)
    prompt = PROMPT[:4] * 5
    stream = fresh_worker.open((await fresh_worker.info()).epoch + 1)
    new = new_sequence(1, prompt, TABLE, max_length=LENGTH, sampling=sampling(predicted_token_ids=[60, 61, 62]))
    await stream.sampled(new_sequences=[new], sequence_ids=[1], num_new_tokens=[len(prompt)])
    answers = [await draft(stream, 6) for _ in range(8)]
    assert not any(answer.predicted_sequence_ids for answer in answers)


async def test_a_request_may_refuse_drafts(fresh_worker: WorkerDriver, model: Path) -> None:
    await fresh_worker.prepare(model, max_draft_tokens=6, max_draft_rows=12)
    stream, alone = await start(fresh_worker)
    alone += await stream.decode(1, LENGTH - len(PROMPT) - 1)
    refusing = sampling(predicted_token_ids=[*PROMPT[-2:], *alone], speculation=False)
    stream, found = await start(fresh_worker, sampling=refusing)
    while len(found) < len(alone):
        answer = await draft(stream, 6)
        assert not answer.num_draft_tokens
        found += answer.token_ids
    assert found == alone


async def test_a_worker_that_drafts_tells_what_decodes_cost(fresh_worker: WorkerDriver, model: Path) -> None:
    cache = await fresh_worker.prepare(model, max_draft_tokens=6, max_draft_rows=12)
    assert list(cache.decode_rows) == [1, 2, 4, 6, 8, 12, 16, 24]
    assert len(cache.decode_seconds) == len(cache.decode_rows)
    assert min(cache.decode_seconds) > 0
    info = (await fresh_worker.info()).cache
    assert list(info.decode_seconds) == list(cache.decode_seconds)


async def test_a_worker_that_does_not_draft_measures_nothing(worker: WorkerDriver) -> None:
    assert not (await worker.info()).cache.decode_rows


async def test_more_drafts_of_one_sequence_than_of_all_are_refused(fresh_worker: WorkerDriver, model: Path) -> None:
    await fresh_worker.load(model)
    refusal = await fails(fresh_worker.initialize_cache(max_draft_tokens=6, max_draft_rows=5))
    assert "max_draft_tokens" in str(refusal.violations)
