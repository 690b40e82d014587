"""The shapes of the API's answers, for its OpenAPI document and for tests.

Answers are not validated by them on the way out. A key that has a default is there only where it was asked for.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gateway.fronts.http_calls.body_types import Shape

Text = str | None
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class CachedTokens(Shape):
    """The part of the prompt that was found in the prefix cache, and the tokens of a soft prompt, which are no part."""

    cached_tokens: int
    virtual_tokens: int | None = None


class CompletionTokens(Shape):
    """How many tokens the text of the reasoning has by itself."""

    reasoning_tokens: int


class TokenUsage(Shape):
    """The tokens of a call. The details are known at its end; those of the answer are there where it has reasoning."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None
    completion_tokens_details: CompletionTokens | None = None


class PromptToken(Shape):
    """The log probability of a token of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(Shape):
    """A column for each property, a row for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ToldViolation(Shape):
    """One thing that is wrong with a request. `param` is null where it is the body as a whole."""

    param: Text
    message: str
    code: str


class Error(Shape):
    """Why a call or a choice failed. `code` is the reason, or OpenAI's name for it; `param` the first violation's
    parameter."""

    message: str
    type: str
    param: Text
    code: Text
    reason: Text = None
    violations: list[ToldViolation] = Field(default_factory=list[ToldViolation])


class AnswerChoice(Shape):
    """The fields that both kinds of choice have."""

    index: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    score: float | None = None
    error: Error | None = None
    token_ids: list[int] | None = None


class CompletionChoice(AnswerChoice):
    """One continuation of one prompt, or a piece of it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Answer(Shape):
    """The fields that both kinds of answer have. `warnings`: what was not done as asked; in a stream's last chunk."""

    id: str
    created: int
    model: str
    system_fingerprint: Text
    warnings: list[str] | None = None


class TextCompletion(Answer):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage


class CompletionChunk(Answer):
    """An event of a streamed completion."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage | None = None


class ChatToken(Shape):
    """A token and how likely it was. `bytes`: what it adds to the text, null for nothing."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatToken):
    """The same, with the likeliest in its place."""

    top_logprobs: list[ChatToken]


class ChatLogprobs(Shape):
    """Of each token of the answer."""

    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(Shape):
    """A function that the model calls. `arguments`: as the model writes them, JSON as a rule."""

    name: str
    arguments: str


class CalledTool(Shape):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Shape):
    """The answer's message. `content` is null beside calls without any. What the model thinks has two names, of which
    `reasoning` is vLLM's newer one."""

    role: Literal["assistant"]
    content: Text
    refusal: None
    tool_calls: list[CalledTool] | None = None
    reasoning_content: Text = None
    reasoning: Text = None


class ChatChoice(AnswerChoice):
    """One answer."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CalledFunctionPiece(Shape):
    """More of a function's arguments; its name in the first piece."""

    name: Text = None
    arguments: str


class CalledToolPiece(Shape):
    """More of the call number `index`; `id` and `type` in the first piece."""

    index: int
    id: Text = None
    type: Literal["function"] | None = None
    function: CalledFunctionPiece


class ChatDelta(Shape):
    """More of a message."""

    role: Literal["assistant"] | None = None
    content: Text = None
    tool_calls: list[CalledToolPiece] | None = None
    reasoning_content: Text = None
    reasoning: Text = None


class ChatChunkChoice(AnswerChoice):
    """A piece of one answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None
    prompt_token_ids: list[int] | None = None


class ChatChunk(Answer):
    """An event of a streamed chat."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ServedModel(Shape):
    """A model, or an adapter (LoRA) of the model `parent`. `has_chat_template`: whether it takes messages."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None
    max_model_len: int
    has_chat_template: bool


class ModelList(Shape):
    """The model and its adapters; nothing before the scheduler has sent its facts."""

    object: Literal["list"]
    data: list[ServedModel]


class Cancelled(Shape):
    """Whether a call was running. `pending`: the scheduler has just begun, and ends it as soon as it hears of it."""

    id: str
    cancelled: bool
    pending: bool = False


class Tokens(Shape):
    """The answer of /tokenize. `max_model_len` is null before the scheduler has sent it."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Shape):
    """The answer of /detokenize."""

    prompt: str


class Health(Shape):
    """All is well."""

    status: Literal["ok"]


class Version(Shape):
    """The version."""

    version: str


class Failure(Shape):
    """The body of every answer but 200; the last event of a stream that fails."""

    error: Error
