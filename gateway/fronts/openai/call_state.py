"""The state of an HTTP call that its requests carry, so that any gateway can resume it in the same form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.fronts.openai.call_spec import CallSpec

if TYPE_CHECKING:
    from gateway.request import GenerationRequest
    from gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class CallState:
    """The form of a call's answer. The fields that are not described here are those of CallSpec.

    `created`: the call's arrival, in seconds since 1970. `echo_text`: the echo of a chat; the echo of a completion is
    decoded from its prompt.
    """

    call_id: str
    is_chat: bool = False
    created: int = 0
    include_usage: bool = False
    num_requests: int = 1
    echo: bool = False
    tells_prompt_logprobs: bool = False
    continuous_usage: bool = False
    tokens_as_ids: bool = False
    echo_text: str = ""
    hides_reasoning: bool = False
    # For a response in the background: the fields of its answer that repeat its body, as JSON.
    response: str = ""


def make_state(call: CallSpec, created: int) -> CallState:
    return CallState(
        call_id=call.call_id,
        is_chat=call.is_chat,
        created=created,
        include_usage=call.include_usage,
        num_requests=len(call.requests),
        echo=bool(call.echoes),
        tells_prompt_logprobs=call.tells_prompt_logprobs,
        continuous_usage=call.continuous_usage,
        tokens_as_ids=call.tokens_as_ids,
        echo_text="".join(call.echoes) if call.is_chat else "",
        hides_reasoning=call.hides_reasoning,
    )


def make_call(state: CallState, requests: list[GenerationRequest], tokenizer: Tokenizer) -> CallSpec:
    """Restores a call from its state and its requests, whose prompts are ids. The restored call streams."""
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
        hides_reasoning=state.hides_reasoning,
        first_tokens=tuple(texts.of(prompt[0]) for prompt in prompts),
        tells_prompt_logprobs=state.tells_prompt_logprobs,
    )


def _echoes(state: CallState, prompts: list[tuple[int, ...]], tokenizer: Tokenizer) -> tuple[str, ...]:
    if state.is_chat:
        return (state.echo_text,) if state.echo else ()
    return tuple(map(tokenizer.decode, prompts)) if state.echo else ()
