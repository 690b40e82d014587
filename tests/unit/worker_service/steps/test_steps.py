"""Steps driven by hand: any way of running a sequence gives the tokens of running it alone, at once."""

from __future__ import annotations

import pytest

from blockyard.errors import Reason, from_status
from blockyard.worker.v1 import worker_pb2 as pb
from tests.unit.worker_service.driver import StepDriver, WorkerDriver, new_sequence, pairs, sampling

PROMPT = list(range(5, 25))
# What a sequence may ask for, by name.
KINDS = {
    "greedy": {},
    "plain": {"temperature": 1.0, "seed": 11},
    "top_k": {"temperature": 0.8, "seed": 2**63 + 5, "top_k": 20},
    "top_p": {"temperature": 1.2, "seed": 3, "top_p": 0.9},
    "penalties": {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_p": 0.01},
    "bias": {"logit_bias": {7: 8.0, 9: -100.0}, "presence_penalty": 2.0},
}


async def alone(steps: StepDriver, sequence_id: int, num_tokens: int, **fields: object) -> list[int]:
    """Runs one prompt at once and then token by token, with nobody beside it, and forgets it."""
    new = new_sequence(sequence_id, PROMPT, [60, 61, 62, 63], **fields)
    first = await steps.sampled(new_sequences=[new], sequence_ids=[sequence_id], num_new_tokens=[len(PROMPT)])
    rest = await steps.decode(sequence_id, num_tokens - 1)
    await steps.step(finished_sequence_ids=[sequence_id])
    return [first[sequence_id], *rest]


async def test_a_prompt_in_pieces_gives_the_tokens_of_a_prompt_at_once(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    at_once = await alone(steps, 1, 9)
    assert len(set(at_once)) > 3
    new = new_sequence(2, PROMPT, [9, 8, 7, 6])
    assert await steps.sampled(new_sequences=[new], sequence_ids=[2], num_new_tokens=[7]) == {}
    assert await steps.sampled(sequence_ids=[2], num_new_tokens=[1]) == {}
    last = await steps.sampled(sequence_ids=[2], num_new_tokens=[12])
    assert [last[2], *await steps.decode(2, 8)] == at_once


async def test_sequences_of_every_kind_together_give_what_they_give_alone(worker: WorkerDriver) -> None:
    """Joining one after another, each prefilled in two pieces beside the decodes of the others."""
    steps = worker.open(1)
    params = [sampling(**fields) for fields in KINDS.values()]
    expected = [await alone(steps, 100 + i, 8, sampling=one) for i, one in enumerate(params)]
    assert len({tuple(tokens) for tokens in expected}) == len(KINDS)
    found: dict[int, list[int]] = {i: [] for i in range(len(params))}
    for turn in range(len(params) + 8):
        ids = [i for i in range(turn - 1, -1, -1) if i < len(params) and len(found[i]) < 8]
        pieces = [12 if i == turn - 1 else 1 for i in ids]
        new = []
        if turn < len(params):
            tables = list(range(1 + 4 * turn, 5 + 4 * turn))
            new.append(new_sequence(turn, PROMPT, tables, sampling=params[turn]))
            ids, pieces = [*ids, turn], [*pieces, 8]
        for sequence_id, token_id in (
            await steps.sampled(new_sequences=new, sequence_ids=ids, num_new_tokens=pieces)
        ).items():
            found[sequence_id].append(token_id)
    assert list(found.values()) == expected


@pytest.mark.parametrize("split", [True, False])
async def test_children_share_the_prompt_and_draw_by_their_own_index(worker: WorkerDriver, split: bool) -> None:
    steps = worker.open(1)
    params = sampling(temperature=1.0, seed=5)
    expected = [await alone(steps, 100 + i, 6, sampling=params, sequence_index=i) for i in range(3)]
    table = [1, 2, 3]
    forks = [pb.Fork(parent_sequence_id=1, child_sequence_id=1 + i, sequence_index=i, block_ids=table) for i in (1, 2)]
    new = [new_sequence(1, PROMPT, table, sampling=params)]
    if split:
        await steps.step(new_sequences=new, sequence_ids=[1], num_new_tokens=[19])
        new = []
    found = {1: [], 2: [], 3: []}
    firsts = await steps.sampled(
        new_sequences=new, forks=forks, sequence_ids=[1, 2, 3], num_new_tokens=[1 if split else 20, 0, 0]
    )
    # The children's first writes go into a shared last block, of which they get copies.
    tables = [pb.BlockTable(sequence_id=i, block_ids=[1, 2, last, 10 + i]) for i, last in ((2, 4), (3, 5))]
    changes = {
        "replaced_tables": tables,
        "blocks_to_copy": pairs((3, 4), (3, 5)),
        "appended_sequence_ids": [1],
        "appended_block_ids": [20],
    }
    for sequence_id, token_id in firsts.items():
        found[sequence_id].append(token_id)
    for ids in ([1, 2, 3], [3, 1], [2], [3, 2, 1], [1, 2], [2, 3, 1], [3]):
        sampled = await steps.sampled(sequence_ids=ids, num_new_tokens=[1] * len(ids), **changes)
        changes = {}
        for sequence_id, token_id in sampled.items():
            found[sequence_id].append(token_id)
    # All draws of the first five steps but those that a sequence sat out.
    assert [found[i][:5] for i in (1, 2, 3)] == [tokens[:5] for tokens in expected]
    assert [len(found[i]) for i in (1, 2, 3)] == [6, 6, 6]
    assert [found[i] for i in (1, 2, 3)] == expected


async def test_a_restart_draws_the_same_tokens_again(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    params = sampling(temperature=1.0, seed=8, frequency_penalty=0.6)
    expected = await alone(steps, 100, 10, sampling=params)
    new = new_sequence(1, PROMPT, [1, 2, 3, 4], sampling=params)
    first = await steps.sampled(new_sequences=[new], sequence_ids=[1], num_new_tokens=[20])
    found = [first[1], *await steps.decode(1, 3)]
    again = new_sequence(1, [*PROMPT, *found], [7, 6, 5, 8], sampling=params, prompt_length=20)
    response = await steps.sampled(
        finished_sequence_ids=[1], new_sequences=[again], sequence_ids=[1], num_new_tokens=[24]
    )
    assert [*found, response[1], *await steps.decode(1, 5)] == expected


async def test_cached_tokens_need_not_be_computed(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    expected = await alone(steps, 100, 4)
    await steps.step(new_sequences=[new_sequence(1, PROMPT, [1, 2, 3])], sequence_ids=[1], num_new_tokens=[20])
    cached = new_sequence(2, PROMPT, [1, 2, 9], num_computed_tokens=16)
    first = await steps.sampled(new_sequences=[cached], sequence_ids=[2], num_new_tokens=[4])
    assert [first[2], *await steps.decode(2, 3)] == expected


async def test_a_stop_token_makes_the_row_a_no_op(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    expected = await alone(steps, 100, 6)
    stop = expected[2]
    where = expected.index(stop)
    new = [
        new_sequence(1, PROMPT, [1, 2, 3, 4], stop_token_ids=[stop]),
        new_sequence(2, PROMPT, [5, 6, 7, 8]),
    ]
    firsts = await steps.sampled(new_sequences=new, sequence_ids=[1, 2], num_new_tokens=[20, 20])
    found = [firsts[1]]
    for _ in range(where):
        found.append((await steps.sampled(sequence_ids=[1, 2], num_new_tokens=[1, 1]))[1])
    assert found[-1] == stop
    before = await worker.checksums(device=[1, 2, 3, 4])
    for _ in range(3):
        response = await steps.step(sequence_ids=[1, 2], num_new_tokens=[1, 1])
        assert (response.skipped_sequence_ids, response.sequence_ids) == ([1], [2])
    assert await worker.checksums(device=[1, 2, 3, 4]) == before


async def test_a_stop_token_is_masked_and_then_awaited(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    stop = (await alone(steps, 100, 1))[0]
    expected = await alone(steps, 101, 5, sampling=sampling(logit_bias={stop: -100.0}))
    masked = await alone(steps, 102, 5, stop_token_ids=[stop], min_tokens=5)
    assert masked == expected
    new = new_sequence(1, PROMPT, [1, 2, 3], stop_token_ids=[stop])
    assert (await steps.sampled(new_sequences=[new], sequence_ids=[1], num_new_tokens=[20]))[1] == stop
    assert (await steps.step(sequence_ids=[1], num_new_tokens=[1])).skipped_sequence_ids == [1]


async def test_a_row_whose_logits_are_not_finite_fails_alone(worker: WorkerDriver) -> None:
    """Its cache is spoiled with what is not a number; its neighbour goes on as if alone."""
    steps = worker.open(1)
    expected = await alone(steps, 100, 5)
    new = [new_sequence(1, PROMPT, [1, 2, 3]), new_sequence(2, PROMPT, [4, 5, 6])]
    found = [(await steps.sampled(new_sequences=new, sequence_ids=[1, 2], num_new_tokens=[20, 20]))[2]]
    executor = worker.server.worker.set_up.executor
    assert executor is not None
    executor.cache.device_pool[2] = float("nan")
    response = await steps.step(sequence_ids=[1, 2], num_new_tokens=[1, 1])
    assert [failure.sequence_id for failure in response.failures] == [1]
    assert from_status(response.failures[0].status).reason is Reason.NOT_FINITE
    assert response.sequence_ids == [2]
    found.append(response.token_ids[0])
    response = await steps.step(sequence_ids=[1, 2], num_new_tokens=[1, 1])
    assert (response.skipped_sequence_ids, response.sequence_ids) == ([1], [2])
    assert [*found, response.token_ids[0], *await steps.decode(2, 2)] == expected
    # Its blocks serve others at once.
    anew = new_sequence(3, PROMPT, [2, 1, 3])
    first = await steps.sampled(finished_sequence_ids=[1], new_sequences=[anew], sequence_ids=[3], num_new_tokens=[20])
    assert [first[3], *await steps.decode(3, 4)] == expected


async def test_times_are_told(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    new = new_sequence(1, PROMPT, [1, 2, 3])
    response = await steps.step(new_sequences=[new], sequence_ids=[1], num_new_tokens=[20])
    assert response.times.forward.ToNanoseconds() > 0
    assert response.times.sample.ToNanoseconds() > 0
    assert response.times.queue.ToNanoseconds() >= 0
    copied = await steps.step(blocks_to_copy=pairs((1, 9)))
    assert copied.times.cache_operations.ToNanoseconds() > 0
    assert copied.times.sample.ToNanoseconds() == 0


async def test_a_sequence_that_was_swapped_out_and_in_goes_on(worker: WorkerDriver) -> None:
    steps = worker.open(1)
    params = sampling(temperature=0.9, seed=21)
    expected = await alone(steps, 100, 8, sampling=params)
    new = new_sequence(1, PROMPT, [1, 2, 3], sampling=params)
    first = await steps.sampled(new_sequences=[new], sequence_ids=[1], num_new_tokens=[20])
    found = [first[1], *await steps.decode(1, 3)]
    # Another sequence takes its blocks in the very step in which they are swapped out.
    other = new_sequence(2, PROMPT[::-1], [3, 2, 1])
    await steps.step(
        blocks_to_swap_out=pairs((1, 4), (2, 0), (3, 7)),
        new_sequences=[other],
        sequence_ids=[2],
        num_new_tokens=[20],
    )
    await steps.decode(2, 2)
    back = [pb.BlockTable(sequence_id=1, block_ids=[10, 11, 12])]
    response = await steps.sampled(
        blocks_to_swap_in=pairs((4, 10), (0, 11), (7, 12)),
        replaced_tables=back,
        sequence_ids=[2, 1],
        num_new_tokens=[1, 1],
    )
    found.append(response[1])
    grown = await steps.sampled(
        sequence_ids=[1], num_new_tokens=[1], appended_sequence_ids=[1], appended_block_ids=[13]
    )
    assert [*found, grown[1], *await steps.decode(1, 2)] == expected
