"""What an HTTP call leaves with its requests, so that any gateway can tell its answer again in the same shape."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from blockyard.gateway.v1 import state_pb2
from gateway.fronts.openai.call_spec import CallSpec
from gateway.request import OnDisconnect

if TYPE_CHECKING:
    from gateway.request import GenerationRequest
    from gateway.text.tokenizer import Tokenizer


def with_state(call: CallSpec, *, tenant: str, keeps: bool, created: int) -> CallSpec:
    """Gives the requests of a call what its body does not say.

    Args:
        call: as its body was understood.
        tenant: whose it is.
        keeps: its requests outlive their connection.
        created: when it came, in seconds since 1970.
    """
    state = state_pb2.HttpCall(
        call_id=call.call_id,
        is_chat=call.is_chat,
        created=created,
        include_usage=call.include_usage,
        num_requests=len(call.requests),
        echo=bool(call.echoes),
        tells_prompt_logprobs=call.tells_prompt_logprobs,
        continuous_usage=call.continuous_usage,
        tokens_as_ids=call.tokens_as_ids,
        # That of a completion is made again of its prompt.
        echo_text="".join(call.echoes) if call.is_chat else "",
    )
    added: dict[str, Any] = {"tenant": tenant, "front_state": state.SerializeToString()}
    if keeps:
        added["on_disconnect"] = OnDisconnect.KEEP
    return replace(call, requests=tuple(replace(request, **added) for request in call.requests))


def read_state(request: GenerationRequest) -> state_pb2.HttpCall:
    """Reads the shape of a request's call. One that came over gRPC is told as a completion."""
    state = state_pb2.HttpCall.FromString(request.front_state)
    state.call_id = state.call_id or request.request_id
    state.num_requests = state.num_requests or 1
    return state


def call_of(requests: list[GenerationRequest], tokenizer: Tokenizer) -> CallSpec:
    """Makes the call again of its requests, whose prompts are ids, as a stream."""
    state = read_state(requests[0])
    prompts = [request.prompt for request in requests if isinstance(request.prompt, tuple)]
    texts = tokenizer.token_texts(skip_special_tokens=requests[0].skip_special_tokens)
    return CallSpec(
        state.call_id,
        is_chat=state.is_chat,
        requests=tuple(requests),
        stream=True,
        include_usage=state.include_usage,
        continuous_usage=state.continuous_usage,
        echoes=_echoes(state, prompts, tokenizer),
        tokens_as_ids=state.tokens_as_ids,
        first_tokens=tuple(texts.of(prompt[0]) for prompt in prompts),
        tells_prompt_logprobs=state.tells_prompt_logprobs,
    )


def _echoes(state: state_pb2.HttpCall, prompts: list[tuple[int, ...]], tokenizer: Tokenizer) -> tuple[str, ...]:
    if state.is_chat:
        return (state.echo_text,) if state.echo else ()
    return tuple(map(tokenizer.decode, prompts)) if state.echo else ()
