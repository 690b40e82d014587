"""Requests of generations, to messages and back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.chat import Conversation, Message, Role
from blockyard.contract.codec.request import decode_position, decode_spec, encode_options, encode_position, encode_spec
from blockyard.contract.request import (
    Choices,
    GenerationSpec,
    JsonObject,
    JsonSchema,
    Lark,
    OnDisconnect,
    OnUpdate,
    Position,
    Regex,
)
from blockyard.contract.sampling import BeamSearch, EarlyStopping, SamplingParams, StopCriteria, ThinkingTokens
from blockyard.inference.v1 import inference_pb2

SAMPLING = SamplingParams(
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
    thinking_token_budget=0,
    thinking_tokens=ThinkingTokens(5, ((6,), (7, 8)), is_open=True, begins_anywhere=True),
    predicted_token_ids=(8, 9, 8),
    speculation=False,
)


def test_an_empty_spec_is_a_silent_request() -> None:
    assert decode_spec(inference_pb2.GenerationSpec(), GenerationSpec) == GenerationSpec(prompt="")


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
            thinking_token_budget=0,
            thinking_tokens={
                "end_token_id": 5,
                "begins": [{"token_ids": [6]}, {"token_ids": [7, 8]}],
                "is_open": True,
                "begins_anywhere": True,
            },
            predicted_token_ids=[8, 9, 8],
            speculation=False,
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
        suffix="end",
        format={"json_schema": {"schema": "{}", "compact": True}},
        cache_salt="salt",
    )
    other_prompts = {spec.DESCRIPTOR.fields_by_name[name] for name in ("text", "conversation")}
    assert set(dict(spec.ListFields())) == set(spec.DESCRIPTOR.fields) - other_prompts
    assert decode_spec(spec, GenerationSpec) == replace(
        FULL, add_special_tokens=False, truncate_prompt_tokens=-1, suffix="end"
    )


FULL = GenerationSpec(
    prompt=(1, 2),
    request_id="r",
    model="m",
    sampling=SAMPLING,
    stop=StopCriteria(9, 2, ("a", "b"), (5, 6), True, True),
    n=3,
    return_token_ids=True,
    skip_special_tokens=False,
    on_disconnect=OnDisconnect.KEEP,
    on_update=OnUpdate.FAIL,
    priority=-5,
    max_queue_seconds=2.5,
    beam_search=BeamSearch(4, 0.5, EarlyStopping.NEVER),
    format=JsonSchema("{}", compact=True),
    cache_salt="salt",
)
FORMATS = JsonObject(), JsonSchema("{}"), Regex("a+"), Choices(("a", "b")), Lark('start: "a"')


@pytest.mark.parametrize(
    "request_",
    [
        FULL,
        GenerationSpec(prompt="x"),
        GenerationSpec(prompt="x", beam_search=BeamSearch(2)),
        *(GenerationSpec(prompt="x", format=each) for each in FORMATS),
    ],
)
def test_a_request_survives_as_a_spec_without_its_prompt(request_: GenerationSpec) -> None:
    spec = encode_options(request_)
    assert spec.WhichOneof("prompt") is None
    read = decode_spec(inference_pb2.GenerationSpec.FromString(spec.SerializeToString()), GenerationSpec)
    assert read == replace(request_, prompt="")


_IDS = st.integers(0, 2**32 - 1)
_FLOATS = st.floats(width=32, allow_nan=False)
_SEQUENCES = st.lists(st.lists(_IDS, max_size=3).map(tuple), max_size=3).map(tuple)
_SAMPLING = st.builds(
    SamplingParams,
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), st.none() | _FLOATS),
    **dict.fromkeys(("top_k", "logprobs", "prompt_logprobs", "thinking_token_budget"), st.none() | _IDS),
    seed=st.none() | st.integers(0, 2**64 - 1),
    logit_bias=st.dictionaries(_IDS, _FLOATS, max_size=3),
    allowed_token_ids=st.lists(_IDS, max_size=3).map(tuple),
    predicted_token_ids=st.lists(_IDS, max_size=3).map(tuple),
    speculation=st.none() | st.booleans(),
    bad_words=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    bad_token_sequences=_SEQUENCES,
    thinking_tokens=st.none() | st.builds(ThinkingTokens, _IDS, _SEQUENCES, st.booleans(), st.booleans()),
)
_REQUESTS = st.builds(
    GenerationSpec,
    prompt=st.just(""),
    request_id=st.text(max_size=5),
    sampling=_SAMPLING,
    n=_IDS,
    skip_special_tokens=st.booleans(),
    on_disconnect=st.sampled_from(OnDisconnect),
    priority=st.integers(-(2**31), 2**31 - 1),
    beam_search=st.none() | st.builds(BeamSearch, _IDS, _FLOATS, st.sampled_from(EarlyStopping)),
)


@given(_REQUESTS)
def test_any_request_survives_as_a_spec(request_: GenerationSpec) -> None:
    assert decode_spec(encode_options(request_), GenerationSpec) == request_


@pytest.mark.parametrize("seconds", [0.001, 1e-9, 86_400.25])
def test_a_queue_time_is_exact_to_the_nanosecond(seconds: float) -> None:
    spec = encode_options(replace(FULL, max_queue_seconds=seconds))
    assert decode_spec(spec, GenerationSpec).max_queue_seconds == seconds


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"])
def test_a_zero_that_was_sent_is_not_silence(field: str) -> None:
    sampling: dict[str, Any] = {field: 0}
    spec = inference_pb2.GenerationSpec(sampling=sampling_pb2.SamplingParams(**sampling), n=0)
    request = decode_spec(spec, GenerationSpec)
    assert getattr(request.sampling, field) == 0
    assert request.n == 0
    assert decode_spec(inference_pb2.GenerationSpec(stop={"max_tokens": 0}), GenerationSpec).stop.max_tokens == 0


@given(
    st.sampled_from(["", "once"]) | st.lists(_IDS, max_size=3).map(tuple), st.booleans(), st.none() | st.integers(-1, 9)
)
def test_a_prompt_survives_with_its_options(prompt: Any, adds: bool, truncates: int | None) -> None:
    spec = GenerationSpec(prompt, add_special_tokens=adds, truncate_prompt_tokens=truncates, suffix="end")
    assert decode_spec(encode_spec(spec), GenerationSpec) == spec


def test_a_conversation_survives_as_a_prompt() -> None:
    spec = GenerationSpec(Conversation((Message(Role.USER, "Hi"),), parse_answer=True))
    assert decode_spec(encode_spec(spec), GenerationSpec) == spec


def test_the_class_to_make_may_have_more_fields() -> None:
    @dataclass(frozen=True, slots=True)
    class Special(GenerationSpec):
        more: int = 7

    assert decode_spec(encode_spec(FULL), Special).more == 7


@pytest.mark.parametrize("position", [Position(), Position(3, 9), Position(2, 4, True, (1, 2))])
def test_a_position_survives(position: Position) -> None:
    message = encode_position(5, position)
    assert (message.index, decode_position(message)) == (5, position)
