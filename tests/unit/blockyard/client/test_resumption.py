"""One answer over many calls, without a connection: cut anywhere, it is told once and whole."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.client import codec
from blockyard.client.resumption import CompletionBuilder, EventsLost, Resumption
from blockyard.client.retry import Attempts, RetryPolicy
from blockyard.common.v1.sampling_pb2 import StopCriteria
from blockyard.contract.events import Accepted, Delta, Event, Finished, Loading, PromptLogprobs, Recovered
from blockyard.errors import TABLE, TRANSPORT_ORIGIN, BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2
from tests.kit.fakes.fake_answers import Memory, events

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.client.results import Completion, GenerationOptions

Message = inference_pb2.GenerationEvent
Spec = inference_pb2.GenerationSpec
LOST = BlockyardError(Reason.NO_READY_WORKER, "gone", metadata=dict(TRANSPORT_ORIGIN))
QUICK = RetryPolicy(max_attempts=3, resume_seconds=0.0)


def patient() -> Attempts:
    return Attempts(RetryPolicy(max_attempts=100), None)


def begin(prompt: str = "one two", attempts: Attempts | None = None, **options: Any) -> Resumption:
    return Resumption(codec.make_spec(prompt, options), attempts or Attempts(QUICK, None))  # type: ignore[arg-type]


def numbered(messages: Iterable[Message]) -> list[Message]:
    """As a gateway sends them."""
    sent = [Message.FromString(message.SerializeToString()) for message in messages]
    for seq, message in enumerate(sent):
        message.seq = seq
    return sent


def answer(resumption: Resumption, memory: Memory, tokens_per_delta: int = 1) -> list[Message]:
    """All that a gateway with this memory would send now."""
    request = resumption.next_request()
    if isinstance(request, inference_pb2.StreamGenerateRequest):
        spec = Spec.FromString(request.spec.SerializeToString())
        memory.begin(spec)
        return list(events(spec, (), tokens_per_delta))
    return list(events(memory.find(request), request.positions, tokens_per_delta))


@dataclass(frozen=True)
class Call:
    """How one call goes: so many events, in pieces of so many tokens, some of them unknown to us; then it breaks."""

    num_events: int
    tokens_per_delta: int
    num_unknown: int
    recovers: bool
    ends: str


calls = st.lists(
    st.builds(
        Call,
        st.integers(0, 9),
        st.integers(1, 4),
        st.integers(0, 2),
        st.booleans(),
        st.sampled_from(["broken", "draining", "gap", "ok", "forgotten"]),
    ),
    max_size=8,
)


def follow(resumption: Resumption, memory: Memory, plan: list[Call]) -> list[Event]:
    """Reads an answer through these calls, and then to its end."""
    told: list[Event] = []
    for call in [*plan, None]:
        messages = answer(resumption, memory, call.tokens_per_delta if call else 1)
        if call is None:
            told.extend(event for m in numbered(messages) if (event := resumption.on_message(m)) is not None)
            resumption.on_end()
            return told
        extra = [Message()] * call.num_unknown
        if call.recovers:
            extra.append(Message(recovered=inference_pb2.Recovered(cause="lost", exact=True)))
        messages = numbered([*messages[:1], *extra, *messages[1:]])
        is_whole = call.num_events >= len(messages)
        for message in messages[: call.num_events]:
            if (event := resumption.on_message(message)) is not None:
                told.append(event)
        if is_whole:
            resumption.on_end()
            return told
        resumption.delay_after(breaks(resumption, call, messages))
        if call.ends == "forgotten":
            memory.forget()
    raise AssertionError


def breaks(resumption: Resumption, call: Call, messages: list[Message]) -> BlockyardError:
    if call.ends == "draining":
        return BlockyardError(Reason.DRAINING, "over")
    if call.ends == "gap" and call.num_events + 1 < len(messages):
        return caught(lambda: resumption.on_message(messages[call.num_events + 1]))
    if call.ends == "ok":
        return caught(resumption.on_end)
    return LOST


def caught(step: Any) -> BlockyardError:
    with pytest.raises(EventsLost) as raised:
        step()
    return raised.value


@given(
    st.lists(st.sampled_from(["a", "bcd", "é", "漢字", "🙂🙂"]), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 7),
    st.booleans(),
    st.booleans(),
    calls,
)
def test_each_token_and_byte_comes_once(
    words: list[str], n: int, max_tokens: int, shows_ids: bool, tells_logprobs: bool, plan: list[Call]
) -> None:
    options: GenerationOptions = {"request_id": "r", "n": n, "max_tokens": max_tokens, "return_token_ids": shows_ids}
    if tells_logprobs:
        options |= {"logprobs": 1, "prompt_logprobs": 0}
    spec = codec.make_spec(" ".join(words), options)
    whole = follow(Resumption(spec, patient()), Memory(), [])
    resumption = Resumption(spec, patient())
    told = follow(resumption, Memory(), plan)
    assert_told_once(told, shows_ids=shows_ids, n=n)
    assert resumption.make_completion() == completion_of(whole)
    assert all(event.text or shows_ids or event.logprobs for event in told if isinstance(event, Delta))


def completion_of(told: list[Event]) -> Completion:
    builder = CompletionBuilder()
    for event in told:
        builder.add(event)
    return builder.build()


def assert_told_once(told: list[Event], *, shows_ids: bool, n: int) -> None:
    kinds = [type(event) for event in told if not isinstance(event, Recovered | Delta)]
    assert kinds[0] is Accepted
    assert kinds.count(Accepted) == 1
    assert kinds.count(PromptLogprobs) <= 1
    assert sorted(event.index for event in told if isinstance(event, Finished)) == list(range(n))
    for index in range(n):
        num_tokens = num_text_bytes = 0
        for delta in (event for event in told if isinstance(event, Delta) and event.index == index):
            assert delta.num_text_bytes == num_text_bytes + len(delta.text.encode())
            assert not shows_ids or delta.num_tokens == num_tokens + len(delta.token_ids)
            num_tokens, num_text_bytes = delta.num_tokens, delta.num_text_bytes


def test_a_request_is_made_to_outlive_its_connection() -> None:
    spec = codec.make_spec("a", {"seed": 3})
    request = Resumption(spec, patient()).next_request()
    assert isinstance(request, inference_pb2.StreamGenerateRequest)
    sent = request.spec
    assert len(sent.request_id) == 32
    assert (sent.on_disconnect, sent.return_token_ids) == (inference_pb2.ON_DISCONNECT_KEEP, True)
    assert spec == codec.make_spec("a", {"seed": 3})
    assert begin().request_id != begin().request_id


def test_a_name_of_the_users_own_stays() -> None:
    assert begin(request_id="mine").request_id == "mine"


def test_a_request_that_ends_with_its_connection_stays_as_it_is() -> None:
    resumption = begin(on_disconnect="abort")
    assert resumption.next_request() == inference_pb2.StreamGenerateRequest(
        spec=codec.make_spec("one two", {"on_disconnect": "abort"})
    )
    assert resumption.request_id == ""
    assert not resumption.needs_cancel
    (first, *_) = numbered(events(Spec(request_id="made", text="a")))
    resumption.on_message(first)
    assert resumption.request_id == "made"
    with pytest.raises(BlockyardError, match="gone"):
        resumption.delay_after(LOST)


def test_before_it_is_accepted_it_is_sent_again_as_it_was() -> None:
    resumption = begin()
    first = resumption.next_request()
    resumption.delay_after(LOST)
    assert resumption.next_request() == first
    assert resumption.num_resumes == 0


def test_what_is_asked_for_again() -> None:
    resumption = begin("a é", max_tokens=3, n=3)
    for message in numbered(answer(resumption, Memory()))[:5]:
        resumption.on_message(message)
    resumption.on_message(Message(seq=5, finished=inference_pb2.Finished(index=1)))
    resumption.delay_after(LOST)
    request = resumption.next_request()
    assert isinstance(request, inference_pb2.ResumeGenerateRequest)
    assert list(request.positions) == [
        inference_pb2.Position(index=0, num_tokens=2, num_text_bytes=4, token_ids=[1, 1]),
        inference_pb2.Position(index=1, num_tokens=1, num_text_bytes=1, token_ids=[1], finished=True),
        inference_pb2.Position(index=2, num_tokens=1, num_text_bytes=1, token_ids=[1]),
    ]
    assert (request.request_id, request.spec.request_id) == (resumption.request_id, resumption.request_id)
    assert request.seed == 7
    assert resumption.num_resumes == 1


def test_a_seed_is_told_where_the_request_has_none() -> None:
    resumption = begin(seed=3)
    resumption.on_message(numbered(answer(resumption, Memory()))[0])
    request = resumption.next_request()
    assert isinstance(request, inference_pb2.ResumeGenerateRequest)
    assert (request.HasField("seed"), request.spec.sampling.seed) == (False, 3)


def test_a_request_of_somebody_else() -> None:
    spec = Spec(request_id="theirs", text="a b", n=2, stop=StopCriteria(max_tokens=2))
    memory = Memory()
    memory.begin(spec)
    resumption = Resumption(None, patient(), request_id="theirs")
    messages = numbered(answer(resumption, memory))
    told = [resumption.on_message(message) for message in messages[:4]]
    resumption.delay_after(LOST)
    request = resumption.next_request()
    assert isinstance(request, inference_pb2.ResumeGenerateRequest)
    assert not request.HasField("spec")
    assert not request.HasField("seed")
    # Nobody asked for ids, so there are none to tell.
    assert [list(position.token_ids) for position in request.positions] == [[], []]
    told += [resumption.on_message(message) for message in numbered(answer(resumption, memory))]
    resumption.on_end()
    assert_told_once([event for event in told if event is not None], shows_ids=False, n=2)
    assert [choice.text for choice in resumption.make_completion().choices] == ["a b", "a b"]
    assert not resumption.needs_cancel


@pytest.mark.parametrize("num_taken", range(1, 4))
def test_an_ok_end_before_the_end_is_a_loss(num_taken: int) -> None:
    for resumption in (begin("a", max_tokens=1, n=2), Resumption(None, patient(), request_id="r")):
        messages = numbered(events(Spec(request_id="r", text="a", stop=StopCriteria(max_tokens=1), n=2)))
        for message in messages[:num_taken]:
            resumption.on_message(message)
        with pytest.raises(EventsLost, match="ended before"):
            resumption.on_end()


@pytest.mark.parametrize("seqs", [[1], [0, 2], [0, 0], [0, 1, 0]])
def test_a_gap_is_a_loss(seqs: list[int]) -> None:
    resumption = begin()
    with pytest.raises(EventsLost, match="events were lost: seq"):
        for seq in seqs:
            resumption.on_message(Message(seq=seq))


@pytest.mark.parametrize(
    ("delta", "told"),
    [
        ({"text": "ab", "token_ids": [1], "num_tokens": 2, "num_text_bytes": 3}, "begins at token 1, byte 1"),
        ({"text": "ab", "token_ids": [1, 2], "num_tokens": 1, "num_text_bytes": 2}, "begins at token -1, byte 0"),
        ({"text": "é", "token_ids": [1], "num_tokens": 1, "num_text_bytes": 1}, "begins at token 0, byte -1"),
    ],
)
def test_a_delta_that_does_not_follow_is_a_loss(delta: dict[str, Any], told: str) -> None:
    resumption = begin()
    with pytest.raises(EventsLost, match=told):
        resumption.on_message(Message(delta=inference_pb2.Delta(**delta)))


def test_a_loss_is_an_error_like_any_other() -> None:
    error = caught(lambda: begin().on_message(Message(seq=3)))
    assert error.reason is Reason.BUG
    assert pickle.loads(pickle.dumps(error)) == copy.copy(error) == error


def transport(reason: Reason) -> BlockyardError:
    return BlockyardError(reason, "", metadata={**TRANSPORT_ORIGIN, "more": "x"})


@pytest.mark.parametrize(
    ("error", "outlived"),
    [
        (LOST, True),
        (BlockyardError(Reason.DRAINING, ""), True),
        (BlockyardError(Reason.NO_READY_WORKER, ""), True),
        (BlockyardError(Reason.GROUP_BROKEN, ""), True),
        (transport(Reason.CLIENT_CANCELLED), True),
        (transport(Reason.BUG), True),
        (transport(Reason.GENERATION_DEADLINE), False),
        (transport(Reason.MESSAGE_TOO_LARGE), False),
        (transport(Reason.FEATURE_DISABLED), False),
        *((BlockyardError(reason, ""), False) for reason in Reason if TABLE[reason].http_status != 503),
    ],
)
def test_which_failures_are_outlived(error: BlockyardError, outlived: bool) -> None:
    resumption = begin()
    resumption.on_message(numbered(events(Spec(request_id="r")))[0])
    if outlived:
        assert resumption.delay_after(error) > 0
        assert resumption.needs_cancel
        return
    with pytest.raises(BlockyardError) as raised:
        resumption.delay_after(error)
    assert raised.value is error
    # What the server did not say it may not know: the request is cancelled.
    assert resumption.needs_cancel == bool(error.metadata)


def test_patience_is_for_one_failure_at_a_time() -> None:
    resumption = begin("a", max_tokens=50)
    memory = Memory()
    for _ in range(50):
        for message in numbered(answer(resumption, memory))[:2]:
            resumption.on_message(message)
        resumption.delay_after(LOST)
    # Being accepted again, or told of a recovery or a loading, is no progress.
    recovered = Message(seq=1, recovered=inference_pb2.Recovered())
    loading = Message(seq=2, loading=inference_pb2.Loading(message="loading"))
    with pytest.raises(BlockyardError, match="gone"):
        for _ in range(5):
            resumption.on_message(numbered(answer(resumption, memory))[0])
            resumption.on_message(recovered)
            assert resumption.on_message(loading) == Loading("loading")
            resumption.delay_after(LOST)
    assert resumption.needs_cancel


def test_a_server_that_loses_events_again_and_again_is_given_up_soon() -> None:
    resumption = begin(attempts=Attempts(RetryPolicy(max_attempts=4), None))
    resumption.on_message(numbered(answer(resumption, Memory()))[0])
    for _ in range(3):
        resumption.next_request()
        resumption.delay_after(caught(lambda: resumption.on_message(Message(seq=9))))
    with pytest.raises(EventsLost):
        resumption.delay_after(caught(lambda: resumption.on_message(Message(seq=8))))


def test_there_is_nothing_to_cancel_after_the_end() -> None:
    resumption = begin()
    assert resumption.needs_cancel
    follow(resumption, Memory(), [])
    assert not resumption.needs_cancel
