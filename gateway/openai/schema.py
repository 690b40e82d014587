"""The bodies that the OpenAI API takes: names, types, and what of them is not served.

Owns the shape of a body. Ranges of values are checked by the gateway's core, once for both fronts.

A parameter is one of four kinds: it works; it is taken and has no effect here (`user`, say); it is known to the API or
to vLLM but not served yet, and then anything but its neutral value is an error; or nobody knows it, which is an error
as well, since a misspelt parameter would otherwise change an answer in silence.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError, core_schema

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler

# As many inputs as OpenAI takes in one call elsewhere; each becomes a request of its own.
MAX_PROMPTS = 2048
# What 16 MiB could hold of these would keep the event loop busy for a minute, with nothing but finding it wrong.
MAX_MESSAGES = 4096
MAX_LOGIT_BIASES = 4096
MAX_METADATA = 64
MAX_UNKNOWN_PARAMETERS = 64
# The kind of the errors that become Reason.UNSUPPORTED_PARAMETER.
UNSUPPORTED = "unsupported"


def _unsupported(description: str) -> PydanticCustomError:
    return PydanticCustomError(UNSUPPORTED, "{description}", {"description": description})


class Neutral:
    """Marks a parameter that is not served yet: null and the values given here are taken, as they ask for nothing."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def _check(self, value: Any) -> None:
        if value is None or any(value == neutral and type(value) is type(neutral) for neutral in self._values):
            return
        raise _unsupported("is not supported yet")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, *self._values], "description": "Not supported yet: leave it out."}


def _check_stop(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise PydanticCustomError("stop", "should be a string or a list of strings")
    return value


def _at_most(limit: int) -> BeforeValidator:
    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(cast("list[Any]", value)) > limit:
            raise PydanticCustomError("too_many", "has more than {limit} entries", {"limit": limit})
        return value

    return BeforeValidator(check)


# In JSON the key of an object is a string.
_TokenIdKey = Annotated[int, Field(strict=False)]
Stop = Annotated[list[str], BeforeValidator(_check_stop, json_schema_input_type=str | list[str])]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _bound(cls, value: Any) -> Any:
        """Keeps some of the parameters that nobody knows: each is an error, and there may be a million."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {name: item for name, item in value.items() if name in cls.model_fields}
        unknown = itertools.islice((name for name in value if name not in known), MAX_UNKNOWN_PARAMETERS)
        return known | {name: value[name] for name in unknown}


class StreamOptions(_Shape):
    """What a stream tells beside its text."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[Any, Neutral(False)] = None
    continuous_usage_stats: Annotated[Any, Neutral(False)] = None


class GenerationBody(_Shape):
    """What both calls have in common."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"user"})

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Stop | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[_TokenIdKey, float], _at_most(MAX_LOGIT_BIASES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None

    # vLLM's, under its names.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1, fail_fast=True)] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    use_beam_search: bool | None = None
    # The width of a beam search. Without one it can only be n.
    best_of: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    # Ours.
    max_queue_time: float | None = None
    on_disconnect: Literal["abort", "keep"] | None = None

    user: str | None = None

    # vLLM's, not served yet.
    spaces_between_special_tokens: Annotated[Any, Neutral(True)] = None
    structured_outputs: Annotated[Any, Neutral()] = None
    truncate_prompt_tokens: Annotated[Any, Neutral()] = None
    response_format: Annotated[Any, Neutral({"type": "text"})] = None

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
            raise _unsupported("is not supported, unless it equals n or use_beam_search is true")
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
    """Makes a list of prompts of the four forms: a text, token ids, and a list of either."""
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


_TokenIdList = Annotated[list[int], Field(min_length=1)]
_PromptForms = str | list[str] | _TokenIdList | list[_TokenIdList]


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Annotated[Any, BeforeValidator(_check_prompt, json_schema_input_type=_PromptForms)]
    logprobs: int | None = None
    suffix: Annotated[Any, Neutral("")] = None


class TextPart(_Shape):
    """A piece of a message's content. Only text is served."""

    type: Literal["text"]
    text: str


def _join_content(value: Any) -> Any:
    """Makes one text of a message's parts, a line for each."""
    if not isinstance(value, list):
        return value
    for part in value:
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise _unsupported("has parts other than text, which are not supported yet")
        if not (isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str)):
            raise PydanticCustomError("content", "should be a string or a list of text parts")
    return "\n".join(part["text"] for part in value)


_ContentForms = str | list[TextPart] | None


class Message(_Shape):
    """One message of a chat. `developer` is what newer models call `system`; templates get it under the old name."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        str | None, BeforeValidator(_join_content, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    audio: Annotated[Any, Neutral()] = None
    function_call: Annotated[Any, Neutral()] = None
    refusal: Annotated[Any, Neutral("")] = None
    tool_calls: Annotated[Any, Neutral([])] = None

    def for_template(self) -> dict[str, Any]:
        """Gives what a chat template reads: the content as one text, and only fields that are set."""
        role = "system" if self.role == "developer" else self.role
        told = {
            "role": role,
            "content": self.content or "",
            "name": self.name,
            "reasoning_content": self.reasoning_content,
        }
        return {name: value for name, value in told.items() if value is not None}


# What a template is given by the call itself.
_TEMPLATE_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    # They label a request, tune a cache that works by itself, or speak of tools.
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "parallel_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "user",
        }
    )

    # Of several wrong ones the first is told.
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), _at_most(MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: Annotated[Any, Neutral(False)] = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_special_tokens: Annotated[Any, Neutral(False)] = None
    chat_template: Annotated[Any, Neutral()] = None
    continue_final_message: Annotated[Any, Neutral(False)] = None
    documents: Annotated[Any, Neutral([])] = None

    audio: Annotated[Any, Neutral()] = None
    function_call: Annotated[Any, Neutral("none", "auto")] = None
    functions: Annotated[Any, Neutral([])] = None
    modalities: Annotated[Any, Neutral(["text"])] = None
    moderation: Annotated[Any, Neutral()] = None
    prediction: Annotated[Any, Neutral()] = None
    reasoning_effort: Annotated[Any, Neutral("none")] = None
    service_tier: Annotated[Any, Neutral("auto", "default")] = None
    store: Annotated[Any, Neutral(False)] = None
    tool_choice: Annotated[Any, Neutral("none", "auto")] = None
    tools: Annotated[Any, Neutral([])] = None
    verbosity: Annotated[Any, Neutral("medium")] = None
    web_search_options: Annotated[Any, Neutral()] = None

    metadata: Annotated[dict[str, str], _at_most(MAX_METADATA)] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs", True):
            raise PydanticCustomError("top_logprobs", "is only allowed when logprobs is true")
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_chat_template_kwargs(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if taken := _TEMPLATE_VARIABLES.intersection(value or ()):
            raise PydanticCustomError(
                "chat_template_kwargs", "must not name {names}", {"names": ", ".join(sorted(taken))}
            )
        return value
