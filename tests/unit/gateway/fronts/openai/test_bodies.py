"""What a body may say: types, names, values that are not served, sizes."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.errors import Violation, invalid
from gateway.fronts.openai import errors
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody
from tests.unit.gateway.fronts.openai.test_errors import HELLO, post

if TYPE_CHECKING:
    import httpx


async def test_all_of_a_bodys_shape_is_told_at_once(http: httpx.AsyncClient) -> None:
    body = {
        "prompt": 5,
        "n": "x",
        "temprature": 1,
        "ec_transfer_params": "x",
        "stream_options": {"include_usage": True, "x": 1},
    }
    response = await post(http, {**body, "stream": True})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    told = {violation["param"]: violation["code"] for violation in error["violations"]}
    assert told == {
        "prompt": "FIELD_INVALID",
        "n": "FIELD_INVALID",
        "temprature": "FIELD_INVALID",
        "ec_transfer_params": "UNSUPPORTED_PARAMETER",
        "stream_options.x": "FIELD_INVALID",
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": "a"} x',
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    response = await post(http, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("FIELD_INVALID", None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": True}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]], "n": 1}, None),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": "a", "stop": ["a", 1]}, "stop"),
        ({"prompt": "a", "stop": 5}, "stop"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "n": 1.5}, "n"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stop_token_ids": ["x"] * 1000}, "stop_token_ids[0]"),
    ],
)
async def test_a_wrong_type_is_named(http: httpx.AsyncClient, body: dict[str, Any], param: str | None) -> None:
    response = await post(http, body)
    if param is None:
        # The shape is right; the core says that a prompt has to have tokens.
        assert response.status_code == 200
        return
    error = response.json()["error"]
    assert (response.status_code, error["param"], len(error["violations"])) == (400, param, 1)


@pytest.mark.parametrize(
    ("path", "body", "param", "count"),
    [
        ("/v1/completions", {"prompt": "a", **{f"x{i}": 1 for i in range(1000)}}, "x0", 64),
        ("/v1/completions", {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(5000)}}, "logit_bias", 1),
        ("/v1/completions", {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(1000)}}, "logit_bias.x0", 100),
        ("/v1/chat/completions", {"messages": [{}] * 5000}, "messages", 1),
        ("/v1/chat/completions", {"messages": [{}] * 1000}, "messages[0].role", 1),
        ("/v1/chat/completions", {"messages": HELLO, "metadata": {str(i): 1 for i in range(1000)}}, "metadata", 1),
    ],
)
async def test_a_body_full_of_errors_is_not_told_all_of_them(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, count: int
) -> None:
    error = (await post(http, body, path)).json()["error"]
    assert (error["param"], len(error["violations"])) == (param, count)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/completions", "best_of", 2),
        ("/v1/completions", "guided_whitespace_pattern", "x"),
        ("/v1/completions", "truncation_side", "right"),
        ("/v1/completions", "prompt_embeds", "x"),
        ("/v1/chat/completions", "functions", [{"name": "f"}]),
        ("/v1/chat/completions", "chat_template", "{{ messages }}"),
        ("/v1/chat/completions", "add_special_tokens", True),
        ("/v1/chat/completions", "modalities", ["text", "audio"]),
    ],
)
async def test_what_is_not_served_yet_is_refused(http: httpx.AsyncClient, path: str, name: str, value: Any) -> None:
    response = await post(
        http, {"prompt": "a"} | {name: value} if "chat" not in path else {"messages": HELLO, name: value}, path
    )
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "UNSUPPORTED_PARAMETER", name)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True, "use_beam_search": False}, "early_stopping"),
        ({"early_stopping": "sometimes", "use_beam_search": True}, "early_stopping"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids[0]"),
        ({"bad_words": "no"}, "bad_words"),
        ({"bad_words": [5]}, "bad_words[0]"),
        ({"priority": 1.5}, "priority"),
        ({"max_queue_time": "1s"}, "max_queue_time"),
        ({"on_disconnect": "forget"}, "on_disconnect"),
    ],
)
async def test_the_shape_of_vllms_parameters_is_checked(
    http: httpx.AsyncClient, path: str, asked: dict[str, Any], param: str
) -> None:
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "a"}
    error = (await post(http, {**prompt, **asked}, path)).json()["error"]
    assert error["code"] == "FIELD_INVALID"
    # Of a type with several forms each is told.
    assert error["param"].startswith(param)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("beam_search.width", "best_of"),
        ("beam_search.length_penalty", "length_penalty"),
        ("sampling.bad_words", "bad_words"),
        ("max_queue_time", "max_queue_time"),
    ],
)
def test_the_cores_fields_have_vllms_names(field: str, param: str) -> None:
    assert errors.rename(invalid([Violation(field, "x")]), {}).violations[0].field == param


async def test_neutral_values_of_it_are_taken(http: httpx.AsyncClient) -> None:
    neutral = {
        "logprobs": None,
        "suffix": "",
        "best_of": 1,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "early_stopping": False,
        "response_format": {"type": "text"},
    }
    assert (await post(http, {"prompt": "a", **neutral})).status_code == 200
    neutral = {
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "auto",
        "add_special_tokens": False,
        "thinking_token_budget": -1,
        "verbosity": "medium",
        "modalities": ["text"],
        "include_reasoning": True,
    }
    assert (await post(http, {"messages": HELLO, **neutral}, "/v1/chat/completions")).status_code == 200


async def test_what_only_labels_a_call_is_taken(http: httpx.AsyncClient) -> None:
    labels = {
        "store": True,
        "service_tier": "flex",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "x",
        "session_id": "s",
        "user": "u",
    }
    assert set(labels) | {"prompt_cache_options"} == ChatBody.WITHOUT_EFFECT
    assert (await post(http, {"messages": HELLO, **labels}, "/v1/chat/completions")).status_code == 200


async def test_null_is_nothing_asked(http: httpx.AsyncClient) -> None:
    nothing = dict.fromkeys(ChatBody.model_fields.keys() - {"messages"})
    assert (await post(http, {"messages": HELLO, **nothing}, "/v1/chat/completions")).status_code == 200
    nothing = dict.fromkeys(CompletionBody.model_fields.keys() - {"prompt"})
    assert (await post(http, {"prompt": "a", **nothing})).status_code == 200


async def test_a_name_of_a_chat_is_none_of_a_completion(http: httpx.AsyncClient) -> None:
    error = (await post(http, {"prompt": "a", "tools": [], "messages": HELLO})).json()["error"]
    assert {violation["param"] for violation in error["violations"]} == {"tools", "messages"}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (CompletionBody, completion_create_params.CompletionCreateParamsStreaming),
        (ChatBody, chat_create_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_parameter_of_the_openai_package_is_known(body: Any, params: Any) -> None:
    assert set(typing.get_type_hints(params)) <= set(body.model_fields)


# Those of vLLM 0.25 that OpenAI has not, and that have to do with text.
VLLM_BOTH = """
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params ignore_eos include_stop_str_in_output
    kv_transfer_params length_penalty logprob_token_ids min_p min_tokens priority prompt_logprobs repetition_detection
    repetition_penalty request_id response_format return_token_ids return_token_offsets return_tokens_as_token_ids
    session_id skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
    thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
