"""Options of a client, and whole answers, as plain values. Imports neither messages nor connections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blockyard.contract.chat import ToolCall
    from blockyard.contract.events import TokenLogprobs, Usage
    from blockyard.contract.sampling import BeamSearch, FinishReason
    from blockyard.errors import BlockyardError


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an answer must have; set exactly one form. The names are vLLM's."""

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
    """JSON has no white space between its tokens."""


class GenerationOptions(TypedDict, total=False):
    """Options of a generation. An absent option has the model's default, else the API's (in brackets)."""

    request_id: str
    """An id of your choice, for `cancel`, `resume` and the logs; at most 128 of [A-Za-z0-9._:-]. The same request,
    sent again with its id while it runs or soon after, has the same answer. [made by the client]"""
    model: str
    """A name from `list_models`: the model's, or an adapter's. [the model]"""
    n: int
    """Number of continuations, 1 to 64. [1]"""
    max_tokens: int
    """Tokens to generate at most. [as many as the model's length allows]"""
    min_tokens: int
    """Tokens before which only the length may end the answer. [0]"""
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
    """Seed of the random draws. [a hash of the request_id; the answer has it]"""
    logit_bias: Mapping[int, float]
    """Added to the logits of these token ids, each in [-100, 100]. [none]"""
    stop: str | Sequence[str]
    """Texts; the answer ends before the first of them that appears. [none]"""
    stop_token_ids: Sequence[int]
    """Token ids that end the sequence. [none]"""
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
    """Keep only this many of the prompt's last tokens; -1: as many as leave room for max_tokens. [not cut]"""
    suffix: str
    """The text behind the answer, which fills in the middle between the prompt and it. [none]"""
    on_disconnect: Literal["keep", "abort"]
    """keep: the answer outlives its connection, and the client reads on by itself at this gateway or another. abort: it
    ends with its connection. [keep]"""
    on_update: Literal["continue", "fail"]
    """If the weights are updated while it runs. continue: it goes on with the new weights. fail: it fails with
    SLEEPING. [continue]"""
    priority: int
    """The lowest number runs first, if the scheduler's policy is priority. [0]"""
    max_queue_time: float
    """Seconds that it may wait for its first step before it fails with QUEUE_DEADLINE. [no limit]"""
    cache_salt: str
    """Share prefixes in the prefix cache only with requests of the same salt. [shared by all of the tenant]"""
    structured_outputs: StructuredOutputsParams
    """The form that the answer must have, such as JSON that follows a schema. [any]"""
    beam_search: BeamSearch
    """Search for the likeliest continuations instead of sampling; all tokens come at the end. [sampling]"""
    logprobs: int
    """Return each token's log probability and those of this many likeliest tokens, 0 to 20. [none]"""
    prompt_logprobs: int
    """Return log probabilities for the prompt's tokens, as `logprobs` does for the answer's. [none]"""
    thinking_token_budget: int
    """The most tokens of reasoning; then the token that ends it is chosen. [no limit]"""
    allowed_token_ids: Sequence[int]
    """The only tokens that may be chosen. [all]"""
    predicted_token_ids: Sequence[int]
    """Tokens that the answer may repeat in part, which come sooner where workers draft; no answer changes. [none]"""
    speculation: bool
    """Whether workers may draft tokens of the request, which changes when its tokens come, and none of them. [true]"""
    bad_words: Sequence[str]
    """Texts that the answer must not contain. [none]"""


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence of an answer. `token_ids` and `logprobs` are empty unless asked for. `score`: of a beam.

    `error` says why the sequence failed if `finish_reason` is ERROR; `text` is what was generated before. If every
    sequence fails, the call raises the error instead of returning an answer. `tool_calls` and `reasoning_text` are
    filled if a chat's answer is parsed. `calls_tools`: at least one tool call is complete.
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

    `warnings` name the options that were not followed, and what was done instead.

    Two answers to equal requests with the same `determinism_id` and `seed` are identical if the model is listed as
    batch-invariant.
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
        """The tool calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def reasoning_text(self) -> str:
        """The reasoning of the first choice."""
        return self.choices[0].reasoning_text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        """The usage of all choices: the prompt's tokens once, and the completion tokens of every choice."""
        first = self.choices[0].usage
        total = sum(choice.usage.num_completion_tokens for choice in self.choices)
        prediction = first.prediction
        if prediction is not None:
            for choice in self.choices[1:]:
                prediction = prediction.plus(*choice.usage.prediction or ())
        return replace(first, num_completion_tokens=total, prediction=prediction)
