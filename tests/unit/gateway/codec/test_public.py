from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason, to_status
from blockyard.inference.v1 import inference_pb2
from blockyard.logprob_columns import Candidates, join_logprobs, split_logprobs
from blockyard.scheduler.v1 import scheduler_pb2
from gateway.codec import public as codec
from gateway.codec import scheduler as scheduler_codec
from gateway.request import (
    Accepted,
    BeamOptions,
    Choices,
    Delta,
    EarlyStopping,
    Event,
    Finished,
    FinishReason,
    GenerationRequest,
    JsonObject,
    JsonSchema,
    Lark,
    OnDisconnect,
    OnUpdate,
    PromptLogprobs,
    Recovered,
    Regex,
    SamplingOptions,
    StopOptions,
    TokenLogprob,
    TokenLogprobs,
)
from gateway.scheduler_messages import Abort, AbortReason, ModelFacts, Progress, Readiness, Submission

SAMPLING = SamplingOptions(
    temperature=0.5,
    top_p=0.25,
    top_k=7,
    min_p=0.125,
    presence_penalty=-1.0,
    frequency_penalty=1.5,
    repetition_penalty=1.25,
    seed=2**64 - 1,
    logit_bias={3: -100.0, 4: 0.5},
    allowed_token_ids=(3, 4),
    bad_words=("no", "never"),
    bad_token_sequences=((5,), (6, 7)),
    logprobs=2,
    prompt_logprobs=0,
    grammar='start: "a"',
)


def test_an_empty_spec_is_a_silent_request() -> None:
    assert codec.decode_spec(inference_pb2.GenerationSpec()) == GenerationRequest(prompt="")


def test_a_full_spec_is_read_field_by_field() -> None:
    spec = inference_pb2.GenerationSpec(
        request_id="r",
        model="m",
        token_ids=inference_pb2.TokenIds(ids=[1, 2]),
        sampling=sampling_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            presence_penalty=-1.0,
            frequency_penalty=1.5,
            repetition_penalty=1.25,
            seed=2**64 - 1,
            logit_bias={3: -100.0, 4: 0.5},
            allowed_token_ids=[3, 4],
            bad_words=["no", "never"],
            bad_token_sequences=[{"token_ids": [5]}, {"token_ids": [6, 7]}],
            logprobs=2,
            prompt_logprobs=0,
            grammar='start: "a"',
        ),
        stop=sampling_pb2.StopCriteria(
            max_tokens=9,
            min_tokens=2,
            stop_strings=["a", "b"],
            stop_token_ids=[5, 6],
            ignore_eos=True,
            include_stop_in_output=True,
        ),
        n=3,
        return_token_ids=True,
        skip_special_tokens=False,
        on_disconnect=inference_pb2.ON_DISCONNECT_KEEP,
        on_update=inference_pb2.ON_UPDATE_FAIL,
        priority=-5,
        max_queue_time={"seconds": 2, "nanos": 500_000_000},
        beam_search={"width": 4, "length_penalty": 0.5, "early_stopping": sampling_pb2.EARLY_STOPPING_NEVER},
        add_special_tokens=False,
        truncate_prompt_tokens=-1,
        format={"json_schema": {"schema": "{}", "compact": True}},
    )
    other_prompts = {spec.DESCRIPTOR.fields_by_name[name] for name in ("text", "conversation")}
    assert set(dict(spec.ListFields())) == set(spec.DESCRIPTOR.fields) - other_prompts
    assert codec.decode_spec(spec) == replace(FULL, add_special_tokens=False, truncate_prompt_tokens=-1)


FULL = GenerationRequest(
    prompt=(1, 2),
    request_id="r",
    model="m",
    sampling=SAMPLING,
    stop=StopOptions(9, 2, ("a", "b"), (5, 6), True, True),
    n=3,
    return_token_ids=True,
    skip_special_tokens=False,
    on_disconnect=OnDisconnect.KEEP,
    on_update=OnUpdate.FAIL,
    priority=-5,
    max_queue_seconds=2.5,
    beam_search=BeamOptions(4, 0.5, EarlyStopping.NEVER),
    format=JsonSchema("{}", compact=True),
)
FORMATS = JsonObject(), JsonSchema("{}"), Regex("a+"), Choices(("a", "b")), Lark('start: "a"')


