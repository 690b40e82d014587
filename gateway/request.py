"""A request and its events as values: what both fronts hand to the core and get from it. Knows no messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class FinishReason(Enum):
    """Why a sequence ended; the values are those of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How tokens are chosen. None: the model's default, then the proto's. Ranges are checked in `validation`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])


@dataclass(frozen=True, slots=True)
class StopOptions:
    """When a sequence ends."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request. `prompt` is text, or token ids to which nothing is added.

    `add_special_tokens` is false for a rendered chat template, which holds them already.
    """

    prompt: str | tuple[int, ...]
    request_id: str = ""
    model: str = ""
    sampling: SamplingOptions = SamplingOptions()
    stop: StopOptions = StopOptions()
    n: int = 1
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued. First, once."""

    request_id: str
    num_prompt_tokens: int
    seed: int
    model: str


@dataclass(frozen=True, slots=True)
class Delta:
    """More of the sequence `index`. `token_ids` is empty unless asked for; the totals include this delta."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    num_text_bytes: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence `index` ended. `matched`: the stop string, or the request's stop token; None for an end token."""

    index: int
    reason: FinishReason
    matched: str | int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    determinism_id: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """The request went on where it was after a failure inside; `exact`: as it would have without."""

    cause: str
    num_replayed_tokens: int
    exact: bool


Event = Accepted | Delta | Finished | Recovered
