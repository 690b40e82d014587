"""Options to messages, and messages to values."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import duration_pb2
from hypothesis import given
from hypothesis import strategies as st

from blockyard.client import codec
from blockyard.client.results import Choice, Completion, GenerationOptions, StructuredOutputsParams
from blockyard.client.resumption import CompletionBuilder
from blockyard.common.v1 import sampling_pb2
from blockyard.contract.events import (
    Accepted,
    Delta,
    Finished,
    Loading,
    Recovered,
    Usage,
)
from blockyard.contract.sampling import BeamSearch, EarlyStopping, FinishReason
from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2

EVERY_OPTION: dict[str, Any] = {
    "request_id": "r-1",
    "model": "m",
    "n": 2,
    "max_tokens": 5,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 3,
    "min_p": 0.25,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.5,
    "seed": 2**63,
    "logit_bias": {7: -1.0},
    "stop": ["a", "b"],
    "stop_token_ids": [4],
    "ignore_eos": True,
    "include_stop_in_output": True,
    "return_token_ids": True,
    "skip_special_tokens": False,
    "on_disconnect": "abort",
    "on_update": "fail",
    "priority": -3,
    "max_queue_time": 1.5,
    "beam_search": BeamSearch(4, 0.5, EarlyStopping.NEVER),
    "structured_outputs": StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True),
    "logprobs": 0,
    "prompt_logprobs": 2,
    "thinking_token_budget": 5,
    "allowed_token_ids": [3, 4],
    "predicted_token_ids": [5, 6],
    "speculation": False,
    "bad_words": ["bad"],
    "add_special_tokens": False,
    "truncate_prompt_tokens": -1,
    "suffix": "end",
    "cache_salt": "salt",
}


def test_the_list_of_options_is_complete() -> None:
    assert set(EVERY_OPTION) == set(GenerationOptions.__annotations__)


def test_every_option_reaches_its_field() -> None:
    spec = codec.make_spec("hi", GenerationOptions(**EVERY_OPTION))
    assert spec == inference_pb2.GenerationSpec(
        request_id="r-1",
        model="m",
        text="hi",
        n=2,
        return_token_ids=True,
        skip_special_tokens=False,
        add_special_tokens=False,
        truncate_prompt_tokens=-1,
        suffix="end",
        sampling=sampling_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.75,
            top_k=3,
            min_p=0.25,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            repetition_penalty=1.5,
            seed=2**63,
            logit_bias={7: -1.0},
            logprobs=0,
            prompt_logprobs=2,
            thinking_token_budget=5,
            allowed_token_ids=[3, 4],
            predicted_token_ids=[5, 6],
            speculation=False,
            bad_words=["bad"],
        ),
        on_disconnect=inference_pb2.ON_DISCONNECT_ABORT,
        on_update=inference_pb2.ON_UPDATE_FAIL,
        priority=-3,
        max_queue_time=duration_pb2.Duration(seconds=1, nanos=500_000_000),
        beam_search=sampling_pb2.BeamSearch(
            width=4, length_penalty=0.5, early_stopping=sampling_pb2.EARLY_STOPPING_NEVER
        ),
        format={"json_schema": {"schema": '{"type": "object"}', "compact": True}},
        cache_salt="salt",
        stop=sampling_pb2.StopCriteria(
            max_tokens=5,
            min_tokens=1,
            stop_strings=["a", "b"],
            stop_token_ids=[4],
            ignore_eos=True,
            include_stop_in_output=True,
        ),
    )


def test_an_option_that_is_absent_or_none_is_absent() -> None:
    spec = codec.make_spec("hi", GenerationOptions(temperature=None))  # type: ignore[typeddict-item]
    assert spec == inference_pb2.GenerationSpec(
        text="hi",
        sampling={},
        stop={},
        on_disconnect=inference_pb2.ON_DISCONNECT_KEEP,
        on_update=inference_pb2.ON_UPDATE_CONTINUE,
    )
    assert not spec.sampling.HasField("temperature")


def test_a_zero_is_present() -> None:
    spec = codec.make_spec("hi", {"temperature": 0, "seed": 0, "top_k": 0, "min_tokens": 0})
    assert spec.sampling.HasField("temperature")
    assert spec.sampling.HasField("seed")
    assert spec.sampling.HasField("top_k")
    assert spec.stop.HasField("min_tokens")


def test_one_stop_string_is_not_its_letters() -> None:
    assert codec.make_spec("hi", {"stop": "end"}).stop.stop_strings == ["end"]


@pytest.mark.parametrize("prompt", [[1, 2], (1, 2), range(1, 3)])
def test_token_ids_as_a_prompt(prompt: Any) -> None:
    assert codec.make_spec(prompt, {}).token_ids.ids == [1, 2]


def test_an_empty_list_is_a_prompt_too() -> None:
    assert codec.make_spec([], {}).WhichOneof("prompt") == "token_ids"
    assert codec.make_spec("", {}).WhichOneof("prompt") == "text"


def test_an_unknown_option() -> None:
    with pytest.raises(TypeError, match="unknown options: best_of, heat"):
        codec.make_spec("hi", {"heat": 1, "best_of": 2})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize("search", [BeamSearch(2), BeamSearch(2, early_stopping="first")])  # type: ignore[arg-type]
def test_beam_search_says_all_of_itself(search: BeamSearch) -> None:
    told = codec.make_spec("hi", {"beam_search": search}).beam_search
    assert (told.width, told.length_penalty) == (2, 1.0)
    assert told.early_stopping in (sampling_pb2.EARLY_STOPPING_HEURISTIC, sampling_pb2.EARLY_STOPPING_FIRST)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (StructuredOutputsParams(json="{}"), {"json_schema": {"schema": "{}"}}),
        (StructuredOutputsParams(json_object=True), {"json_object": True}),
        (
            StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
            {"json_schema": {"schema": '{"type": "object"}', "compact": True}},
        ),
        (StructuredOutputsParams(regex="a+"), {"regex": "a+"}),
        (StructuredOutputsParams(choice=["a", "b"]), {"choices": {"texts": ["a", "b"]}}),
        (StructuredOutputsParams(choice=[]), {"choices": {}}),
        (StructuredOutputsParams(grammar='start: "a"'), {"grammar": 'start: "a"'}),
    ],
    ids=str,
)
def test_a_form_says_all_of_itself(params: StructuredOutputsParams, told: dict[str, Any]) -> None:
    spec = codec.make_spec("hi", {"structured_outputs": params})
    assert spec.format == inference_pb2.OutputFormat(**told)


def test_every_value_that_its_field_cannot_hold_is_a_violation() -> None:
    options: Any = {
        "top_k": -1,
        "max_tokens": 1.5,
        "stop": [1],
        "logit_bias": {-1: 0.0},
        "stop_token_ids": 5,
        "model": 7,
        "temperature": "hot",
        "seed": 2**64,
        "bad_words": 3,
        "logprobs": -1,
        "priority": 2**31,
        "max_queue_time": float("nan"),
        "on_disconnect": "stay",
        "beam_search": 4,
    }
    with pytest.raises(BlockyardError) as caught:
        codec.make_spec([-1], options)
    assert caught.value.reason is Reason.FIELD_INVALID
    assert {violation.field for violation in caught.value.violations} == {
        "model",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.seed",
        "sampling.logit_bias",
        "stop.max_tokens",
        "stop.stop_strings",
        "stop.stop_token_ids",
        "token_ids.ids",
        "sampling.bad_words",
        "sampling.logprobs",
        "priority",
        "max_queue_time",
        "on_disconnect",
        "beam_search",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_queue_time", float("inf")),
        ("max_queue_time", "soon"),
        ("beam_search", BeamSearch(-1)),
        ("beam_search", BeamSearch(2, early_stopping="later")),  # type: ignore[arg-type]
        ("structured_outputs", StructuredOutputsParams()),
        ("structured_outputs", StructuredOutputsParams(json_object=True, regex="a")),
        ("structured_outputs", StructuredOutputsParams(choice="yes")),
        ("on_disconnect", 3),
        ("on_update", "forget"),
    ],
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(BlockyardError) as caught:
        codec.make_spec("hi", {name: value})  # type: ignore[misc]
    assert [violation.field for violation in caught.value.violations] == [name]


def test_a_recovery_and_a_loading_are_events_that_change_nothing() -> None:
    builder = CompletionBuilder()
    for part in (
        Loading("the worker is loading the model: 17%"),
        Accepted("r", 1, 2, "m"),
        Delta(0, "a", (), 1, 1),
        Recovered("lost", 7, True),
        Delta(0, "b", (), 2, 2),
        Finished(0, FinishReason.LENGTH, None, Usage(1, 0, 2), "d"),
    ):
        builder.add(part)
    assert builder.build().text == "ab"


@given(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=5), st.lists(st.integers(0, 9), max_size=3))))
def test_a_completion_is_what_its_events_tell(deltas: list[tuple[int, str, list[int]]]) -> None:
    builder = CompletionBuilder()
    builder.add(Accepted("r", 2, 3, "m"))
    for index, text, token_ids in deltas:
        builder.add(Delta(index, text, tuple(token_ids), 0, 0))
    for index in (2, 0, 3, 1):
        builder.add(Finished(index, FinishReason.LENGTH, None, Usage(2, 1, index), "d"))
    completion = builder.build()
    assert [choice.index for choice in completion.choices] == [0, 1, 2, 3]
    for choice in completion.choices:
        own = [delta for delta in deltas if delta[0] == choice.index]
        assert choice.text == "".join(text for _, text, _ in own)
        assert choice.token_ids == tuple(token_id for _, _, token_ids in own for token_id in token_ids)
    assert completion.usage == Usage(2, 1, 6)


def test_there_is_no_completion_before_the_end() -> None:
    builder = CompletionBuilder()
    with pytest.raises(ValueError, match="not ended"):
        builder.build()


def test_the_shortcuts_are_of_the_first_choice() -> None:
    first = Choice(0, "a", (1,), FinishReason.STOP, "x", Usage(1, 0, 1))
    completion = Completion("r", "m", 1, (first, Choice(1, "b", (2,), FinishReason.LENGTH, None, Usage(1, 0, 1))))
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("a", (1,), FinishReason.STOP)
