"""What a gateway adds, as the scheduler plans by it, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.contract.codec.scheduling import encode_add
from blockyard.contract.sampling import BeamSearch, FinishReason, SamplingParams
from blockyard.contract.scheduling import Add, Resubmission, SequenceRecord, Submission
from blockyard.errors import BlockyardError, Reason
from blockyard.scheduler.v1 import scheduler_pb2
from scheduler_service.core.sequence import Group
from scheduler_service.core.values import GroupSpec
from scheduler_service.gateways.codec import Addition, decode_add, parse_submission

RIGHT: dict[str, Any] = {"request_id": "a", "prompt_token_ids": [5, 6], "n": 1, "max_tokens": 4}
POOLED: dict[str, Any] = {
    "request_id": "a",
    "prompt_token_ids": [1],
    "n": 1,
    "pooling": pooling_pb2.Pooling(kind=pooling_pb2.POOLING_KIND_LAST).SerializeToString(),
}


def decode(message: scheduler_pb2.AddRequest) -> Addition:
    return decode_add(message, parse_submission(message.submission), "o")


def refusal(fields: dict[str, Any], **more: Any) -> list[str]:
    encoded = scheduler_pb2.Submission(**fields).SerializeToString()
    with pytest.raises(BlockyardError) as caught:
        decode(scheduler_pb2.AddRequest(submission=encoded, **more))
    assert caught.value.reason is Reason.FIELD_INVALID
    return [violation.field for violation in caught.value.violations]


def test_a_request_is_decoded_whole() -> None:
    sampling = SamplingParams(temperature=0.7, prompt_logprobs=1)
    submission = Submission(
        *("a", (5, 6), 3, sampling, 4, 2, (7, 8)),
        tenant="t",
        priority=-2,
        digest=b"digest",
        max_queue_seconds=1.5,
        fails_on_update=True,
        beam_search=BeamSearch(4),
        cache_salt=b"salt",
    )
    before = Resubmission(2.5, [SequenceRecord([1], FinishReason.STOP), SequenceRecord([]), SequenceRecord([])], 3)
    message = encode_add(Add(7, submission, before, age_seconds=0.5))
    payload = sampling_pb2.SamplingParams(temperature=0.7, prompt_logprobs=1).SerializeToString()
    own = (payload, True, "t", -2, BeamSearch(4))
    spec = GroupSpec("a", "o", [5, 6], 3, 4, 2, frozenset({7, 8}), *own, cache_salt=b"salt")
    addition = decode(message)
    assert addition.resubmission is not None and list(addition.resubmission.sequences[0].token_ids) == [1]
    assert addition == Addition(
        spec, 7, b"digest", message.submission, 1.5, None, addition.resubmission, 0.5, fails_on_update=True
    )


def test_a_gateway_whose_clock_is_ahead_makes_nothing_younger_than_now() -> None:
    message = encode_add(Add(7, Submission("a", (5,), 1, SamplingParams(), 4, 0, ()), age_seconds=-3.0))
    assert decode(message).age_seconds == 0.0


def test_bytes_that_are_no_submission_are_refused() -> None:
    with pytest.raises(BlockyardError) as caught:
        parse_submission(b"\xff")
    assert [violation.field for violation in caught.value.violations] == ["submission"]


def test_all_that_is_missing_is_named_at_once() -> None:
    assert refusal({"request_id": "a", "n": 1}) == ["prompt_token_ids", "max_tokens"]


@pytest.mark.parametrize("fields", [{"n": 2}, {"max_tokens": 1}, {"beam_search": {"width": 2}}])
def test_numbers_and_tokens_at_once_are_refused(fields: dict[str, Any]) -> None:
    assert refusal(POOLED | fields) == ["pooling"]


def test_a_resubmission_needs_a_record_of_every_sequence() -> None:
    record = scheduler_pb2.Resubmission(sequences=[{}])
    assert refusal(RIGHT | {"n": 2}, resubmission=record) == ["resubmission.sequences"]


def test_a_record_goes_through_a_group_and_comes_back() -> None:
    group = Group(GroupSpec("a", "o", (1, 2), 2, 9, 0, frozenset()), 7, 11, 0.0)
    records = [
        SequenceRecord([3], FinishReason.STOP, [], -0.5, None, b"1234"),
        SequenceRecord([4], None, [], -2.0),
    ]
    group.continue_from(records, 1)
    assert (group.num_cached_tokens, [sequence.make_record() for sequence in group.sequences]) == (1, records)
