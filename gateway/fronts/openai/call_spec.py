"""Turns the body of an HTTP call into requests to the gateway's core, and the options of its answer."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from blockyard.contract.chat import Role
from blockyard.contract.request import OnDisconnect, OnUpdate
from blockyard.contract.sampling import NUMBERS, BeamSearch, EarlyStopping, SamplingParams, StopCriteria
from blockyard.errors import BlockyardError
from gateway.fronts.openai.schema.formats import read_format
from gateway.fronts.openai.schema.requests import StreamOptions
from gateway.request import GenerationRequest
from gateway.text.answer_parsing import with_parsing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.contract.chat import Conversation
    from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody, GenerationBody
    from gateway.generation import GenerationService

# OpenAI's own; a chat may be as long as the model allows.
DEFAULT_COMPLETION_TOKENS = 16
_EARLY_STOPPING = {True: EarlyStopping.FIRST, "never": EarlyStopping.NEVER}


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One call of a client.

    Each prompt is a request of its own. Choice number `prompt * n + index` of the answer is the sequence `index` of
    the request `prompt`.
    """

    call_id: str
    is_chat: bool
    requests: tuple[GenerationRequest, ...]
    stream: bool = False
    include_usage: bool = False
    # In every chunk, not in the last alone.
    continuous_usage: bool = False
    # max_tokens is OpenAI's default: it gives way where the model's length leaves less.
    default_length: bool = False
    # Put before each prompt's texts.
    echoes: tuple[str, ...] = ()
    # Each prompt's first token, its text and its bytes, for echoes with log probabilities.
    first_tokens: tuple[tuple[str, bytes], ...] = ()
    # Not, where they are only computed for an echo.
    tells_prompt_logprobs: bool = False
    # Log probabilities name tokens by their ids, not by their texts.
    tokens_as_ids: bool = False
    # The answer leaves out what the model thinks.
    hides_reasoning: bool = False
    # The caller's names for the core's fields, where they differ from call to call.
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def n(self) -> int:
        return self.requests[0].n

    @property
    def returns_token_ids(self) -> bool:
        return self.requests[0].return_token_ids

    @property
    def returns_logprobs(self) -> bool:
        return self.requests[0].sampling.logprobs is not None

    @property
    def echoes_logprobs(self) -> bool:
        """Whether an echo waits for the log probabilities of its prompt."""
        return bool(self.echoes) and self.returns_logprobs and not self.is_chat

    @property
    def needs_token_ids(self) -> bool:
        """Whether prompts have to be ids before they run: the answer shows their ids or log probabilities."""
        return self.returns_token_ids or self.echoes_logprobs or self.echoes_ids

    @property
    def echoes_ids(self) -> bool:
        """Whether an echo is the text of ids: the prompt was sent as such, or only a part of it is left."""
        is_cut = self.requests[0].truncate_prompt_tokens is not None
        given_ids = any(isinstance(request.prompt, tuple) for request in self.requests)
        return bool(self.echoes) and not self.is_chat and (is_cut or given_ids)

    def prompt_token_ids(self, prompt: int) -> tuple[int, ...]:
        """Returns the ids of a prompt, once `with_token_ids` has made them."""
        token_ids = self.requests[prompt].prompt
        return token_ids if isinstance(token_ids, tuple) else ()


def understand_completion(body: CompletionBody) -> CallSpec:
    call_id = body.request_id or f"cmpl-{uuid.uuid4().hex}"
    prompts: list[str | tuple[int, ...]] = body.prompt
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    request = _with_logprobs(_request(body, max_tokens), body.logprobs, for_prompt=bool(body.echo))
    request = replace(request, add_special_tokens=body.add_special_tokens is not False)
    ids = [call_id] if len(prompts) == 1 else [f"{call_id}-{number}" for number in range(len(prompts))]
    return CallSpec(
        call_id,
        is_chat=False,
        requests=tuple(
            replace(request, request_id=request_id, prompt=prompt)
            for request_id, prompt in zip(ids, prompts, strict=True)
        ),
        default_length=body.max_tokens is None,
        # The texts of ids are found where they are needed.
        echoes=tuple(prompt if isinstance(prompt, str) else "" for prompt in prompts) if body.echo else (),
        **_answer_options(body),
        names=_format_names(body),
    )


def understand_chat(body: ChatBody) -> CallSpec:
    call_id = body.request_id or f"chatcmpl-{uuid.uuid4().hex}"
    length_name, max_tokens = "max_completion_tokens", body.max_completion_tokens
    if max_tokens is None:
        length_name, max_tokens = "max_tokens", body.max_tokens
    request = _with_logprobs(_request(body, max_tokens), body.top_logprobs or 0 if body.logprobs else None)
    conversation = body.conversation()
    request = replace(request, request_id=call_id, prompt=conversation)
    return CallSpec(
        call_id,
        is_chat=True,
        requests=(request,),
        echoes=_echo_of(conversation) if body.echo else (),
        hides_reasoning=body.include_reasoning is False,
        **_answer_options(body),
        names={"prompt": "messages", "max_tokens": length_name, "logprobs": "top_logprobs", **_format_names(body)},
    )


