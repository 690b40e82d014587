"""Options, events and answers of a client as plain values. Knows neither messages nor connections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blockyard.errors import BlockyardError


class EarlyStopping(StrEnum):
    """When a beam search ends, where max_tokens does not end it before."""

    HEURISTIC = "heuristic"
    """When no better beam is likely: by the best running one at its present length."""
    FIRST = "first"
    """As soon as there are `width` finished ones."""
    NEVER = "never"
    """When no better one is possible."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search instead of sampling, scored as `transformers` scores: `n` of the `width` beams are returned, the best
    first. A score is the sum of the log probabilities over (generated length ^ length_penalty)."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an answer must have: one of these, under vLLM's names."""

    json: str | Mapping[str, Any] | bool | None = None
    """JSON that this JSON Schema allows."""
    regex: str | None = None
    """A text that this regular expression matches as a whole."""
    choice: Sequence[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A text of this grammar, in llguidance's kind of Lark."""
    json_object: bool = False
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """JSON by a schema has no white space between its tokens."""


class GenerationOptions(TypedDict, total=False):
    """Options of a generation. One that is absent takes the model's default, then that of the API (in brackets)."""

    request_id: str
    """A name of your choice, for `cancel`, `resume` and the logs; at most 128 of [A-Za-z0-9._:-]. The same request,
    sent again under its name while it runs or soon after, has the same answer. [made by the client]"""
    model: str
    """A name from `list_models`: the model's, or an adapter's. [the model]"""
    n: int
    """How many continuations, 1 to 64. [1]"""
    max_tokens: int
    """Tokens to generate at most. [as many as the model's length allows]"""
    min_tokens: int
    """No end of any kind but the length before this many tokens. [0]"""
    temperature: float
    """Softmax temperature; 0 is greedy. [1]"""
    top_p: float
    """Keep the smallest set of tokens whose probabilities sum to at least this, in (0, 1]. [1]"""
    top_k: int
    """Keep this many of the best tokens; 0 is off. [0]"""
    min_p: float
    """Drop tokens less likely than this share of the likeliest one, in [0, 1]. [0]"""
    presence_penalty: float
    """Subtracted once from every token that was generated before, in [-2, 2]. [0]"""
    frequency_penalty: float
    """Subtracted for every time that a token was generated before, in [-2, 2]. [0]"""
    repetition_penalty: float
    """Divides positive and multiplies negative logits of tokens in the prompt or the output, above 0. [1]"""
    seed: int
    """Key of the random draws. [a hash of the request_id; the answer has it]"""
    logit_bias: Mapping[int, float]
    """Added to the logits of these token ids, each in [-100, 100]. [none]"""
    stop: str | Sequence[str]
    """The text ends before the first of these to complete. [none]"""
    stop_token_ids: Sequence[int]
    """A token of these ends the sequence. [none]"""
    ignore_eos: bool
    """Go on past the model's own end tokens. [False]"""
    include_stop_in_output: bool
    """Leave the matched stop in the text. [False]"""
    return_token_ids: bool
    """Return token ids beside the text. [False]"""
    skip_special_tokens: bool
    """Leave special tokens out of the text. [True]"""
    add_special_tokens: bool
    """Tokenize a text with the model's special tokens, a begin token for one. [True]"""
    truncate_prompt_tokens: int
    """The last so many tokens of the prompt are its all; -1: as many as leave room for max_tokens. [not cut]"""
    on_disconnect: Literal["keep", "abort"]
    """keep: the answer outlives its connection, and the client reads on by itself at this gateway or another. abort: it
    ends with its connection. [keep]"""
    on_update: Literal["continue", "fail"]
    """When the weights are updated before it is finished. continue: it goes on with the new ones. fail: it fails with
    SLEEPING. [continue]"""
    priority: int
    """Less is sooner, where the scheduler's policy is by priority. [0]"""
    max_queue_time: float
    """Seconds that it may wait for its first step; then it fails with QUEUE_DEADLINE. [as long as it takes]"""
    structured_outputs: StructuredOutputsParams
    """The form that the answer must have: JSON by a schema, say. [any]"""
    beam_search: BeamSearch
    """Search for the likeliest continuations instead of sampling; the tokens come all at the end. [sampling]"""
    logprobs: int
    """Return the log probability of each token, and of this many of the best beside it, 0 to 20. [none]"""
    prompt_logprobs: int
    """The same for the tokens of the prompt. [none]"""
    allowed_token_ids: Sequence[int]
    """If any: no other token is ever chosen. [all]"""
    bad_words: Sequence[str]
    """Texts that are never completed. [none]"""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens that were computed. `num_cached_tokens` of the prompt were found in the prefix cache.

    `num_virtual_tokens`: of the adapter, where it is a soft prompt; no part of the prompt's.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_virtual_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and how likely it was: the natural logarithm of its probability, and its rank, 1 for the most likely.

    `text` is the token's by itself; U+FFFD stands for a part of a character.
    """

    token_id: int
    text: str
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of a token, and the likeliest ones in its place, best first.

    `chosen` is None for the first token of a prompt alone.
    """

    chosen: TokenLogprob | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued. The first event, once. `warnings`: what is not done as it asked, and what instead."""

    request_id: str
    num_prompt_tokens: int
    seed: int
    model: str
    warnings: tuple[str, ...] = ()
    weight_version: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the assistant has made. `arguments`: as it wrote them, JSON as a rule."""

    name: str
    arguments: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the call number `index` of a sequence; `id` and `name` in its first piece."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """More of the sequence `index`. Both totals include this delta.

    `token_ids` and `logprobs`, an entry for each new token, are empty unless asked for. Of an answer that is parsed
    `text` is what the model says, beside what it thinks and the tools that it calls; `num_text_bytes` counts all of it,
    as the model wrote it. Within one delta the order is: the rest of a call, reasoning, text, calls that begin.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    num_text_bytes: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning_text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log probabilities of the prompt's tokens, an entry each; once, before the first delta, if asked for."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence `index` has ended. `matched_stop`: the stop string or stop token; None for a model's end token.

    `score` is that of a beam. `error` says why it failed, where the reason is ERROR; its neighbours go on.
    `weight_versions`: (first token, name of the weights), where weights were given names. `calls_tools`: at least
    one call of a tool is whole.
    """

    index: int
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    determinism_id: str
    score: float | None = None
    error: BlockyardError | None = None
    weight_versions: tuple[tuple[int, str], ...] = ()
    calls_tools: bool = False


@dataclass(frozen=True, slots=True)
class Recovered:
    """The request went on after a failure inside the system; nothing is to be done about it.

    The deltas go on where they were, and no token comes twice. `num_replayed_tokens` were computed once more. If it was
    `exact` the answer goes on as it would have without the failure, token by token.
    """

    cause: str
    num_replayed_tokens: int
    exact: bool


Event = Accepted | PromptLogprobs | Delta | Finished | Recovered


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence of an answer. `token_ids` and `logprobs` are empty unless asked for; `score` is that of a beam.

    `error` says why it failed, where `finish_reason` is ERROR: what came before is its text. Where every sequence fails
    there is no answer, and the error is raised. `tool_calls` and `reasoning_text`: of a chat's answer that is parsed.
    `calls_tools`: at least one call is whole.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: float | None = None
    error: BlockyardError | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning_text: str = ""
    calls_tools: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, its choices by index. `prompt_logprobs` is empty unless asked for.

    `warnings` say what was not done as the request asked, and what instead.

    Two answers to equal requests with the same `determinism_id` and `seed` are equal bit for bit, where the model is
    listed as batch-invariant.
    """

    request_id: str
    model: str
    seed: int
    choices: tuple[Choice, ...]
    determinism_id: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first choice, if they were asked for."""
        return self.choices[0].token_ids

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of tools of the first choice."""
        return self.choices[0].tool_calls

    @property
    def reasoning_text(self) -> str:
        """What the first choice thinks before it speaks."""
        return self.choices[0].reasoning_text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        """The prompt once, and the tokens of all choices."""
        first = self.choices[0].usage
        total = sum(choice.usage.num_completion_tokens for choice in self.choices)
        return replace(first, num_completion_tokens=total)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served, or an adapter of the model `parent`."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    determinism_id: str
    batch_invariant: bool
    parent: str = ""
    task: str = "unspecified"
    """What it is served for: "generate", "embed", "classify" or "score"."""
    embedding_size: int = 0
    """Numbers of a vector; 0: it makes none, or its files do not say."""
    warnings: tuple[str, ...] = ()
    """What whoever uses it should know, a sentence each."""
    dialect: str = ""
    """How it writes calls of tools and reasoning; empty: not known, and its answers are text."""
