"""The events of a request, in the order in which its stream has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.chat import ToolCall

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.contract.sampling import FinishReason
    from blockyard.errors import BlockyardError


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens that were computed. `num_cached_tokens` of the prompt were found in the prefix cache.

    `num_virtual_tokens`: those of the adapter, where it is a soft prompt; they do not count as the prompt's.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_virtual_tokens: int = 0


# Not frozen: that takes four times as long to make, and each token may have twenty-one of these.
@dataclass(slots=True)
class TokenLogprob:
    """A token and how likely it was: the natural logarithm of its probability, and its rank, 1 for the most likely.

    `text` is the token's by itself; U+FFFD stands for a part of a character.
    """

    token_id: int
    text: str
    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """The log probability of a token, and the likeliest ones in its place, best first.

    `chosen` is None for the first token of a prompt alone.
    """

    chosen: TokenLogprob | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued. The first event, once.

    `warnings`: what is not done as the request asked, and what instead, a sentence each. `weight_version`: the name of
    the weights that it begins with; empty if they have none.
    """

    request_id: str
    num_prompt_tokens: int
    seed: int
    model: str
    warnings: tuple[str, ...] = ()
    weight_version: str = ""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log probabilities of the prompt's tokens, an entry each; once, before the first delta, if asked for."""

    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of the call number `index` of a sequence; `id` and `name` in its first piece."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


# Not frozen: that takes four times as long to make, and one is made for each token.
@dataclass(slots=True)
class Delta:
    """More of the sequence `index`. Both totals include this delta.

    `token_ids` and `logprobs`, an entry for each new token, are empty unless asked for. If the answer is parsed, `text`
    is what the model says, beside what it thinks and the tools that it calls; `num_text_bytes` counts all of it, as the
    model wrote it. Within one delta the order is: the rest of a call, reasoning, text, calls that begin.
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

    `score` is that of a beam. `error` says why the sequence failed, where the reason is ERROR; its neighbours go on.
    `weight_versions`: (first token, name of the weights), where weights were given names. `calls_tools`: at least one
    call of a tool is whole.
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


def join_calls(deltas: Iterable[Delta]) -> tuple[ToolCall, ...]:
    """Joins the pieces of the calls in all deltas of a sequence; by index."""
    calls: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        for piece in delta.tool_calls:
            calls.setdefault(piece.index, []).append(piece)
    return tuple(
        ToolCall(pieces[0].name, "".join(each.arguments for each in pieces), pieces[0].id) for pieces in calls.values()
    )
