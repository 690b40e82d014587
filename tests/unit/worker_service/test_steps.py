"""Steps driven by hand: any way of running a sequence gives the tokens of running it alone, at once."""

from __future__ import annotations

from tests.unit.worker_service.driver import WorkerDriver, new_sequence

PROMPT = list(range(5, 25))


async def test_a_prompt_in_pieces_gives_the_tokens_of_a_prompt_at_once(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    first = await steps.sampled(
        new_sequences=[new_sequence(1, PROMPT, [1, 2, 3, 4])], sequence_ids=[1], num_new_tokens=[20]
    )
    rest = await steps.decode(1, 8)
    at_once = [first[1], *rest]
    assert len(set(at_once)) > 3
    new = new_sequence(2, PROMPT, [9, 8, 7, 6])
    assert await steps.sampled(new_sequences=[new], sequence_ids=[2], num_new_tokens=[7]) == {}
    assert await steps.sampled(sequence_ids=[2], num_new_tokens=[1]) == {}
    last = await steps.sampled(sequence_ids=[2], num_new_tokens=[12])
    assert [last[2], *await steps.decode(2, 8)] == at_once
