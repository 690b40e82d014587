"""A client's generation request, and the position from which it resumes an answer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from blockyard.contract.sampling import BeamSearch, SamplingParams, StopCriteria

if TYPE_CHECKING:
    from blockyard.contract.chat import Conversation


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that follows a JSON Schema (as JSON text). `compact`: no white space between tokens."""

    schema: str
    compact: bool = False


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """A text that a regular expression matches as a whole."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choices:
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lark:
    """A text of a grammar in llguidance's kind of Lark."""

    text: str


OutputFormat = JsonSchema | JsonObject | Regex | Choices | Lark


class OnDisconnect(StrEnum):
    """The handling of a request whose last reader disconnects."""

    ABORT = "abort"
    KEEP = "keep"


class OnUpdate(StrEnum):
    """The handling of a running request when the weights are updated."""

    CONTINUE = "continue"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class GenerationSpec:
    """One request.

    Attributes:
        prompt: a text, token ids (used unchanged), or a conversation.
        request_id: the client's id for the request; empty: the gateway makes one.
        model: the name of a served model or adapter; empty: the model.
        sampling: how tokens are chosen.
        stop: when a sequence ends.
        n: how many continuations.
        return_token_ids: return token ids beside the text.
        skip_special_tokens: leave special tokens out of the text.
        add_special_tokens: tokenize a text with the model's special tokens; false for a text that holds them already.
        suffix: the text behind the answer, which fills in what is between the prompt and the suffix; empty: the answer
            just continues the prompt.
        truncate_prompt_tokens: how many of the prompt's last tokens are kept; -1: as many as leave room for max_tokens,
            or for one token; None: all.
        on_disconnect: what happens when the connection is lost.
        on_update: what happens when the weights are updated.
        priority: the lowest number runs first, if the scheduler's policy is priority.
        max_queue_seconds: how long the request may wait for its first step; None: no limit.
        beam_search: search instead of sampling.
        format: the form that the answer must have; None: any.
        cache_salt: only requests of the same salt and the same tenant share prefixes in the prefix cache.
    """

    prompt: str | tuple[int, ...] | Conversation
    request_id: str = ""
    model: str = ""
    sampling: SamplingParams = SamplingParams()
    stop: StopCriteria = StopCriteria()
    n: int = 1
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    suffix: str = ""
    on_disconnect: OnDisconnect = OnDisconnect.ABORT
    on_update: OnUpdate = OnUpdate.CONTINUE
    priority: int = 0
    max_queue_seconds: float | None = None
    beam_search: BeamSearch | None = None
    format: OutputFormat | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Position:
    """What a client has received of one sequence. `token_ids`: all `num_tokens` ids, or empty if not known."""

    num_tokens: int = 0
    num_text_bytes: int = 0
    finished: bool = False
    token_ids: tuple[int, ...] = ()
