from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.contract.request import OnDisconnect
from blockyard.errors import BlockyardError, Reason, to_status
from blockyard.open_inference.v2 import open_inference_pb2 as messages
from gateway.fronts.open_inference.call import INPUTS, OUTPUTS, InferCall, understand
from gateway.fronts.open_inference.codec import decode_request
from gateway.fronts.openai.schema.requests import MAX_PROMPTS, CompletionBody
from tests.unit.gateway.core import Core
from tests.unit.gateway.fronts.open_inference.harness import PROMPT, infer

if TYPE_CHECKING:
    from gateway.request import GenerationRequest


def understand_message(message: messages.ModelInferRequest) -> InferCall:
    decoded = decode_request(message, INPUTS, max_elements=MAX_PROMPTS, max_outputs=len(OUTPUTS))
    return understand(decoded)


def understood(*prompts: str, **asked: Any) -> InferCall:
    return understand_message(infer(*(prompts or (PROMPT,)), **asked))


def request_of(**asked: Any) -> GenerationRequest:
    return understood(**asked).call.requests[0]


def error_of(*prompts: str | bytes, **asked: Any) -> BlockyardError:
    with pytest.raises(BlockyardError) as raised:
        understand_message(infer(*(prompts or (PROMPT,)), **asked))
    return raised.value


def fields(error: BlockyardError) -> list[str]:
    return [violation.field for violation in error.violations]


def test_a_prompt_alone_is_a_request_with_the_defaults_of_triton() -> None:
    call = understood()
    (request,) = call.call.requests
    assert request.prompt == PROMPT
    assert request.stop.max_tokens == 16 and call.call.default_length
    assert not call.stream and call.outputs == ("text_output",)
    assert call.prefixes == (PROMPT,), "the answer begins with the prompt"
    assert call.timeout_seconds is None


def test_each_prompt_is_a_request_with_a_name_of_its_own() -> None:
    call = understood("a", "b", "c", fields={"id": "mine"})
    assert [request.prompt for request in call.call.requests] == ["a", "b", "c"]
    assert [request.request_id for request in call.call.requests] == ["mine-0", "mine-1", "mine-2"]
    assert (call.name, call.prefixes) == ("mine", ("a", "b", "c"))


def test_sampling_parameters_have_the_names_of_vllm() -> None:
    request = request_of(
        sampling={
            "temperature": 0.5,
            "top_k": -1,
            "max_tokens": 7,
            "min_tokens": 2,
            "stop": ["\n", "."],
            "stop_token_ids": [5],
            "logit_bias": {"8": 1.5},
            "include_stop_str_in_output": True,
            "seed": 9,
            "n": 3,
            "bad_words": ["no"],
            "top_p": None,
        }
    )
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (0.5, 0, None)
    assert (request.sampling.seed, request.sampling.logit_bias) == (9, {8: 1.5})
    assert (request.stop.max_tokens, request.stop.min_tokens, request.stop.stop_token_ids) == (7, 2, (5,))
    assert request.stop.stop_strings == ("\n", ".") and request.stop.include_stop_in_output
    assert (request.n, request.sampling.bad_words) == (3, ("no",))


def test_numbers_may_come_as_texts() -> None:
    request = request_of(sampling={"temperature": "0.1", "top_p": "0.95", "max_tokens": "100", "ignore_eos": "true"})
    assert (request.sampling.temperature, request.sampling.top_p, request.stop.max_tokens) == (0.1, 0.95, 100)
    assert request.stop.ignore_eos


def test_sampling_parameters_may_come_as_parameters_of_the_request() -> None:
    request = request_of(
        parameters={"temperature": 0.25, "max_tokens": 5, "stop": "x", "ignore_eos": True, "seed": "3"}
    )
    assert (request.sampling.temperature, request.sampling.seed, request.stop.max_tokens) == (0.25, 3, 5)
    assert request.stop.stop_strings == ("x",) and request.stop.ignore_eos


def test_what_the_json_says_goes_before_what_the_parameters_say() -> None:
    request = request_of(parameters={"temperature": 0.25, "max_tokens": 5}, sampling={"max_tokens": 6})
    assert (request.sampling.temperature, request.stop.max_tokens) == (0.25, 6)


