"""What gateway and scheduler say to each other arrives as it was said, in both directions."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from typing import Any

import pytest

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.codec.progress import decode_progress, encode_progress
from blockyard.contract.codec.sampling import join_logprobs, split_logprobs
from blockyard.contract.codec.scheduling import (
    decode_abort,
    decode_adapter,
    decode_resubmission,
    decode_submission,
    encode_abort,
    encode_adapter,
    encode_add,
    encode_resume,
    encode_submission,
)
from blockyard.contract.models import Task
from blockyard.contract.pooling import Pooling, PoolingKind
from blockyard.contract.sampling import (
    BeamSearch,
    Candidates,
    EarlyStopping,
    FinishReason,
    PredictionUsage,
    PromptPiece,
    SamplingParams,
    ThinkingTokens,
)
from blockyard.contract.scheduling import (
    Abort,
    AbortReason,
    Acceptance,
    Adapter,
    Add,
    Ending,
    Failure,
    ModelFacts,
    Prefill,
    Progress,
    Readiness,
    Recovery,
    Resubmission,
    Resume,
    Resumed,
    SequenceError,
    SequenceRecord,
    Submission,
    TokenUpdate,
)
from blockyard.contract.trace import TraceContext
from blockyard.errors import BlockyardError, Reason
from blockyard.scheduler.v1 import scheduler_pb2

SAMPLING = SamplingParams(
    temperature=0.5,
    top_p=0.75,
    top_k=3,
    min_p=0.25,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.5,
    seed=7,
    logit_bias={5: 1.0, 0: -1.0},
    allowed_token_ids=(1, 2),
    bad_token_sequences=((7, 8), (9,)),
    logprobs=2,
    prompt_logprobs=0,
    grammar="start: /a/",
    thinking_token_budget=9,
    thinking_tokens=ThinkingTokens(5, ((6,), (7, 8)), is_open=True),
    predicted_token_ids=(4, 5),
    speculation=False,
)
ADAPTER = Adapter(3, "a", "/loras/a", "ab" * 32, pinned=True, num_virtual_tokens=4)
WHOLE = Submission(
    "acme/mine",
    array("I", (4, 5, 6)),
    n=2,
    sampling=SAMPLING,
    max_tokens=9,
    min_tokens=2,
    stop_token_ids=(0, 11),
    tenant="acme",
    priority=-3,
    max_queue_seconds=2.5,
    remaining_seconds=20.0,
    beam_search=BeamSearch(3, 2.0, EarlyStopping.FIRST),
    gateway_state=b"state",
    digest=b"digest",
    trace_context=TraceContext("00-" + "1" * 32 + "-" + "2" * 16 + "-01", "a=b"),
    lora=ADAPTER,
    fails_on_update=True,
    pooling=Pooling(PoolingKind.LABEL_LOGITS, (3, 4), True, 5, True, 2),
    cache_salt=b"salt",
)
ENTRIES = [Candidates([4, 5, 4], [-2.0, -0.5, -2.0], [2, 1, 2]), Candidates([6], [-1.5], [3])]
FAILURE = SequenceError("NOT_FINITE", "row 3")
RECORDS = [
    SequenceRecord([4, 9], None, ENTRIES, prediction=PredictionUsage(2, 1)),
    SequenceRecord([], FinishReason.LENGTH, [], score=-2.5),
    SequenceRecord([1], FinishReason.ERROR, [], error=FAILURE, pooled_values=b"1234"),
]


def test_every_field_of_a_submission_is_set_in_the_example() -> None:
    """Else a field could be forgotten by the codec, and the test below would not see it."""
    plain = Submission("", (), 0, SamplingParams(), 0, 0, ())
    assert [name for name in Submission.__slots__ if getattr(WHOLE, name) == getattr(plain, name)] == []
    neutral = SamplingParams()
    unset = [name for name in SamplingParams.__slots__ if getattr(SAMPLING, name) == getattr(neutral, name)]
    # Bad words are token sequences by then.
    assert unset == ["bad_words"]


def test_a_submission_arrives_whole() -> None:
    assert decode_submission(encode_submission(WHOLE)) == WHOLE
    plain = Submission("r", array("I", (1,)), 1, SamplingParams(), 9, 0, ())
    assert decode_submission(encode_submission(plain)) == plain


@pytest.mark.parametrize(
    ("changes", "computes"),
    [
        ({}, False),
        ({"sampling": SamplingParams(prompt_logprobs=0)}, True),
        ({"pooling": Pooling(PoolingKind.LAST)}, False),
        ({"pooling": Pooling(PoolingKind.MEAN)}, True),
        ({"pooling": Pooling(PoolingKind.FIRST)}, True),
        ({"pooling": Pooling(PoolingKind.TOKENS)}, True),
    ],
)
def test_the_scheduler_is_told_which_prompts_are_computed_whole(changes: dict[str, Any], computes: bool) -> None:
    submission = replace(Submission("r", (1,), 1, SamplingParams(), 9, 0, ()), **changes)
    message = scheduler_pb2.Submission.FromString(encode_submission(submission))
    assert message.computes_whole_prompt is computes


def test_an_add_has_the_record_of_a_request_that_ran_before() -> None:
    message = encode_add(Add(9, WHOLE, Resubmission(1.5, RECORDS, 16), age_seconds=0.25))
    assert message.handle == 9
    assert decode_submission(message.submission) == WHOLE
    assert decode_resubmission(message.resubmission) == Resubmission(1.5, RECORDS, 16)
    assert message.age.ToNanoseconds() == 250_000_000
    bare = encode_add(Add(9, WHOLE))
    assert not bare.HasField("resubmission") and not bare.HasField("age")


def test_a_record_is_not_younger_than_now() -> None:
    message = encode_add(Add(1, WHOLE, Resubmission(-1.5, []))).resubmission
    assert decode_resubmission(message).age_seconds == 0.0


def test_a_resume_has_its_handle() -> None:
    assert encode_resume(Resume(4, "acme/mine")) == scheduler_pb2.ResumeRequest(request_id="acme/mine", handle=4)


@pytest.mark.parametrize(
    "abort", [Abort(7, "r"), Abort(0, "r", sequence_index=0), Abort(7, "r", AbortReason.STOP_STRING, 0, 12)]
)
def test_an_abort_arrives(abort: Abort) -> None:
    assert decode_abort(encode_abort(abort)) == abort


@pytest.mark.parametrize("number", [0, 99])
def test_an_abort_for_another_reason_is_the_clients(number: Any) -> None:
    assert decode_abort(scheduler_pb2.AbortRequest(reason=number)).reason is AbortReason.CLIENT


def test_an_adapter_arrives_without_what_workers_found() -> None:
    assert decode_adapter(encode_adapter(replace(ADAPTER, rank=8, targets=("q_proj",), num_bytes=9))) == ADAPTER


FACTS = ModelFacts("digest", 100, 64, 16, "id", True, 8, "v2", Task.EMBED, 32, ("be careful",))
UPDATE = TokenUpdate(
    sequence_ids=[2**40, 5, 2**40],
    token_ids=[40, 50, 41],
    ended=[Ending(4, FinishReason.STOP, -0.5), Ending(5, FinishReason.ERROR, None, FAILURE)],
    prefilled=[Prefill(4, 16)],
    logprobs=list(zip([5, 4], ENTRIES, strict=True)),
    prompt_logprobs=[(4, PromptPiece(16, ENTRIES))],
    pooled=[(7, b"1234abcd"), (8, b"5678")],
    predictions=[(2**40, PredictionUsage(3, 1)), (5, PredictionUsage())],
)
PROGRESS = Progress(
    FACTS,
    Readiness(False, "the worker loads", needs_repair=True),
    (ADAPTER,),
    [Acceptance(1, 2**40, "a")],
    [Failure(2, BlockyardError(Reason.NEVER_FITS, "too long"), "b")],
    [Resumed(3, b"submission", 30, RECORDS, 1, [PromptPiece(1, ENTRIES)])],
    [Recovery("c", "lost", 9, True)],
    [("d", "v2")],
    UPDATE,
)


@pytest.mark.parametrize(
    "progress",
    [
        PROGRESS,
        Progress(),
        Progress(update=UPDATE),
        Progress(update=TokenUpdate([1, 2], [8, 9])),
        Progress(readiness=Readiness(False), update=TokenUpdate([1], [8])),
        Progress(loras=()),
    ],
)
def test_progress_arrives(progress: Progress) -> None:
    message = scheduler_pb2.AttachResponse.FromString(encode_progress(progress).SerializeToString())
    assert decode_progress(message) == progress


def test_every_field_of_progress_is_set_in_the_example() -> None:
    for value, empty in ((PROGRESS, Progress()), (UPDATE, TokenUpdate()), (FACTS, ModelFacts("", 0, 0, 0, "", False))):
        assert [name for name in type(value).__slots__ if getattr(value, name) == getattr(empty, name)] == []


def test_nothing_is_no_bytes() -> None:
    assert encode_progress(Progress()).ByteSize() == 0


def test_scores_are_sent_where_there_are_some() -> None:
    ends = [Ending(1, FinishReason.STOP), Ending(2, FinishReason.LENGTH, score=-1.5)]
    scores = encode_progress(Progress(update=TokenUpdate(ended=ends))).finish_scores
    assert list(scores) == pytest.approx([math.nan, -1.5], nan_ok=True)
    assert not encode_progress(Progress(update=TokenUpdate(ended=ends[:1]))).finish_scores


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_reason_arrives(reason: FinishReason) -> None:
    update = TokenUpdate(ended=[Ending(4, reason)])
    assert decode_progress(encode_progress(Progress(update=update))).update == update


def test_a_reason_of_a_later_version_is_an_error() -> None:
    message = scheduler_pb2.AttachResponse(finished_sequence_ids=[4], finish_reasons=[99])  # type: ignore[list-item]
    assert decode_progress(message).update.ended == [Ending(4, FinishReason.ERROR)]


def test_log_probabilities_are_columns() -> None:
    columns = sampling_pb2.Logprobs(
        num_candidates=[3, 1], token_ids=[4, 5, 4, 6], logprobs=[-2.0, -0.5, -2.0, -1.5], ranks=[2, 1, 2, 3]
    )
    assert split_logprobs(columns) == ENTRIES
    assert join_logprobs(ENTRIES) == columns
    assert join_logprobs([]) == sampling_pb2.Logprobs()
    columns.ClearField("ranks")
    assert [entry.ranks for entry in split_logprobs(columns)] == [[], []]
