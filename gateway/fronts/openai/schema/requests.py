"""The bodies of completions and chats: names, types, and the parameters that are not supported.

Checks names and types. The gateway's core checks ranges of values, for all fronts.

There are four kinds of parameters: parameters that work; parameters that are accepted without an effect, such as
`user`; parameters of OpenAI or vLLM that are not supported yet, for which any but the neutral value is an error; and
unknown parameters, which are errors too, since a misspelt parameter would otherwise be ignored silently.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from gateway.fronts.http_calls.body_types import Neutral, NotServed, Shape, TokenIdKey, at_most, unsupported
from gateway.fronts.openai.schema.formats import FormatShape
from gateway.fronts.openai.schema.messages import ChatShape, PredictedContent
from gateway.validation import MAX_LOGIT_BIASES

if TYPE_CHECKING:
    from blockyard.contract import chat

# The most prompts of a completion, each of which becomes a request: OpenAI's limit for the inputs of embeddings.
MAX_PROMPTS = 2048
# The most entries of `metadata`: validating as many as 16 MiB hold would block the event loop for a minute.
MAX_METADATA = 64


def _check_stop(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise PydanticCustomError("stop", "should be a string or a list of strings")
    return value


# As in vLLM, an empty salt is refused.
CacheSalt = Annotated[str, Field(min_length=1)]
Stop = Annotated[list[str], BeforeValidator(_check_stop, json_schema_input_type=str | list[str])]


def _check_early_stopping(value: Any) -> Any:
    # Not a union: pydantic would report a violation for each of its branches.
    if value is None or isinstance(value, bool) or value == "never":
        return value
    raise PydanticCustomError("early_stopping", "should be true, false or 'never'")


class StreamOptions(Shape):
    """Options of a stream."""

    include_usage: bool | None = None
    # vLLM's parameter: every chunk has the usage so far. Only works with include_usage.
    continuous_usage_stats: bool | None = None
    include_obfuscation: Annotated[Any, Neutral(False)] = None


class NotServedYet(Shape):
    """vLLM's parameters, under present and former names, that are not supported yet."""

    ec_transfer_params: NotServed = None
    guided_decoding_backend: NotServed = None
    guided_whitespace_pattern: NotServed = None
    kv_transfer_params: NotServed = None
    logits_processors: NotServed = None
    logprob_token_ids: NotServed = None
    repetition_detection: NotServed = None
    return_token_offsets: Annotated[Any, Neutral(False)] = None
    spaces_between_special_tokens: Annotated[Any, Neutral(True)] = None
    stream_interval: Annotated[Any, Neutral(1)] = None
    structural_tag: NotServed = None
    truncation_side: Annotated[Any, Neutral("left")] = None
    vllm_xargs: NotServed = None
    watermarking: Annotated[Any, Neutral(False)] = None


class GenerationBody(NotServedYet, FormatShape):
    """The parameters that completions and chats share."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"session_id", "user"})

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Stop | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[TokenIdKey, float], at_most(MAX_LOGIT_BIASES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None

    # vLLM's parameters, under its names.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    priority: int | None = None
    use_beam_search: bool | None = None
    # The width of a beam search. Without beam search it must equal n.
    best_of: int | None = None
    length_penalty: float | None = None
    early_stopping: Annotated[bool | Literal["never"] | None, BeforeValidator(_check_early_stopping)] = None
    cache_salt: CacheSalt | None = None

    # Blockyard's own parameters.
    predicted_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    speculation: bool | None = None
    max_queue_time: float | None = None
    on_disconnect: Literal["abort", "keep"] | None = None
    on_update: Literal["continue", "fail"] | None = None

    # Parameters that only label a request.
    session_id: str | None = None
    user: str | None = None

    @field_validator("stream_options")
    @classmethod
    def _check_stream_options(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and "stream" in info.data and not info.data["stream"]:
            raise PydanticCustomError("stream_options", "is only allowed when stream is true")
        return value

    @field_validator("best_of")
    @classmethod
    def _check_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        searches = info.data.get("use_beam_search", True)
        if value is not None and not searches and "n" in info.data and value != (info.data["n"] or 1):
            raise unsupported("is not supported, unless it equals n or use_beam_search is true")
        return value

    @field_validator("length_penalty", "early_stopping")
    @classmethod
    def _check_beam_search(cls, value: Any, info: ValidationInfo) -> Any:
        neutral = {"length_penalty": 1.0, "early_stopping": False}[info.field_name or ""]
        if value not in (None, neutral) and not info.data.get("use_beam_search", True):
            raise PydanticCustomError("beam_search", "is only allowed when use_beam_search is true")
        return value


Prompts = list[str] | list[tuple[int, ...]]


def _check_prompt(value: Any) -> Prompts:
    """Turns the four forms of `prompt` into a list of prompts: a text, token ids, a list of texts, a list of ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_token_ids(value):
            return [tuple(value)]
        if len(value) > MAX_PROMPTS:
            raise PydanticCustomError("prompt", "has more than {limit} prompts", {"limit": MAX_PROMPTS})
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and _are_token_ids(item) for item in value):
            return [tuple(item) for item in value]
    raise PydanticCustomError("prompt", "should be a string, a list of strings, token ids, or a list of token id lists")


def _are_token_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


# The types of `prompt` in the OpenAPI document.
_Text = Annotated[str, Field(min_length=1)]
_TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
_Several = Field(min_length=1, max_length=MAX_PROMPTS)
_PromptForms = _Text | Annotated[list[_Text], _Several] | _TokenIds | Annotated[list[_TokenIds], _Several]


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    HAS_LONG_LISTS: ClassVar[bool] = True

    prompt: Annotated[Any, BeforeValidator(_check_prompt, json_schema_input_type=_PromptForms)]
    logprobs: int | None = None
    prompt_embeds: NotServed = None
    suffix: str | None = None

    @field_validator("suffix")
    @classmethod
    def _check_suffix(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value and info.data.get("echo"):
            raise unsupported("is not supported with echo")
        return value


class ChatBody(GenerationBody, ChatShape):
    """The body of /v1/chat/completions."""

    # Parameters that label a request, or tune features that work automatically here.
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = GenerationBody.WITHOUT_EFFECT | {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
    }

    # Chat templates write all special tokens themselves.
    add_special_tokens: Annotated[Any, Neutral(False)] = None
    max_completion_tokens: int | None = None
    # A text that the answer may repeat in part: then its tokens come sooner where workers draft.
    prediction: PredictedContent | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    # vLLM's parameter: false leaves the reasoning out of the answer.
    include_reasoning: bool | None = None

    audio: NotServed = None
    function_call: Annotated[Any, Neutral("none", "auto")] = None
    functions: Annotated[Any, Neutral([])] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    moderation: NotServed = None
    return_prompt_text: Annotated[Any, Neutral(False)] = None
    verbosity: Annotated[Any, Neutral("medium")] = None
    web_search_options: NotServed = None

    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None

    def conversation(self) -> chat.Conversation:
        return replace(super().conversation(), parse_answer=True, one_tool_call=self.parallel_tool_calls is False)

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs", True):
            raise PydanticCustomError("top_logprobs", "is only allowed when logprobs is true")
        return value


class LoadBody(Shape):
    """The body of /v1/models/load."""

    model: str