def test_the_json_may_be_a_parameter_too() -> None:
    assert request_of(parameters={"sampling_parameters": '{"max_tokens": 6}'}).stop.max_tokens == 6


@pytest.mark.parametrize("told", ["[1]", "{", '"x"', "", "1", "null", "[" * 10_000])
def test_what_is_no_json_object_is_refused(told: str) -> None:
    error = error_of(parameters={"sampling_parameters": told})
    assert fields(error) == ["sampling_parameters"] and "JSON object" in error.message


def test_flags_may_be_tensors_or_parameters() -> None:
    assert understood(stream=True).stream
    assert understood(parameters={"stream": True}).stream
    assert not understood(stream=False, parameters={"stream": True}).stream
    assert fields(error_of(parameters={"stream": "true"})) == ["stream"]


@pytest.mark.parametrize(
    ("flags", "prefixes"),
    [
        ({}, (PROMPT,)),
        ({"exclude_input_in_output": True}, ()),
        ({"exclude_input_in_output": False}, (PROMPT,)),
        ({"stream": True}, ()),
        ({"stream": True, "exclude_input_in_output": True}, ()),
    ],
)
def test_the_prompt_goes_before_a_whole_answer_unless_it_is_excluded(flags: Any, prefixes: Any) -> None:
    assert understood(**flags).prefixes == prefixes


def test_a_stream_has_one_prompt_which_it_does_not_repeat() -> None:
    error = error_of("a", "b", stream=True, exclude_input_in_output=False)
    assert sorted(fields(error)) == ["exclude_input_in_output", "text_input"]


@pytest.mark.parametrize("name", [name for name, kind in OUTPUTS.items() if kind.flag])
def test_an_output_is_asked_for_by_its_flag_or_its_name(name: str) -> None:
    assert understood(**{OUTPUTS[name].flag: True}).outputs == ("text_output", name)
    assert understood(outputs=[name]).outputs == (name,)
    assert understood(outputs=["text_output"], **{OUTPUTS[name].flag: True}).outputs == ("text_output",)


@pytest.mark.parametrize("name", ["cumulative_logprob", "logprobs"])
def test_log_probabilities_are_computed_where_an_output_needs_them(name: str) -> None:
    assert request_of(outputs=[name]).sampling.logprobs == 0
    assert request_of(outputs=[name], sampling={"logprobs": 4}).sampling.logprobs == 4
    assert request_of(outputs=["text_output"]).sampling.logprobs is None


def test_outputs_that_nobody_knows_are_refused() -> None:
    assert fields(error_of(outputs=["text_output", "embedding"])) == ["embedding"]
    assert fields(error_of(outputs=["text_output"] * 7)) == ["outputs"]
    request = infer(PROMPT, outputs=["text_output"])
    request.outputs[0].parameters["classification"].int64_param = 3
    with pytest.raises(BlockyardError) as raised:
        understand_message(request)
    assert raised.value.reason is Reason.UNSUPPORTED_PARAMETER


def test_prompts_are_texts() -> None:
    with pytest.raises(BlockyardError, match="text_input: is required"):
        understand_message(messages.ModelInferRequest())
    with pytest.raises(BlockyardError, match="text_input: must hold a prompt"):
        understand_message(infer())
    assert "text_input: must be UTF-8" in error_of(b"\xff").message
    assert fields(error_of(*["x"] * (MAX_PROMPTS + 1))) == ["text_input"]


@pytest.mark.parametrize("name", ["echo", "model", "prompt", "request_id", "stream", "stream_options"])
def test_what_is_said_elsewhere_is_no_sampling_parameter(name: str) -> None:
    error = error_of(sampling={name: "x", "max_tokens": 3})
    assert fields(error) == [name] and "is not a sampling parameter here" in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_name", "mine"),
        ("guided_decoding", {"regex": "a+"}),
        ("prompt_logprobs", 1),
        ("return_token_ids", True),
        ("detokenize", False),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(name: str, value: Any) -> None:
    error = error_of(sampling={name: value})
    assert fields(error) == [name] and error.reason is Reason.UNSUPPORTED_PARAMETER
    assert request_of(sampling={name: None}).prompt == PROMPT


def test_a_prompt_can_be_cut() -> None:
    assert request_of(sampling={"truncate_prompt_tokens": 5}).truncate_prompt_tokens == 5