"""
VLLM_CHAT = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents echo include_reasoning
    media_io_kwargs mm_processor_kwargs reasoning_effort return_prompt_text
"""


def test_every_parameter_of_vllm_is_known() -> None:
    both = set(VLLM_BOTH.split())
    assert both | {"prompt_embeds"} <= CompletionBody.model_fields.keys()
    assert both | set(VLLM_CHAT.split()) <= ChatBody.model_fields.keys()


async def test_a_body_that_is_too_long_is_refused(http: httpx.AsyncClient) -> None:
    body = b'{"prompt": "' + b"a" * PUBLIC_MESSAGE_BYTES + b'"}'
    response = await post(http, body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "MESSAGE_TOO_LARGE"
    assert response.headers["x-should-retry"] == "false"


async def test_a_body_of_pieces_is_measured_too(http: httpx.AsyncClient) -> None:
    async def pieces() -> typing.AsyncIterator[bytes]:
        for _ in range(17):
            yield b"a" * 1024 * 1024

    response = await http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
    assert response.json()["error"]["code"] == "MESSAGE_TOO_LARGE"


@pytest.mark.parametrize("names", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")])
def test_an_answers_message_is_taken_as_it_was_told(names: tuple[str, ...]) -> None:
    call = {"id": "c", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "Yes.", "tool_calls": [call], **dict.fromkeys(names, "I think.")}
    # litellm's.
    message["provider_specific_fields"] = {"refusal": None}
    # What `model_dump` of OpenAI's package writes of what an answer has not.
    message |= {"annotations": None, "audio": None, "function_call": None, "refusal": None}
    body = ChatBody.model_validate({"messages": [message]})
    assert body.conversation().messages[0].reasoning_content == "I think."


def test_no_effort_switches_thoughts_off_unless_the_template_is_told_otherwise() -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "none"}
    arguments = ChatBody.model_validate(asked).conversation().template_arguments
    assert arguments == {"reasoning_effort": "none", "enable_thinking": False}
    asked["chat_template_kwargs"] = {"enable_thinking": True}
    assert ChatBody.model_validate(asked).conversation().template_arguments["enable_thinking"] is True


def test_marks_for_a_cache_change_nothing() -> None:
    marks: dict[str, Any] = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", **marks}]}
    assert ChatBody.model_validate({"messages": [message]}).conversation().messages[0].content == "Hi"


@pytest.mark.parametrize("mark", ["cache_control", "prompt_cache_breakpoint"])
def test_a_mark_for_a_cache_has_the_form_that_the_document_says(mark: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", mark: [None]}]}
    with pytest.raises(ValidationError, match="should be a string or a list of text parts"):
        ChatBody.model_validate({"messages": [message]})
