"""Turns the body of an HTTP call into requests to the gateway's core, and the options of its answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from blockyard.clock import SYSTEM, Clock
from blockyard.contract.chat import Conversation, Role
from blockyard.contract.request import OnDisconnect, OnUpdate
from blockyard.contract.sampling import NUMBERS, BeamSearch, EarlyStopping, SamplingParams, StopCriteria
from blockyard.errors import BlockyardError
from gateway.fronts.openai.schema.formats import read_format
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody, GenerationBody, StreamOptions
from gateway.request import GenerationRequest
from gateway.text.answer_parsing import with_parsing
from gateway.text.encoding import with_fill_ends

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gateway.generation import GenerationService

# OpenAI's default for completions; a chat may be as long as the model allows.
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
    # Whether every chunk has usage, not only the last one.
    continuous_usage: bool = False
    # Whether max_tokens is OpenAI's default, which is dropped if the model's length leaves less room.
    default_length: bool = False
    # For each prompt, the text to put before its choices' texts; empty without `echo`.
    echoes: tuple[str, ...] = ()
    # For each prompt, the text and the bytes of its first token, for echoes with log probabilities.
    first_tokens: tuple[tuple[str, bytes], ...] = ()
    # Whether the answer has `prompt_logprobs`; false if they are only computed for an echo.
    tells_prompt_logprobs: bool = False
    # Whether log probabilities name tokens by their ids instead of their texts.
    tokens_as_ids: bool = False
    # Whether the answer leaves out the reasoning.
    hides_reasoning: bool = False
    # This call's parameter names for fields of the core, where they differ from the general names.
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
        """Whether the echo is sent together with the log probabilities of its prompt."""
        return bool(self.echoes) and self.returns_logprobs and not self.is_chat

    @property
    def needs_token_ids(self) -> bool:
        """Whether prompts must become ids before the requests start: the answer shows the ids or a part of them."""
        return self.returns_token_ids or self.echoes_logprobs or self.echoes_ids

    @property
    def echoes_ids(self) -> bool:
        """Whether the echo is decoded from ids: the prompt was sent as ids, or is truncated."""
        is_cut = self.requests[0].truncate_prompt_tokens is not None
        given_ids = any(isinstance(request.prompt, tuple) for request in self.requests)
        return bool(self.echoes) and not self.is_chat and (is_cut or given_ids)

    def prompt_token_ids(self, prompt: int) -> tuple[int, ...]:
        """Returns the ids of a prompt; empty before `with_token_ids` has tokenized it."""
        token_ids = self.requests[prompt].prompt
        return token_ids if isinstance(token_ids, tuple) else ()


def understand_completion(body: CompletionBody, clock: Clock = SYSTEM) -> CallSpec:
    call_id = body.request_id or f"cmpl-{clock.uuid_hex()}"
    prompts: list[str | tuple[int, ...]] = body.prompt
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    request = _with_logprobs(_request(body, max_tokens), body.logprobs, for_prompt=bool(body.echo))
    request = replace(request, add_special_tokens=body.add_special_tokens is not False, suffix=body.suffix or "")
    ids = [call_id] if len(prompts) == 1 else [f"{call_id}-{number}" for number in range(len(prompts))]
    return CallSpec(
        call_id,
        is_chat=False,
        requests=tuple(
            replace(request, request_id=request_id, prompt=prompt)
            for request_id, prompt in zip(ids, prompts, strict=True)
        ),
        default_length=body.max_tokens is None,
        # `with_token_ids` replaces the echoes of prompts that are ids.
        echoes=tuple(prompt if isinstance(prompt, str) else "" for prompt in prompts) if body.echo else (),
        **_answer_options(body),
        names=_format_names(body),
    )


def understand_chat(body: ChatBody, clock: Clock = SYSTEM) -> CallSpec:
    call_id = body.request_id or f"chatcmpl-{clock.uuid_hex()}"
    length_name, max_tokens = "max_completion_tokens", body.max_completion_tokens
    if max_tokens is None:
        length_name, max_tokens = "max_tokens", body.max_tokens
    request = _with_logprobs(_request(body, max_tokens), body.top_logprobs or 0 if body.logprobs else None)
    conversation = body.conversation()
    prediction = body.prediction.content if body.prediction else ""
    request = replace(request, request_id=call_id, prompt=conversation, prediction=prediction)
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
    """Tokenizes the prompts of a call whose answer shows the ids or their log probabilities."""
    if not call.needs_token_ids:
        return call
    try:
        prompts = [tuple(await service.prompt_of(request)) for request in call.requests]
        echoes = await _echoes_of(call, prompts, service) if call.echoes_ids else call.echoes
    except BlockyardError:
        # `start` raises this error too, together with all other violations.
        return call
    name = call.requests[0].model
    tokenizer, vocab_size = await service.find_tokenizer(name), service.model_of(name).vocab_size
    texts = tokenizer.token_texts(skip_special_tokens=call.requests[0].skip_special_tokens)
    return replace(
        call,
        requests=tuple(
            # The prompt becomes ids here: set what depends on its tools and its suffix now, while these are known.
            replace(with_fill_ends(with_parsing(request, tokenizer.dialect), tokenizer), prompt=prompt)
            for request, prompt in zip(call.requests, prompts, strict=True)
        ),
        # Validation refuses an empty prompt, or ids outside the vocabulary, later, with all other violations.
        first_tokens=tuple(
            texts.of(prompt[0]) if prompt and 0 <= prompt[0] < vocab_size else ("", b"") for prompt in prompts
        ),
        echoes=echoes,
    )


async def _echoes_of(call: CallSpec, prompts: list[tuple[int, ...]], service: GenerationService) -> tuple[str, ...]:
    first = call.requests[0]
    model = service.model_of(first.model)
    return tuple([await model.text_of(prompt, first.model, first.tenant) for prompt in prompts])


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
            predicted_token_ids=tuple(body.predicted_token_ids or ()),
            speculation=body.speculation,
            bad_words=tuple(body.bad_words or ()),
            prompt_logprobs=body.prompt_logprobs,
            thinking_token_budget=None if body.thinking_token_budget == -1 else body.thinking_token_budget,
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
        cache_salt=body.cache_salt or "",
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
    """Sets the number of log probabilities. `for_prompt`: also for the prompt, unless the body sets its number."""
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
    """Returns the text of the final message if the answer has that message's role, as vLLM does; else an empty tuple.

    Validation refuses an empty chat later.
    """
    last = conversation.messages[-1:]
    goes_on = conversation.continue_final_message or conversation.add_generation_prompt is False
    return tuple(message.text or "" for message in last if goes_on or message.role is Role.ASSISTANT)