@pytest.mark.parametrize(
    "request_",
    [
        FULL,
        GenerationRequest(prompt="x"),
        GenerationRequest(prompt="x", beam_search=BeamOptions(2)),
        *(GenerationRequest(prompt="x", format=each) for each in FORMATS),
    ],
)
def test_a_request_survives_as_a_spec_without_its_prompt(request_: GenerationRequest) -> None:
    spec = codec.encode_spec(request_)
    assert spec.WhichOneof("prompt") is None
    read = codec.decode_spec(inference_pb2.GenerationSpec.FromString(spec.SerializeToString()))
    assert read == replace(request_, prompt="")


_IDS = st.integers(0, 2**32 - 1)
_FLOATS = st.floats(width=32, allow_nan=False)
_SAMPLING = st.builds(
    SamplingOptions,
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), st.none() | _FLOATS),
    **dict.fromkeys(("top_k", "logprobs", "prompt_logprobs"), st.none() | _IDS),
    seed=st.none() | st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(_IDS, _FLOATS, max_size=3),
    allowed_token_ids=st.lists(_IDS, max_size=3).map(tuple),
    bad_words=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    bad_token_sequences=st.lists(st.lists(_IDS, max_size=3).map(tuple), max_size=3).map(tuple),
)
_REQUESTS = st.builds(
    GenerationRequest,
    prompt=st.just(""),
    request_id=st.text(max_size=5),
    sampling=_SAMPLING,
    n=_IDS,
    skip_special_tokens=st.booleans(),
    on_disconnect=st.sampled_from(OnDisconnect),
    priority=st.integers(-(2**31), 2**31 - 1),
    beam_search=st.none() | st.builds(BeamOptions, _IDS, _FLOATS, st.sampled_from(EarlyStopping)),
)


@given(_REQUESTS)
def test_any_request_survives_as_a_spec(request_: GenerationRequest) -> None:
    assert codec.decode_spec(codec.encode_spec(request_)) == request_


@pytest.mark.parametrize("seconds", [0.001, 1e-9, 86_400.25])
def test_a_queue_time_is_exact_to_the_nanosecond(seconds: float) -> None:
    spec = codec.encode_spec(replace(FULL, max_queue_seconds=seconds))
    assert codec.decode_spec(spec).max_queue_seconds == seconds


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"])
def test_a_zero_that_was_sent_is_not_silence(field: str) -> None:
    sampling: dict[str, Any] = {field: 0}
    spec = inference_pb2.GenerationSpec(sampling=sampling_pb2.SamplingParams(**sampling), n=0)
    request = codec.decode_spec(spec)
    assert getattr(request.sampling, field) == 0
    assert request.n == 0
    assert codec.decode_spec(inference_pb2.GenerationSpec(stop={"max_tokens": 0})).stop.max_tokens == 0


