"""Turns the body of a call of the Responses API into a request to the gateway's core, and the options of its answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from blockyard.clock import SYSTEM, Clock
from blockyard.contract import chat
from blockyard.contract.chat import ToolChoice
from blockyard.contract.request import OnDisconnect
from blockyard.contract.sampling import SamplingParams, StopCriteria
from blockyard.errors import BlockyardError, Reason
from gateway.chat import effort_arguments
from gateway.fronts.http_calls.errors import Placed, format_parameter, naming_places, rename_violations
from gateway.fronts.openai import errors
from gateway.fronts.openai.call_codec import decode_state, encode_state
from gateway.fronts.openai.call_state import CallState
from gateway.fronts.responses.items import placed_messages
from gateway.fronts.responses.schema import LOGPROBS, InputTokensBody, ResponseBody
from gateway.fronts.responses.tools import (
    AllowedTools,
    NamedTool,
    check_names,
    check_sizes,
    chosen_names,
    placed_tools,
)
from gateway.request import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from gateway.fronts.responses.tools import PlacedTool

_NAMES = {"prompt": "input", "messages": "input", "max_tokens": "max_output_tokens", "logprobs": "top_logprobs"}


@dataclass(frozen=True, slots=True)
class ResponseCall:
    """One call of a client.

    Attributes:
        request: the request to the core.
        created: the call's arrival, in seconds since 1970.
        echo: the fields of the answer that repeat the body.
        stream: whether the answer is a stream.
        background: whether the response outlives the client's connection.
    """

    request: GenerationRequest
    created: int
    echo: dict[str, Any]
    stream: bool
    background: bool


def understand(body: ResponseBody, tenant: str, created: int, clock: Clock = SYSTEM) -> ResponseCall:
    """Makes the call from a body; raises BlockyardError. `created`: the arrival, in seconds since 1970."""
    request = GenerationRequest(
        prompt=_conversation(body),
        request_id=f"resp_{clock.uuid_hex()}",
        model=body.model or "",
        sampling=SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            logprobs=body.top_logprobs or 0 if LOGPROBS in (body.include or ()) else None,
        ),
        stop=StopCriteria(max_tokens=body.max_output_tokens),
        format=body.text.format.as_format() if body.text and body.text.format else None,
        tenant=tenant,
        cache_salt=body.cache_salt or "",
    )
    call = ResponseCall(request, created, _echo(body), bool(body.stream), bool(body.background))
    return _kept(call) if call.background else call


def understand_count(body: ResponseBody | InputTokensBody, tenant: str) -> GenerationRequest:
    """Makes a request from a body, to count its prompt's tokens.

    Raises BlockyardError.
    """
    return GenerationRequest(prompt=_conversation(body), model=body.model or "", tenant=tenant)


def rename(error: BlockyardError) -> BlockyardError:
    """Renames the fields in an error of the core to the parameters of the API."""
    return rename_violations(
        error, lambda field: format_parameter(field, "text.format") or errors.parameter(field, _NAMES)
    )


def _placed_messages(body: ResponseBody | InputTokensBody) -> list[Placed]:
    return placed_messages(body.instructions, body.input or [])


def naming_body_places(body: ResponseBody | InputTokensBody) -> AbstractContextManager[None]:
    """Renames the messages and the tools in an error of the core to their paths in the body."""
    return naming_places(
        lambda: _placed_messages(body), lambda: [tool.place for tool in placed_tools(body.tools or ())]
    )


def _conversation(body: ResponseBody | InputTokensBody) -> chat.Conversation:
    tools = [*placed_tools(body.tools or ())]
    check_sizes(tools)
    check_names(tools)
    effort = body.reasoning.effort if body.reasoning else None
    choice, named, allowed = _chosen(body.tool_choice, tools)
    return chat.Conversation(
        messages=tuple(each.message for each in _placed_messages(body)),
        tools=tuple(tool.as_tool() for tool in tools),
        tool_choice=choice,
        named_tool=named,
        allowed_tools=allowed,
        one_tool_call=body.parallel_tool_calls is False,
        parse_answer=True,
        template_arguments=effort_arguments(effort),
    )


def _chosen(choice: Any, tools: Sequence[PlacedTool]) -> tuple[ToolChoice, str, tuple[str, ...]]:
    """Reads a tool choice. Returns the choice, the name of the tool to call, and the names of the allowed tools."""
    match choice:
        case NamedTool():
            return ToolChoice.REQUIRED, chosen_names([choice], tools)[0], ()
        case AllowedTools():
            return ToolChoice(choice.mode), "", chosen_names(choice.tools, tools)
        case _:
            return ToolChoice(choice or "auto"), "", ()


def _echo(body: ResponseBody) -> dict[str, Any]:
    """Returns the fields of the answer that repeat the body; missing fields have the API's defaults."""
    not_repeated = {"cache_salt", "client_metadata", "include", "input", "stream", "stream_options"}
    repeated = body.model_dump(by_alias=True, exclude_unset=True, exclude=not_repeated)
    return {
        "background": False,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "disabled",
        "metadata": {},
        "user": None,
        **{name: value for name, value in repeated.items() if value is not None},
        "store": False,
    }


def _kept(call: ResponseCall) -> ResponseCall:
    """Returns the call with a request that outlives its connection and carries the state for any gateway to answer."""
    state = CallState(
        call.request.request_id, is_chat=True, created=call.created, response=json.dumps(call.echo, ensure_ascii=False)
    )
    request = replace(call.request, on_disconnect=OnDisconnect.KEEP, front_state=encode_state(state))
    return replace(call, request=request)


def call_of(request: GenerationRequest) -> ResponseCall:
    """Restores the call of a request; raises BlockyardError REQUEST_EXPIRED for a request of another API."""
    state = decode_state(request.front_state, request.request_id)
    if not state.response:
        raise BlockyardError(Reason.REQUEST_EXPIRED, f"{request.request_id!r} is not a response in the background")
    return ResponseCall(request, state.created, json.loads(state.response), stream=True, background=True)
