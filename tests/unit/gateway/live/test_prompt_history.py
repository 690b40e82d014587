"""Which prompts were computed again, and why."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace
from typing import Any

import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.admin.misses import CAUSES
from blockyard.contract.sampling import SamplingParams
from blockyard.contract.scheduling import Adapter, Submission
from gateway.live.prompt_history import MissCause, PastPrompt, find_misses

BLOCK = 4
SUBMISSION = Submission("", array("I"), 1, SamplingParams(), 5, 0, ())


def past(
    arrived_at: float,
    prompt: list[int],
    *,
    answer: tuple[int, ...] = (90,),
    cached: int = 0,
    computed_at: float | None = None,
    **fields: Any,
) -> PastPrompt:
    submission = replace(SUBMISSION, request_id=f"r{arrived_at:g}", prompt_token_ids=array("I", prompt), **fields)
    computed_at = arrived_at + 0.5 if computed_at is None else computed_at
    return PastPrompt(submission, array("I", answer), cached, arrived_at, computed_at)


def explained(*prompts: PastPrompt) -> list[tuple[str, MissCause, str, int]]:
    return [
        (miss.prompt.submission.request_id, miss.cause, miss.earlier.submission.request_id, miss.num_common_tokens)
        for miss in find_misses(prompts, BLOCK)
        if miss.earlier is not None
    ]


FIRST = past(0, [*range(10)])


def test_a_conversation_that_goes_on_is_no_miss() -> None:
    answered = past(0, [*range(10)], answer=(20, 21, 22))
    # Of 13 tokens the last has no row, so that three blocks are kept.
    assert explained(answered, past(1, [*range(10), 20, 21, 22, 30, 31, 32], cached=12)) == []


def test_one_of_which_less_was_found() -> None:
    answered = past(0, [*range(10)], answer=(20, 21, 22))
    later = past(1, [*range(10), 20, 21, 22, 30, 31, 32], cached=8)
    assert explained(answered, later) == [("r1", MissCause.NOT_KEPT, "r0", 13)]


def test_the_last_token_of_a_prompt_is_computed_each_time() -> None:
    whole = past(0, [*range(8)])
    assert explained(whole, past(1, [*range(8)], cached=7)) == []
    assert explained(whole, past(1, [*range(8)], cached=4)) == [("r1", MissCause.NOT_KEPT, "r0", 8)]


def test_one_that_parts() -> None:
    assert explained(FIRST, past(1, [*range(6), 50, 51, 52, 53], cached=4)) == [("r1", MissCause.PARTED, "r0", 6)]
    # Within the first block.
    assert explained(FIRST, past(1, [0, 1, 50, *range(3, 10)])) == [("r1", MissCause.PARTED, "r0", 2)]
    # From the first token on they have nothing to do with each other.
    assert explained(FIRST, past(1, [50, *range(1, 10)])) == []


def test_it_is_compared_with_the_last_of_those_that_share_most() -> None:
    long = past(1, [*range(8), 60, 61, 62, 63], cached=8)
    short = past(2, [*range(4), 70, 71, 72, 73], cached=4)
    last = past(3, [*range(8), 60, 80, 81, 82], cached=8)
    assert explained(FIRST, long, short, last)[-1] == ("r3", MissCause.PARTED, "r1", 9)


def test_one_beside_it() -> None:
    running = past(0, [*range(10)], computed_at=2.0)
    assert explained(running, past(1, [*range(10)])) == [("r1", MissCause.AT_ONCE, "r0", 10)]


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"tenant": "b", "cache_salt": b"b"}, MissCause.OTHER_TENANT),
        ({"tenant": "a", "cache_salt": b"b"}, MissCause.OTHER_SALT),
        ({"tenant": "a", "cache_salt": b"a", "lora": Adapter(3, "sql", "/sql")}, MissCause.OTHER_ADAPTER),
    ],
)
def test_one_that_may_not_share(fields: dict[str, Any], cause: MissCause) -> None:
    first = past(0, [*range(10)], tenant="a", cache_salt=b"a")
    assert explained(first, past(1, [*range(10)], **fields)) == [("r1", cause, "r0", 10)]
    # It is no reason where its own were found.
    again = past(2, [*range(10)], cached=8, **fields)
    assert [miss.prompt.submission.request_id for miss in find_misses([first, again], BLOCK)] == []


def test_one_that_needs_its_whole_prompt() -> None:
    sampling = replace(SUBMISSION.sampling, prompt_logprobs=1)
    [miss] = find_misses([past(0, [*range(10)], sampling=sampling)], BLOCK)
    assert (miss.cause, miss.earlier) == (MissCause.WHOLE_PROMPT, None)


def common(one: PastPrompt, other: PastPrompt) -> int:
    pairs = zip(one.submission.prompt_token_ids, other.token_ids, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(one.num_tokens, len(other.token_ids)))


def num_kept_blocks(one: PastPrompt, other: PastPrompt) -> int:
    return min(common(one, other), len(other.token_ids) - 1) // BLOCK


def test_each_shares_as_many_blocks_with_it_as_with_any() -> None:
    """Compared with a search of all pairs."""
    rng = random.Random(5)
    for _ in range(200):
        prompts = [
            past(number, [rng.choice((1, 2)) for _ in range(rng.randrange(1, 30))], answer=(1, 2), cached=0)
            for number in range(12)
        ]
        misses = {miss.prompt.arrived_at: miss for miss in find_misses(prompts, BLOCK)}
        for number, prompt in enumerate(prompts):
            most = max((num_kept_blocks(prompt, earlier) for earlier in prompts[:number]), default=0)
            if most and prompt.num_tokens > 1:
                miss = misses[number]
                assert miss.earlier is not None
                assert miss.num_common_tokens == common(prompt, miss.earlier)
                assert num_kept_blocks(prompt, miss.earlier) == most


def test_every_cause_has_a_name_on_the_wire_and_a_sentence() -> None:
    names = {f"MISS_CAUSE_{cause.name}" for cause in MissCause} | {"MISS_CAUSE_UNSPECIFIED"}
    assert set(admin_pb2.MissCause.keys()) == names
    assert {admin_pb2.MissCause.Name(cause) for cause in CAUSES} == names - {"MISS_CAUSE_UNSPECIFIED"}