BEST, CHOSEN = TokenLogprob(7, "b", -0.25, 1), TokenLogprob(9, "a", -3.0, 4)
BEST_FIELDS = {"token_id": 7, "text": "b", "logprob": -0.25, "rank": 1}
CHOSEN_FIELDS = {"token_id": 9, "text": "a", "logprob": -3.0, "rank": 4}
FAILURE = BlockyardError(Reason.NOT_FINITE, "no numbers")
LENGTH_FIELDS: dict[str, Any] = {
    "reason": sampling_pb2.FINISH_REASON_LENGTH,
    "usage": {"num_prompt_tokens": 1, "num_completion_tokens": 1},
}


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            Accepted("r", 3, 2**64 - 1, "m"),
            {"accepted": {"request_id": "r", "num_prompt_tokens": 3, "seed": 2**64 - 1, "model": "m"}},
        ),
        (
            Delta(1, "ü", (4, 5), 7, 20),
            {"delta": {"index": 1, "text": "ü", "token_ids": [4, 5], "num_tokens": 7, "num_text_bytes": 20}},
        ),
        (
            Delta(0, "a", (), 1, 1, (TokenLogprobs(CHOSEN, (BEST, CHOSEN)),)),
            {
                "delta": {
                    "text": "a",
                    "num_tokens": 1,
                    "num_text_bytes": 1,
                    "logprobs": [{"chosen": CHOSEN_FIELDS, "top": [BEST_FIELDS, CHOSEN_FIELDS]}],
                }
            },
        ),
        (
            PromptLogprobs((TokenLogprobs(None), TokenLogprobs(BEST))),
            {"prompt_logprobs": {"logprobs": [{}, {"chosen": BEST_FIELDS}]}},
        ),
        (Finished(0, FinishReason.LENGTH, None, 1, 0, 1, "", -0.5), {"finished": LENGTH_FIELDS | {"score": -0.5}}),
        (Finished(0, FinishReason.LENGTH, None, 1, 0, 1, ""), {"finished": LENGTH_FIELDS}),
        (
            Finished(0, FinishReason.LENGTH, None, 1, 0, 1, "", error=FAILURE),
            {"finished": LENGTH_FIELDS | {"error": to_status(FAILURE)}},
        ),
        (
            Finished(2, FinishReason.STOP, "x", 3, 1, 9, "d"),
            {
                "finished": {
                    "index": 2,
                    "reason": sampling_pb2.FINISH_REASON_STOP,
                    "matched_stop": {"stop_string": "x"},
                    "usage": {"num_prompt_tokens": 3, "num_cached_tokens": 1, "num_completion_tokens": 9},
                    "determinism_id": "d",
                }
            },
        ),
    ],
)
def test_events_are_written_field_by_field(event: Event, expected: dict[str, Any]) -> None:
    message = codec.encode_event(event, 6)
    assert message == inference_pb2.GenerationEvent(seq=6, **expected)


def test_a_whole_sequence_is_its_deltas_in_one() -> None:
    told = (TokenLogprobs(BEST), TokenLogprobs(CHOSEN, (BEST,)))
    deltas = [Delta(1, "b", (7,), 1, 1, told[:1]), Delta(1, "a", (9,), 2, 2, told[1:])]
    choice = codec.encode_choice(deltas, Finished(1, FinishReason.LENGTH, None, 1, 0, 2, ""))
    assert (choice.index, choice.text, list(choice.token_ids)) == (1, "ba", [7, 9])
    assert choice.finished.usage.num_completion_tokens == 2
    assert [place.chosen.text for place in choice.logprobs] == ["b", "a"]
    assert [len(place.top) for place in choice.logprobs] == [0, 1]


def test_a_stop_token_with_id_0_is_told_and_an_end_token_is_not() -> None:
    told = codec.encode_event(Finished(0, FinishReason.STOP, 0, 1, 0, 1, ""), 0).finished
    assert told.matched_stop.WhichOneof("stop") == "stop_token_id"
    end = codec.encode_event(Finished(0, FinishReason.STOP, None, 1, 0, 1, ""), 0).finished
    assert not end.HasField("matched_stop")


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_reason_has_a_number_and_comes_back(reason: FinishReason) -> None:
    number = codec.encode_event(Finished(0, reason, None, 1, 0, 1, ""), 0).finished.reason
    message = scheduler_pb2.AttachResponse(finished_sequence_ids=[4], finish_reasons=[number])
    assert scheduler_codec.decode_progress(message).ended == [(4, reason, None, None)]


