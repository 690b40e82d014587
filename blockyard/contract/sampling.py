"""How tokens are chosen, and when and why a sequence ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


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


NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The value of each number that neither the request nor the model gives."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. None: the model's default, then the neutral value. `gateway.validation` has the ranges."""

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
    """A grammar for llguidance, which the gateway makes of a request's format. Empty: none."""

    def value(self, name: str) -> float:
        """Returns a number of `NEUTRAL`, the neutral one where it is None."""
        given: float | None = getattr(self, name)
        return NEUTRAL[name] if given is None else given

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that the sequence already has are penalized."""
        penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        return any(self.value(name) != NEUTRAL[name] for name in penalties)


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """When a sequence ends. None: as long as the model's length allows; no minimum."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
