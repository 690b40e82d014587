"""The events of a request's stream, in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.chat import ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.contract.sampling import FinishReason, PredictionUsage
    from blockyard.errors import BlockyardError


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `num_cached_tokens` of the prompt's tokens were found in the prefix cache.

    `num_virtual_tokens`: tokens of a soft-prompt adapter; they do not count as prompt tokens. `prediction`: what became
    of the request's predicted tokens, if it has any.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_virtual_tokens: int = 0
    prediction: PredictionUsage | None = None


# Not frozen: a frozen instance takes four times as long to create, and each token may have 21 of them.
@dataclass(slots=True)
class TokenLogprob:
    """A token and how likely it was: the natural logarithm of its probability, and its rank, 1 for the most likely.

    `text` is the token's own text; U+FFFD stands for a part of a character.
    """

    token_id: int
    text: str
    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """The log probability of a token, and those of the likeliest tokens at its position, best first.

    `chosen` is None only for the first token of a prompt.
    """

    chosen: TokenLogprob | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued. This event comes once, before all others but `Loading`.

    `warnings`: options that are not followed, and what is done instead, one sentence each. `weight_version`: the name
    of the weights that the request begins with; empty if they have no name.
    """

    request_id: str
    num_prompt_tokens: int
    seed: int
    model: str
    warnings: tuple[str, ...] = ()
    weight_version: str = ""


@dataclass(frozen=True, slots=True)
class Loading:
    """The request waits until its model is loaded: comes again and again, only for a model that starts on demand.

    `message`: what is being done, for a person.
    """

    message: str


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log probabilities of the prompt's tokens, if asked for. The event comes once, before the first delta."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the tool call `index` of a sequence; only the first piece has `id` and `name`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


# Not frozen: a frozen instance takes four times as long to create, and each token has one.
@dataclass(slots=True)
class Delta:
    """A piece of the sequence `index`. `num_tokens` and `num_text_bytes` are totals up to and including this delta.

    `token_ids` and `logprobs` have an entry for each new token, and are empty unless asked for. If the answer is
    parsed, `text` leaves reasoning and tool calls out, but `num_text_bytes` counts all text that the model wrote.
    Within one delta the order is: the rest of a call, reasoning, text, calls that begin.
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
class Finished:
    """The sequence `index` has ended. `matched_stop`: the stop string or stop token; None for a model's end token.

    `score` is a beam's score. `error` says why the sequence failed if the reason is ERROR; the other sequences go on.
    `weight_versions`: pairs of (index of the first token, name of the weights), if the weights have names.
    `calls_tools`: at least one tool call is complete.
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
    """The request survived an internal failure; the client need not do anything.

    The deltas go on where they stopped, and no token comes twice. `num_replayed_tokens` were computed again. `exact`:
    the answer is the same, token by token, as without the failure.
    """

    cause: str
    num_replayed_tokens: int
    exact: bool


Event = Loading | Accepted | PromptLogprobs | Delta | Finished | Recovered


def join_calls(deltas: Iterable[Delta]) -> tuple[ToolCall, ...]:
    """Joins the pieces of the tool calls in all deltas of a sequence, in the order of the calls."""
    calls: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        for piece in delta.tool_calls:
            calls.setdefault(piece.index, []).append(piece)
    return tuple(
        ToolCall(pieces[0].name, "".join(each.arguments for each in pieces), pieces[0].id) for pieces in calls.values()
    )