def test_a_submission_is_written_with_every_sampling_field() -> None:
    sampling = replace(SAMPLING, bad_words=())
    submission = Submission("r", (1, 2), 2, sampling, 9, 1, (0, 3))
    message = scheduler_codec.encode_submission(submission)
    assert (message.request_id, list(message.prompt_token_ids), message.n) == ("r", [1, 2], 2)
    assert (message.max_tokens, message.min_tokens, list(message.stop_token_ids)) == (9, 1, [0, 3])
    spec = inference_pb2.GenerationSpec(sampling=message.sampling)
    assert codec.decode_spec(spec).sampling == sampling
    fields = {descriptor.name for descriptor, _ in message.sampling.ListFields()}
    # Bad words are token sequences by then.
    assert fields == set(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name) - {"bad_words"}
    silent = {"fails_on_update", "tenant", "priority", "max_queue_time", "remaining_time", "beam_search"}
    assert not silent.intersection(descriptor.name for descriptor, _ in message.ListFields())


def test_a_submission_says_whose_it_is_and_how_long_it_may_take() -> None:
    submission = Submission(
        "t/r", (1,), 1, SAMPLING, 9, 1, (), "t", -3, 1.5, 20.0, BeamOptions(3, 2.0, EarlyStopping.FIRST)
    )
    message = scheduler_codec.encode_submission(submission)
    assert (message.tenant, message.priority) == ("t", -3)
    assert message.max_queue_time.ToNanoseconds() == 1_500_000_000
    assert message.remaining_time.ToNanoseconds() == 20_000_000_000
    assert message.beam_search == sampling_pb2.BeamSearch(
        width=3, length_penalty=2.0, early_stopping=sampling_pb2.EARLY_STOPPING_FIRST
    )


def test_an_abort_names_a_sequence_only_if_it_is_one() -> None:
    whole = scheduler_codec.encode_abort(Abort(7, "r"))
    assert whole.handle == 7 and not whole.HasField("sequence_index")
    assert whole.reason == scheduler_pb2.ABORT_REASON_CLIENT
    first = scheduler_codec.encode_abort(Abort(7, "r", AbortReason.STOP_STRING, 0, 12))
    assert first.HasField("sequence_index") and first.sequence_index == 0
    assert (first.reason, first.num_tokens) == (scheduler_pb2.ABORT_REASON_STOP_STRING, 12)


def test_progress_is_read_column_by_column() -> None:
    message = scheduler_pb2.AttachResponse(
        facts=scheduler_pb2.ModelFacts(model_digest="d", vocab_size=9, max_model_len=8, block_size=4),
        readiness=scheduler_pb2.Readiness(ready=True),
        accepted=[scheduler_pb2.RequestAccepted(request_id="a", first_sequence_id=2**40, handle=3)],
        failed=[scheduler_pb2.RequestFailed(handle=4, status=to_status(BlockyardError(Reason.NEVER_FITS, "no")))],
        sequence_ids=[5, 5, 6],
        token_ids=[1, 2, 3],
        prefilled_sequence_ids=[5],
        num_cached_tokens=[16],
    )
    progress = scheduler_codec.decode_progress(message)
    assert progress.facts == ModelFacts("d", 9, 8, 4, "", False)
    assert progress.readiness == Readiness(True, "")
    assert progress.accepted == [(3, 2**40)]
    assert [(f.handle, f.error.reason, f.error.message) for f in progress.failed] == [(4, Reason.NEVER_FITS, "no")]
    assert (progress.sequence_ids, progress.token_ids) == ([5, 5, 6], [1, 2, 3])
    assert progress.prefilled == [(5, 16)]


def test_recoveries_pass_through() -> None:
    told = scheduler_pb2.RequestRecovered(request_id="a", cause="lost", num_replayed_tokens=7, exact=True)
    [recovery] = scheduler_codec.decode_progress(scheduler_pb2.AttachResponse(recovered=[told])).recovered
    assert recovery == ("a", "lost", 7, True)
    event = codec.encode_event(Recovered("lost", 7, True), 3)
    assert event == inference_pb2.GenerationEvent(
        seq=3, recovered=inference_pb2.Recovered(cause="lost", num_replayed_tokens=7, exact=True)
    )


