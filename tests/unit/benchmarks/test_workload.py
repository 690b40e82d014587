"""Batches of requests: repeatable, within the vocabulary, and without common prefixes."""

import itertools

import pytest

from benchmarks.kit.workload import FIRST_TOKEN_ID, FreshWorkloads, Workload, measure_rate

WORKLOAD = Workload(num_requests=5, num_prompt_tokens=64, num_output_tokens=7, vocab_size=1000)


def test_prompts_have_their_number_and_length():
    prompts = WORKLOAD.prompts()
    assert [len(prompt) for prompt in prompts] == [64] * 5
    assert all(FIRST_TOKEN_ID <= token_id < 1000 for prompt in prompts for token_id in prompt)
    assert WORKLOAD.num_tokens == 35


def test_the_same_seed_gives_the_same_prompts():
    assert WORKLOAD.prompts() == Workload(5, 64, 7, 1000).prompts()


def test_fresh_batches_share_no_block():
    workloads = FreshWorkloads(1000)
    batches = [*itertools.islice(workloads.of(5, 64, 7), 3), *itertools.islice(workloads.of(2, 64, 9), 3)]
    firsts = [tuple(prompt[:16]) for batch in batches for prompt in batch.prompts()]
    assert len(set(firsts)) == len(firsts) == 3 * 5 + 3 * 2


@pytest.mark.parametrize(("seconds", "num_batches"), [(0.0, 1), (3.0, 2), (4.1, 3)])
async def test_rates_are_of_whole_batches(seconds, num_batches):
    done = []

    async def run(workload):
        done.append(workload)
        return 2.0

    assert await measure_rate(FreshWorkloads(1000).of(5, 64, 7), run, seconds) == 35 / 2.0
    assert len(done) == num_batches
