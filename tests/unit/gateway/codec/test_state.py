from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.contract.codec.scheduling import encode_submission
from blockyard.contract.request import OnDisconnect, OnUpdate
from blockyard.contract.sampling import BeamSearch, SamplingParams, StopCriteria
from blockyard.contract.scheduling import Submission
from blockyard.errors import BlockyardError, Reason
from gateway.codec import state as state_codec
from gateway.codec.state import digest_of
from gateway.request import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

SAMPLING = SamplingParams(
    temperature=0.5,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    seed=7,
    logit_bias={5: 1.0, 6: -1.0, 7: 2.0},
    logprobs=2,
)
REQUEST = GenerationRequest(
    prompt=(4, 5, 6),
    request_id="mine",
    sampling=SAMPLING,
    stop=StopCriteria(9, 2, ("end", "stop"), (11,), True, True),
    n=2,
    return_token_ids=True,
    skip_special_tokens=False,
    tenant="acme",
    on_disconnect=OnDisconnect.KEEP,
    on_update=OnUpdate.FAIL,
    priority=-3,
    max_queue_seconds=2.5,
    front_state=b"shape",
)
SUBMISSION = Submission(
    "acme/mine",
    array("I", (4, 5, 6)),
    n=2,
    sampling=SAMPLING,
    max_tokens=9,
    min_tokens=2,
    stop_token_ids=(11,),
    tenant="acme",
    priority=-3,
    max_queue_seconds=2.5,
    fails_on_update=True,
    cache_salt=b"salted",
)


def test_another_gateway_reads_the_request_again() -> None:
    submission = state_codec.with_state(SUBMISSION, REQUEST)
    arrived = state_codec.read_submission(encode_submission(submission))
    assert arrived == submission
    assert state_codec.request_of(arrived) == REQUEST


def test_a_salt_is_no_part_of_what_was_asked_and_is_not_kept_as_it_was_given() -> None:
    """It changes no answer, and whoever reads a scheduler's memory learns no salt."""
    submission = state_codec.with_state(SUBMISSION, REQUEST)
    salted = state_codec.with_state(replace(SUBMISSION, cache_salt=b"other"), replace(REQUEST, cache_salt="my salt"))
    assert salted.digest == submission.digest
    assert salted.gateway_state == submission.gateway_state
    assert salted.cache_salt == b"other"


def test_the_state_holds_no_prompt_and_nothing_twice() -> None:
    long = replace(REQUEST, prompt="a secret " * 100)
    state = state_codec.with_state(SUBMISSION, long).gateway_state
    assert b"secret" not in state and len(state) < 60


def digest(submission: Submission = SUBMISSION, **changes: Any) -> bytes:
    return state_codec.with_state(submission, replace(REQUEST, **changes)).digest


def test_the_same_has_one_digest_whenever_and_in_whatever_order_it_is_asked() -> None:
    expected = digest()
    assert len(expected) == 32
    reordered = replace(SAMPLING, logit_bias=dict(reversed(SAMPLING.logit_bias.items())))
    assert digest(replace(SUBMISSION, sampling=reordered)) == expected
    assert digest(replace(SUBMISSION, max_queue_seconds=9.0, remaining_seconds=1.0)) == expected
    assert digest(max_queue_seconds=None) == expected
    assert digest(front_state=b"later") == expected
    assert digest(model="demo") == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"stop": StopCriteria(9, 2, ("end",), (11,), True, True)},
        {"return_token_ids": False},
        {"skip_special_tokens": True},
        {"on_disconnect": OnDisconnect.ABORT},
    ],
)
def test_another_answer_to_the_same_tokens_is_another_request(changes: dict[str, Any]) -> None:
    assert digest(**changes) != digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": "other"},
        {"prompt_token_ids": (4, 5, 7)},
        {"n": 3},
        {"max_tokens": 10},
        {"priority": 0},
        {"sampling": replace(SAMPLING, seed=8)},
        {"beam_search": BeamSearch(4)},
    ],
)
def test_other_tokens_are_another_request(changes: dict[str, Any]) -> None:
    assert digest(replace(SUBMISSION, **changes)) != digest()


def test_a_field_that_a_later_version_adds_changes_no_digest() -> None:
    @dataclass(frozen=True, slots=True)
    class Older:
        seed: int = 0
        bias: Mapping[int, float] = field(default_factory=dict)

    @dataclass(frozen=True, slots=True)
    class Newer:
        seed: int = 0
        bias: Mapping[int, float] = field(default_factory=dict)
        added: tuple[int, ...] = ()

    assert digest_of(Older(7)) == digest_of(Newer(7)) != digest_of(Newer(7, added=(1,)))
    assert digest_of(Older(7), without=frozenset({"seed"})) == digest_of(Older(8), without=frozenset({"seed"}))


def test_a_damaged_submission_is_a_bug() -> None:
    with pytest.raises(BlockyardError) as caught:
        state_codec.read_submission(b"\xff")
    assert caught.value.reason is Reason.BUG
