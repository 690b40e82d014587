from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from blockyard.logprob_columns import Candidates
from blockyard.scheduler.v1 import scheduler_pb2
from gateway.codec import scheduler as scheduler_codec
from gateway.codec import state as state_codec
from gateway.request import (
    BeamOptions,
    FinishReason,
    GenerationRequest,
    OnDisconnect,
    OnUpdate,
    SamplingOptions,
    StopOptions,
)
from gateway.scheduler_messages import Add, Resubmission, Resume, SequenceRecord, Submission

SAMPLING = SamplingOptions(
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
    stop=StopOptions(9, 2, ("end", "stop"), (11,), True, True),
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
)


def test_another_gateway_reads_the_request_again() -> None:
    submission = state_codec.with_state(SUBMISSION, REQUEST)
    message = scheduler_codec.encode_add(Add(3, submission))
    arrived = scheduler_codec.decode_submission(scheduler_pb2.AddRequest.FromString(message.SerializeToString()))
    assert arrived == submission
    assert state_codec.request_of(arrived) == REQUEST


def test_the_state_holds_no_prompt_and_nothing_twice() -> None:
    long = replace(REQUEST, prompt="a secret " * 100)
    state = state_codec.with_state(SUBMISSION, long).gateway_state
    assert b"secret" not in state and len(state) < 60


def digest(submission: Submission = SUBMISSION, **changes: Any) -> bytes:
    return state_codec.with_state(submission, replace(REQUEST, **changes)).body_digest


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
        {"stop": StopOptions(9, 2, ("end",), (11,), True, True)},
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
        {"beam_search": BeamOptions(4)},
    ],
)
def test_other_tokens_are_another_request(changes: dict[str, Any]) -> None:
    assert digest(replace(SUBMISSION, **changes)) != digest()


def test_a_resubmission_tells_all_that_is_known() -> None:
    entries = [Candidates([4, 5], [-1.0, -0.5], [2, 1])]
    records = [
        SequenceRecord(array("I", [4]), None, entries),
        SequenceRecord((), FinishReason.LENGTH, score=-2.5),
    ]
    message = scheduler_codec.encode_add(Add(9, SUBMISSION, Resubmission(1.5, records, 16)))
    assert message.handle == 9
    told = message.resubmission
    assert (told.age.ToNanoseconds(), told.num_cached_tokens) == (1_500_000_000, 16)
    resumed = scheduler_pb2.RequestResumed(
        handle=9, request=message, first_sequence_id=70, sequences=told.sequences, num_cached_tokens=16
    )
    [read] = scheduler_codec.decode_progress(scheduler_pb2.AttachResponse(resumed=[resumed])).resumed
    assert (read.handle, read.first_sequence_id, read.num_cached_tokens) == (9, 70, 16)
    assert read.submission == SUBMISSION
    assert read.sequences == [SequenceRecord([4], None, entries), SequenceRecord([], FinishReason.LENGTH, [], -2.5)]


def test_a_question_bears_its_handle() -> None:
    message = scheduler_codec.encode_resume(Resume(4, "acme/mine"))
    assert message == scheduler_pb2.ResumeRequest(request_id="acme/mine", handle=4)
