"""What a client asks for and gets, as plain values. Knows no messages and no connections."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class GenerationOptions(TypedDict, total=False):
    """How to generate. What is absent takes the model's generation defaults, then those of the API (in brackets)."""

    request_id: str
    """A name of your choice, for `cancel` and the logs; at most 128 of [A-Za-z0-9._:-]. [made by the gateway]"""
    model: str
    """A name from `list_models`. [the only model]"""
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
    """Key of the random draws. [a hash of the request_id, told in the answer]"""
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


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """What was computed, in tokens. `num_cached_tokens` of the prompt were found in the prefix cache."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued. The first event, once."""

    request_id: str
    num_prompt_tokens: int
    seed: int
    model: str


@dataclass(frozen=True, slots=True)
class Delta:
    """More of the sequence `index`. `token_ids` is empty unless asked for; both totals include this delta."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    num_text_bytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence `index` has ended. `matched_stop`: the stop string or stop token; None for a model's end token."""

    index: int
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    determinism_id: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """The request went on after a failure inside the system; nothing is to be done about it.

    The deltas go on where they were, and no token comes twice. `num_replayed_tokens` were computed once more. If it was
    `exact` the answer goes on as it would have without the failure, token by token.
    """

    cause: str
    num_replayed_tokens: int
    exact: bool


Event = Accepted | Delta | Finished | Recovered


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence of an answer. `token_ids` is empty unless asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer, its choices by index.

    Two answers to equal requests with the same `determinism_id` and `seed` are equal bit for bit, where the model is
    listed as batch-invariant.
    """

    request_id: str
    model: str
    seed: int
    choices: tuple[Choice, ...]
    determinism_id: str = ""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids of the first choice, if they were asked for."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def usage(self) -> Usage:
        """The prompt once, and the tokens of all choices."""
        first = self.choices[0].usage
        total = sum(choice.usage.num_completion_tokens for choice in self.choices)
        return Usage(first.num_prompt_tokens, first.num_cached_tokens, total)


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    determinism_id: str
    batch_invariant: bool


@dataclass(slots=True)
class CompletionBuilder:
    """Puts the events of a stream together again."""

    accepted: Accepted | None = None
    _texts: dict[int, list[str]] = field(default_factory=dict[int, "list[str]"])
    _token_ids: dict[int, list[int]] = field(default_factory=dict[int, "list[int]"])
    _finished: dict[int, Finished] = field(default_factory=dict[int, Finished])

    def add(self, event: Event) -> None:
        """Takes the next event."""
        match event:
            case Accepted():
                self.accepted = event
            case Delta():
                self._texts.setdefault(event.index, []).append(event.text)
                self._token_ids.setdefault(event.index, []).extend(event.token_ids)
            case Finished():
                self._finished[event.index] = event
            case Recovered():
                pass

    def build(self) -> Completion:
        """Makes the answer of a stream that has ended."""
        if self.accepted is None or not self._finished:
            raise ValueError("the stream has not ended: there is no whole answer yet")
        choices = tuple(self._choice(self._finished[index]) for index in sorted(self._finished))
        accepted, last = self.accepted, next(reversed(self._finished.values()))
        return Completion(accepted.request_id, accepted.model, accepted.seed, choices, last.determinism_id)

    def _choice(self, finished: Finished) -> Choice:
        return Choice(
            finished.index,
            "".join(self._texts.get(finished.index, [])),
            tuple(self._token_ids.get(finished.index, [])),
            finished.finish_reason,
            finished.matched_stop,
            finished.usage,
        )
