"""Whatever the clients' packages can say is served, or refused by its name; what has no effect is listed here."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import input_token_count_params, response_create_params

from blockyard.errors import BlockyardError, Reason
from gateway.fronts.anthropic import call as of_messages
from gateway.fronts.anthropic.schema import CountBody, MessagesBody
from gateway.fronts.http_calls.bodies import parse_body
from gateway.fronts.openai.call_spec import understand_chat, understand_completion
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody
from gateway.fronts.responses import call as of_responses
from gateway.fronts.responses.schema import InputTokensBody, ResponseBody
from tests.unit.gateway.fronts.parity.client_types import samples_of

if TYPE_CHECKING:
    from collections.abc import Callable


def asked(call: Any) -> Any:
    """What a call asks for, but for its id, and without what its answer repeats of the body."""
    if hasattr(call, "requests"):
        requests = tuple(replace(request, request_id="") for request in call.requests)
        return replace(call, call_id="", names={}, requests=requests)
    named = replace(call, request=replace(call.request, request_id=""))
    return replace(named, echo={}) if hasattr(call, "echo") else named


@dataclass(frozen=True, eq=False)
class Api:
    """A call: the client's type of its body, ours, what is always in it, and what it asks the core for."""

    params: Any
    body: Any
    base: dict[str, Any]
    understand: Callable[[Any], Any]


CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def _messages(params: Any) -> Api:
    return Api(params, MessagesBody, {**CHAT, "max_tokens": 5}, lambda body: asked(of_messages.understand(body, "")))


def _count(params: Any) -> Api:
    return Api(params, CountBody, CHAT, lambda body: of_messages.understand_count(body, ""))


APIS = {
    "messages": _messages(message_create_params.MessageCreateParamsStreaming),
    "beta messages": _messages(beta_create_params.MessageCreateParamsStreaming),
    "count_tokens": _count(message_count_tokens_params.MessageCountTokensParams),
    "beta count_tokens": _count(beta_count_params.MessageCountTokensParams),
    "chat": Api(
        chat_params.CompletionCreateParamsStreaming,
        ChatBody,
        CHAT,
        lambda body: asked(understand_chat(body)),
    ),
    "completions": Api(
        completion_create_params.CompletionCreateParamsStreaming,
        CompletionBody,
        {"prompt": "Hi"},
        lambda body: asked(understand_completion(body)),
    ),
    "responses": Api(
        response_create_params.ResponseCreateParamsStreaming,
        ResponseBody,
        {"input": "Hi"},
        lambda body: asked(of_responses.understand(body, "", 0)),
    ),
    "input_tokens": Api(
        input_token_count_params.InputTokenCountParams,
        InputTokensBody,
        {},
        lambda body: of_responses.understand_count(body, ""),
    ),
}
# What goes only beside something else.
BESIDE: dict[tuple[Any, str], dict[str, Any]] = {
    (ChatBody, "stream_options"): {"stream": True},
    (ChatBody, "top_logprobs"): {"logprobs": True},
    (CompletionBody, "stream_options"): {"stream": True},
    (ResponseBody, "top_logprobs"): {"include": ["message.output_text.logprobs"]},
}
# What is taken and has no effect, as the reference says: labels, and what works by itself or is of answers alone here.
_OF_MESSAGES = {"betas", "cache_control", "context_management", "diagnostics", "user_profile_id", "workspace_id"}
_IN_MESSAGES = {"eager_input_streaming", "is_error"}
_OF_OPENAI = {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier"}
_OF_ITEMS = {"encrypted_content", "id", "input.name", "input.namespace", "logprobs", "phase", "status"}
_OF_FIELDS = {"description", "generate_summary", "output_schema", "prompt_cache_breakpoint", "strict", "summary"}
_IN_RESPONSES = _OF_ITEMS | _OF_FIELDS
HARMLESS: dict[Any, set[str]] = {
    MessagesBody: _OF_MESSAGES | _IN_MESSAGES | {"metadata", "service_tier"},
    CountBody: (_OF_MESSAGES | _IN_MESSAGES | {"display", "format"}) - {"diagnostics"},
    ChatBody: _OF_OPENAI
    | {"description", "metadata", "prediction", "prompt_cache_breakpoint", "store", "strict", "user"},
    CompletionBody: {"user"},
    ResponseBody: _OF_OPENAI | _IN_RESPONSES | {"max_tool_calls", "metadata", "user"},
    # All of a form says how an answer is written.
    InputTokensBody: (_IN_RESPONSES | {"format"}) - {"strict"},
}


def ask(api: Api, fields: dict[str, Any], path: str) -> Any:
    """What a body asks for; None where it is refused by name."""
    beside = BESIDE.get((api.body, re.split(r"\W", path)[0]), {})
    try:
        body = parse_body(api.body, json.dumps({**api.base, **beside, **fields}).encode())
    except BlockyardError as error:
        wrong = [(each.field, each.description) for each in error.violations if each.reason is Reason.FIELD_INVALID]
        assert not wrong, f"{path}: {fields}"
        return None
    return api.understand(body)


@functools.cache
def silent_of(api: Api) -> dict[str, str]:
    """The fields that are taken and change nothing, and the name by which each is listed; empty: it is not."""
    told: set[str] = set()
    optional: dict[str, None] = {}
    for path, value, without in samples_of(api.params):
        outcome = ask(api, value, path)
        # A type by itself says nothing.
        if without is not None and not path.endswith(".type"):
            optional[path] = None
            if outcome is None or outcome != ask(api, without, path):
                told |= {path, *(path[: found.start()] for found in re.finditer(r"[.<\[{]", path))}
    return {path: _listed(path, HARMLESS[api.body]) for path in optional if path not in told}


def _listed(path: str, names: set[str]) -> str:
    plain = re.sub(r"<\w+>|\[\]|\{\}", "", path)
    return next((name for name in sorted(names) if f".{name}." in f".{plain}."), "")


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_a_field_is_served_or_refused_by_name_or_listed(api: Api) -> None:
    assert not [path for path, name in silent_of(api).items() if not name]


@pytest.mark.parametrize("body", HARMLESS, ids=lambda body: body.__name__)
def test_what_is_listed_has_no_effect(body: Any) -> None:
    used = {name for api in APIS.values() if api.body is body for name in silent_of(api).values()}
    assert used == HARMLESS[body]