async def with_token_ids(call: CallSpec, service: GenerationService) -> CallSpec:
    """Turns prompts that are text into ids, where the answer shows the ids or their log probabilities."""
    if not call.needs_token_ids:
        return call
    try:
        prompts = [await service.prompt_of(request) for request in call.requests]
        echoes = await _echoes_of(call, prompts, service) if call.echoes_ids else call.echoes
    except BlockyardError:
        # `start` raises it too, with everything else that is wrong.
        return call
    tokenizer, models = await service.find_tokenizer(call.requests[0].model), service.models()
    vocab_size = models[0].vocab_size if models else 0
    texts = tokenizer.token_texts(skip_special_tokens=call.requests[0].skip_special_tokens)
    return replace(
        call,
        requests=tuple(
            # The prompt becomes ids here: set the parser now, while its tools are still known.
            replace(with_parsing(request, tokenizer.dialect), prompt=prompt)
            for request, prompt in zip(call.requests, prompts, strict=True)
        ),
        # An empty prompt and one of foreign ids are refused later, with all else that is wrong.
        first_tokens=tuple(
            texts.of(prompt[0]) if prompt and 0 <= prompt[0] < vocab_size else ("", b"") for prompt in prompts
        ),
        echoes=echoes,
    )


async def _echoes_of(call: CallSpec, prompts: list[tuple[int, ...]], service: GenerationService) -> tuple[str, ...]:
    first = call.requests[0]
    return tuple([await service.text_of(prompt, first.model, first.tenant) for prompt in prompts])


def _request(body: GenerationBody, max_tokens: int | None) -> GenerationRequest:
    numbers: dict[str, Any] = {name: getattr(body, name) for name in NUMBERS}
    if body.top_k == -1:
        numbers["top_k"] = 0
    return GenerationRequest(
        prompt="",
        model=body.model or "",
        sampling=SamplingParams(
            **numbers,
            seed=body.seed,
            logit_bias=body.logit_bias or {},
            allowed_token_ids=tuple(body.allowed_token_ids or ()),
            bad_words=tuple(body.bad_words or ()),
            prompt_logprobs=body.prompt_logprobs,
        ),
        stop=StopCriteria(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            stop_strings=tuple(body.stop or ()),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            include_stop_in_output=bool(body.include_stop_str_in_output),
        ),
        n=1 if body.n is None else body.n,
        return_token_ids=bool(body.return_token_ids),
        skip_special_tokens=body.skip_special_tokens is not False,
        on_disconnect=OnDisconnect(body.on_disconnect or "abort"),
        on_update=OnUpdate(body.on_update or "continue"),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=body.priority or 0,
        max_queue_seconds=body.max_queue_time,
        beam_search=_beams(body) if body.use_beam_search else None,
        format=asked.output if (asked := read_format(body)) else None,
    )


def _format_names(body: GenerationBody) -> dict[str, str]:
    asked = read_format(body)
    return {asked.field: asked.parameter, "format": asked.parameter} if asked else {}


def _beams(body: GenerationBody) -> BeamSearch:
    n = 1 if body.n is None else body.n
    return BeamSearch(
        width=n if body.best_of is None else body.best_of,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=_EARLY_STOPPING.get(body.early_stopping or False, EarlyStopping.HEURISTIC),
    )


def _with_logprobs(request: GenerationRequest, logprobs: int | None, *, for_prompt: bool = False) -> GenerationRequest:
    """Asks for log probabilities; `for_prompt`: for as many of the prompt too, unless it says how many."""
    prompt_logprobs = request.sampling.prompt_logprobs
    if for_prompt and prompt_logprobs is None:
        prompt_logprobs = logprobs
    return replace(request, sampling=replace(request.sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs))


def _answer_options(body: GenerationBody) -> dict[str, Any]:
    options = body.stream_options or StreamOptions()
    return {
        "stream": bool(body.stream),
        "include_usage": bool(options.include_usage),
        "continuous_usage": bool(options.include_usage and options.continuous_usage_stats),
        "tells_prompt_logprobs": body.prompt_logprobs is not None,
        "tokens_as_ids": bool(body.return_tokens_as_token_ids),
    }


def _echo_of(conversation: Conversation) -> tuple[str, ...]:
    """Returns the final message if the answer has its role, by vLLM's rule. An empty chat is refused later."""
    last = conversation.messages[-1:]
    goes_on = conversation.continue_final_message or conversation.add_generation_prompt is False
    return tuple(message.text or "" for message in last if goes_on or message.role is Role.ASSISTANT)