def test_names_and_types_are_told_all_at_once() -> None:
    error = error_of(sampling={"top_k": "many", "temprature": 1, "stop": [1], "max_tokens": 1.5}, fields={"id": "ok"})
    assert sorted(fields(error)) == ["max_tokens", "stop", "temprature", "top_k"]
    assert error.reason is Reason.FIELD_INVALID


def test_every_parameter_of_a_completion_is_one_here() -> None:
    """By its null, which each takes; what this front says elsewhere is left out."""
    elsewhere = {"echo", "model", "prompt", "request_id", "stream", "stream_options"}
    names = CompletionBody.model_fields.keys() - elsewhere
    assert request_of(sampling=dict.fromkeys(names)).prompt == PROMPT


def test_parameters_of_triton_itself() -> None:
    call = understood(
        parameters={"timeout": 1_500_000, "priority": 3, "triton_enable_empty_final_response": True, "sequence_id": 0}
    )
    assert call.timeout_seconds == 1.5
    assert call.call.requests[0].priority == 3
    assert understood(parameters={"timeout": 0}).timeout_seconds is None
    for wrong in (-1, "soon", True, 1.5):
        assert fields(error_of(parameters={"timeout": wrong})) == ["timeout"]
    error = error_of(parameters={"sequence_id": 5, "sequence_start": True})
    assert fields(error) == ["sequence_id", "sequence_start"] and error.reason is Reason.UNSUPPORTED_PARAMETER


def test_too_many_parameters_are_not_looked_at() -> None:
    assert fields(error_of(parameters={f"p{number}": 1 for number in range(300)})) == ["parameters"]


def test_a_tensor_of_one_element_has_one() -> None:
    request = infer(PROMPT)
    request.inputs.add(name="stream", datatype="BOOL", shape=[2]).contents.bool_contents.extend([True, False])
    request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[0])
    with pytest.raises(BlockyardError) as raised:
        understand_message(request)
    assert fields(raised.value) == ["stream", "sampling_parameters"]


def test_another_version_is_not_served() -> None:
    error = error_of(fields={"model_version": "2"})
    assert fields(error) == ["model_version"] and error.reason is Reason.MODEL_NOT_FOUND
    assert understood(fields={"model_version": "1"}).name == ""


def test_a_request_has_the_shorter_of_its_times() -> None:
    def remaining(call: InferCall, connection: float | None) -> float | None:
        return call.of_caller("team", connection).call.requests[0].remaining_seconds

    timed = understood(parameters={"timeout": 2_000_000})
    assert (remaining(timed, None), remaining(timed, 1.0), remaining(timed, 3.0)) == (2.0, 1.0, 2.0)
    assert (remaining(understood(), 3.0), remaining(understood(), None)) == (3.0, None)
    assert timed.of_caller("team", None).call.requests[0].tenant == "team"


def test_what_outlives_its_connection_outlives_its_deadline() -> None:
    kept = understood(sampling={"on_disconnect": "keep"}).of_caller("", 3.0)
    assert kept.call.requests[0].on_disconnect is OnDisconnect.KEEP
    assert kept.call.requests[0].remaining_seconds is None


def test_inputs_are_listed_with_the_prompts_first() -> None:
    assert next(iter(INPUTS)) == "text_input"
    assert next(iter(OUTPUTS)) == "text_output"


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=8), children, max_size=3),
    max_leaves=6,
)
_PARAMETERS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=8)
_NAMES = st.sampled_from([*CompletionBody.model_fields, *INPUTS, "timeout", "sequence_id"]) | st.text(max_size=8)
_REASONS = {Reason.FIELD_INVALID, Reason.UNSUPPORTED_PARAMETER}


@given(
    sampling=st.dictionaries(_NAMES, _VALUES, max_size=4),
    parameters=st.dictionaries(_NAMES, _PARAMETERS, max_size=4),
)
async def test_whatever_is_asked_is_taken_or_refused_by_its_name(
    sampling: dict[str, Any], parameters: dict[str, Any]
) -> None:
    try:
        call = understood(sampling=sampling, parameters=parameters, fields={"id": "r"})
        await Core().service.start(call.call.requests[0])
    except BlockyardError as error:
        assert error.violations and all(violation.field for violation in error.violations)
        assert {violation.reason for violation in error.violations} <= _REASONS
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        to_status(error)