def test_a_step_without_news_has_neither_facts_nor_readiness() -> None:
    progress = scheduler_codec.decode_progress(scheduler_pb2.AttachResponse(sequence_ids=[1], token_ids=[2]))
    assert progress.facts is None and progress.readiness is None


def test_tokens_alone_are_read_at_once_and_with_anything_more_whole() -> None:
    tokens: dict[str, Any] = {"sequence_ids": [1, 2], "token_ids": [8, 9]}
    alone = scheduler_codec.decode_progress(scheduler_pb2.AttachResponse(**tokens))
    assert alone == Progress([], [], [], [1, 2], [8, 9], [])
    assert scheduler_codec.decode_progress(scheduler_pb2.AttachResponse()) == Progress([], [], [], [], [], [])
    for more in (
        {"readiness": scheduler_pb2.Readiness()},
        {"finished_sequence_ids": [1], "finish_reasons": [sampling_pb2.FINISH_REASON_STOP]},
        {"accepted": [scheduler_pb2.RequestAccepted(handle=3)]},
    ):
        progress = scheduler_codec.decode_progress(scheduler_pb2.AttachResponse(**tokens, **more))
        assert progress != alone
        assert (progress.sequence_ids, progress.token_ids) == ([1, 2], [8, 9])


ENTRIES = [Candidates([4, 5, 4], [-2.0, -0.5, -2.0], [2, 1, 2]), Candidates([6], [-1.5], [3])]
COLUMNS = sampling_pb2.Logprobs(
    num_candidates=[3, 1], token_ids=[4, 5, 4, 6], logprobs=[-2.0, -0.5, -2.0, -1.5], ranks=[2, 1, 2, 3]
)


def test_log_probabilities_are_read_and_written_as_columns() -> None:
    assert split_logprobs(COLUMNS) == ENTRIES
    assert join_logprobs(ENTRIES) == COLUMNS
    assert join_logprobs([]) == sampling_pb2.Logprobs()


def test_log_probabilities_without_ranks_are_read() -> None:
    message = sampling_pb2.Logprobs(num_candidates=[1, 1], token_ids=[4, 6], logprobs=[-2.0, -1.5])
    assert split_logprobs(message) == [Candidates([4], [-2.0], []), Candidates([6], [-1.5], [])]


def test_progress_tells_the_log_probabilities_of_those_that_have_them() -> None:
    message = scheduler_pb2.AttachResponse(
        sequence_ids=[1, 2, 2], token_ids=[4, 9, 6], logprob_sequence_ids=[1, 2], logprobs=COLUMNS
    )
    assert scheduler_codec.decode_progress(message).logprobs == list(zip([1, 2], ENTRIES, strict=True))


def test_progress_tells_the_log_probabilities_of_prompts() -> None:
    piece = sampling_pb2.PromptLogprobs(sequence_id=2, first_position=16, logprobs=COLUMNS)
    progress = scheduler_codec.decode_progress(scheduler_pb2.AttachResponse(prompt_logprobs=[piece]))
    assert progress.prompt_logprobs == [(2, 16, ENTRIES)]


def test_scores_belong_to_endings() -> None:
    message = scheduler_pb2.AttachResponse(
        finished_sequence_ids=[4, 5],
        finish_reasons=[sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH],
        finish_scores=[-0.5, math.nan],
    )
    ended = scheduler_codec.decode_progress(message).ended
    assert ended == [(4, FinishReason.STOP, -0.5, None), (5, FinishReason.LENGTH, None, None)]


def test_failures_belong_to_endings() -> None:
    message = scheduler_pb2.AttachResponse(
        finished_sequence_ids=[4, 5],
        finish_reasons=[sampling_pb2.FINISH_REASON_LENGTH, sampling_pb2.FINISH_REASON_ERROR],
        sequence_failures=[scheduler_pb2.SequenceFailure(sequence_id=5, status=to_status(FAILURE))],
    )
    ended = scheduler_codec.decode_progress(message).ended
    assert ended == [(4, FinishReason.LENGTH, None, None), (5, FinishReason.ERROR, None, FAILURE)]
