"""How tokens are chosen, their log probabilities without texts, and when and why a sequence ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class FinishReason(StrEnum):
    """Why a sequence ended. Its value is its name in the OpenAI API, in metrics and in logs."""

    STOP = "stop"
    """An end token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens or the model's length was reached."""
    ABORT = "abort"
    """It was cancelled."""
    ERROR = "error"
    """It failed; the error beside it says why."""


class EarlyStopping(StrEnum):
    """When a beam search ends, unless max_tokens ends it earlier."""

    HEURISTIC = "heuristic"
    """When the best running beam, scored at its present length, is no better than the finished ones."""
    FIRST = "first"
    """As soon as `width` beams have finished."""
    NEVER = "never"
    """When no running beam can become better than the finished ones."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search instead of sampling, scored as `transformers` scores: `n` of the `width` beams are returned, the best
    first. A score is the sum of the log probabilities over (generated length ^ length_penalty)."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


MAX_FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a number. `low_is_open`: `low` itself is excluded."""

    low: float
    high: float
    description: str
    """Completes "must be …"."""
    low_is_open: bool = False

    def holds(self, value: float) -> bool:
        """Returns whether a value lies in the range. A NaN lies in none."""
        return (value > self.low if self.low_is_open else value >= self.low) and value <= self.high


@dataclass(frozen=True, slots=True)
class Number(Range):
    """A numeric field of SamplingParams. `neutral`: its value if neither the request nor the model sets it."""

    neutral: float = 0.0


NUMBERS: Mapping[str, Number] = {
    "temperature": Number(0, MAX_FLOAT32, "a finite number, at least 0", neutral=1.0),
    "top_p": Number(0, 1, "above 0 and at most 1", low_is_open=True, neutral=1.0),
    "top_k": Number(0, 2**32 - 1, "at least 0, where 0 is off", neutral=0),
    "min_p": Number(0, 1, "from 0 to 1"),
    "presence_penalty": Number(-2, 2, "from -2 to 2"),
    "frequency_penalty": Number(-2, 2, "from -2 to 2"),
    "repetition_penalty": Number(0, MAX_FLOAT32, "a finite number above 0", low_is_open=True, neutral=1.0),
}
"""The parameters that are one number each: their ranges, which gateway and worker check, and their neutral values. The
codec, the fronts, the defaults of generation_config.json and the worker's columns follow this table. A whole number has
an int as its neutral value."""


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """The tokens around reasoning in an output.

    Attributes:
        end_token_id: the token that ends reasoning.
        begins: the sequences of which one begins reasoning.
        is_open: whether the prompt has begun reasoning.
        begins_anywhere: whether reasoning may begin anywhere in the output, also several times; else it begins at the
            output's beginning, or not at all.
    """

    end_token_id: int
    begins: tuple[tuple[int, ...], ...] = ()
    is_open: bool = False
    begins_anywhere: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. None: the model's default, then the neutral value of `NUMBERS`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""
    """An llguidance grammar that the gateway compiles from the request's format. Empty: none."""
    thinking_token_budget: int | None = None
    """The most tokens of reasoning. None: no limit."""
    thinking_tokens: ThinkingTokens | None = None
    """The tokens of the model's reasoning, which the gateway finds for the budget."""
    predicted_token_ids: tuple[int, ...] = ()
    """Ids that the output may repeat in part, from which a worker drafts tokens. They change no token."""
    speculation: bool | None = None
    """Whether a worker may draft tokens of the request, which changes none. None: it may."""

    def value(self, name: str) -> float:
        """Returns a parameter of `NUMBERS`, or its neutral value if it is None."""
        given: float | None = getattr(self, name)
        return NUMBERS[name].neutral if given is None else given

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that the sequence already has are penalized."""
        penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        return any(self.value(name) != NUMBERS[name].neutral for name in penalties)


class PredictionUsage(NamedTuple):
    """How many tokens were drafted that a request's prediction says: the right ones, and the others."""

    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0

    def plus(self, num_accepted_tokens: int = 0, num_rejected_tokens: int = 0) -> PredictionUsage:
        return PredictionUsage(
            self.num_accepted_tokens + num_accepted_tokens, self.num_rejected_tokens + num_rejected_tokens
        )


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """When a sequence ends. None: `max_tokens` is what the model's length allows, `min_tokens` is 0."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False


class Candidates(NamedTuple):
    """The log probabilities in one token's place, in columns of one length: the token's own first, then the likeliest.

    `ranks` may be empty; the likeliest token has rank 1.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]


class PromptPiece(NamedTuple):
    """The log probabilities of a prompt's tokens from `first_position` on."""

    first_position: int
    candidates: list[Candidates]
