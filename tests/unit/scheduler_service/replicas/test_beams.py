"""Beam search as a gateway sees it: nothing until the end, then the best with their scores; also after a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.sampling import BeamSearch, EarlyStopping
from scheduler_service.core.values import GroupSpec
from tests.kit.oracles.model_worker import search_alone
from tests.kit.oracles.token_oracle import VOCAB, oracle, until_idle

if TYPE_CHECKING:
    from tests.unit.scheduler_service.conftest import Harness

BEAMS = sampling_pb2.BeamSearch(width=4, length_penalty=0.5, early_stopping=sampling_pb2.EARLY_STOPPING_NEVER)
STOP_TOKEN_IDS = (3, 50, 77)


def truth(prompt: list[int], max_tokens: int, n: int) -> list[tuple[list[int], float]]:
    """The best of the search, alone: ids and scores."""
    beams = BeamSearch(4, 0.5, EarlyStopping.NEVER)
    spec = GroupSpec("", "", tuple(prompt), n, max_tokens, 0, frozenset(STOP_TOKEN_IDS), beams=beams)
    found = search_alone(spec, max_model_len=4096, vocab_size=VOCAB)
    return [(best.token_ids, best.score) for best in found[:n]]


async def test_a_search_beside_others_gives_what_it_gives_alone(harness: Harness) -> None:
    await harness.worker()
    server, client = await harness.scheduler(), await harness.client()
    sampled = await client.add("sampled", [2] * 20, n=2, max_tokens=60)
    searches = [
        await client.add(f"s{n}", [n] * 18, n=n, max_tokens=40, stop_token_ids=STOP_TOKEN_IDS, beam_search=BEAMS)
        for n in (1, 3)
    ]
    for n, search in zip((1, 3), searches, strict=True):
        expected = truth([n] * 18, 40, n)
        assert await client.result(search) == [token_ids for token_ids, _ in expected]
        assert search.scores == dict(enumerate(score for _, score in expected))
    assert await client.result(sampled) == oracle([2] * 20, 60, n=2)
    assert not sampled.scores
    await until_idle(server)


async def test_a_search_outlives_its_worker(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.002)
    server, client = await harness.scheduler(), await harness.client()
    search = await client.add("s", [1] * 18, n=2, max_tokens=60, stop_token_ids=STOP_TOKEN_IDS, beam_search=BEAMS)
    beside = await client.add("beside", [2] * 18, max_tokens=60)
    await client.wait_until(lambda: len(beside.token_ids[0]) > 10)
    await worker.kill()
    await harness.worker()
    assert await client.result(search) == [token_ids for token_ids, _ in truth([1] * 18, 60, 2)]
    assert len(search.recovered) == 1
    assert await client.result(beside) == oracle([2] * 18, 60)
    await until_idle(server)


async def test_a_search_is_told_again_with_its_scores(harness: Harness) -> None:
    await harness.worker()
    await harness.scheduler()
    client, other = await harness.client(), await harness.client("other")
    search = await client.add("s", [1] * 18, n=3, max_tokens=20, stop_token_ids=STOP_TOKEN_IDS, beam_search=BEAMS)
    await client.result(search)
    again = await other.read_again("s", n=3)
    assert await other.result(again) == search.token_ids
    assert again.scores == search.scores


async def test_a_search_that_began_at_a_scheduler_before_begins_anew(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    client = harness.gateway("gateway")
    async with harness.running_scheduler(), client:
        await client.wait_until_ready()
        search = await client.add("s", [1] * 18, n=2, max_tokens=60, stop_token_ids=STOP_TOKEN_IDS, beam_search=BEAMS)
        await client.wait_until(lambda: search.num_cached_tokens is not None)
    await harness.scheduler()
    second = await harness.client("second")
    assert await second.result(await second.resubmit(search)) == [ids for ids, _ in truth([1] * 18, 60, 2)]
