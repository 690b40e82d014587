"""A request and its events as values, which the fronts hand to the core and get from it. Knows no messages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, NamedTuple

from blockyard.pooling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from blockyard.errors import BlockyardError
    from gateway.chat import Conversation
    from gateway.dialects.answer_parser import ParsingRule, ToolCallDelta


class FinishReason(IntEnum):
    """Why a sequence ended, with the contract's numbers."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4

    @property
    def label(self) -> str:
        """Its name in the OpenAI API, in metrics and in logs."""
        return self.name.lower()


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
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # For llguidance; what is made of a request's format comes here. Empty: none.
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that a schema, which is JSON itself, allows; `compact`: without white space between its tokens."""

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
    """One of several texts."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lark:
    """A text of a grammar in llguidance's kind of Lark."""

    text: str


OutputFormat = JsonSchema | JsonObject | Regex | Choices | Lark


class EarlyStopping(IntEnum):
    """When a beam search ends before max_tokens: see BeamSearch in the contract, whose numbers these are."""

    HEURISTIC = 1
    FIRST = 2
    NEVER = 3


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """Beam search instead of sampling."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC


class OnDisconnect(Enum):
    """What happens to a request when its last reader leaves."""

    ABORT = "abort"
    KEEP = "keep"


class OnUpdate(Enum):
    """What happens to a request that has begun when only other weights can go on with it."""

    CONTINUE = "continue"
    FAIL = "fail"


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
    """One request. `prompt` is text, or token ids or a conversation, to which nothing is added.

    `add_special_tokens` is false for a text that holds them already.
    """

    prompt: str | tuple[int, ...] | Conversation
    request_id: str = ""
    model: str = ""
    sampling: SamplingOptions = SamplingOptions()
    stop: StopOptions = StopOptions()
    n: int = 1
    return_token_ids: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    # The last so many tokens of the prompt are its all; -1: as many as leave room for max_tokens, or one.
    truncate_prompt_tokens: int | None = None
    tenant: str = ""
    on_disconnect: OnDisconnect = OnDisconnect.ABORT
    on_update: OnUpdate = OnUpdate.CONTINUE
    priority: int = 0
    max_queue_seconds: float | None = None
    # Until the client's own deadline.
    remaining_seconds: float | None = None
    beam_search: BeamOptions | None = None
    format: OutputFormat | None = None
    # What the front that took it needs to write its answer again, at another gateway too; the core does not read it.
    front_state: bytes = b""
    # What of it is not done as asked, a sentence each; filled in by the core.
    warnings: tuple[str, ...] = ()
    # How its answer is told apart into text, reasoning and calls of tools; None: it is text. Filled in by the core, of
    # a conversation that asks for it.
    parsing: ParsingRule | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """What a client has of one sequence. `token_ids`: all of these `num_tokens`, or none where they are not known."""

    num_tokens: int = 0
    num_text_bytes: int = 0
    finished: bool = False
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """Asks for the rest of an answer; `positions` are by index, and a sequence without one is read from its beginning.

    With `request`, which has its seed then, an answer that no server remembers is generated again.
    """

    request_id: str
    tenant: str = ""
    positions: Mapping[int, Position] = field(default_factory=dict[int, Position])
    request: GenerationRequest | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued. First, once. `warnings`: what is not done as it asked."""

    request_id: str
    num_prompt_tokens: int
    seed: int
    model: str
    warnings: tuple[str, ...] = ()
    weight_version: str = ""


class TokenLogprob(NamedTuple):
    """A token and how likely it was; `rank` 1 is the most likely.

    `text` is its own, with U+FFFD for a part of a character; `raw` is what it adds to the text that is returned, in
    UTF-8: nothing, for a special token that is left out.
    """

    token_id: int
    text: str
    logprob: float
    rank: int
    raw: bytes = b""


class TokenLogprobs(NamedTuple):
    """The token that stands at a place (None: the first of a prompt), and the likeliest ones there, best first."""

    chosen: TokenLogprob | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log probabilities of the prompt: an entry for each token. Once, before the first Delta, if asked for."""

    logprobs: tuple[TokenLogprobs, ...]


# Not frozen: that takes four times as long to make, and one is made for each token.
@dataclass(slots=True)
class Delta:
    """More of the sequence `index`. `token_ids` is empty unless asked for; the totals include this delta.

    `logprobs`: an entry for each of the new tokens, if asked for. Of an answer that is parsed, `num_text_bytes` counts
    what the model wrote: text, reasoning, calls and markers. Within one delta the order is: the rest of a call,
    reasoning, text, calls that begin.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    num_text_bytes: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning_text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


def merge_calls(deltas: Iterable[Delta]) -> list[ToolCallDelta]:
    """Joins the pieces of the calls of a sequence, all of whose deltas these are; by index."""
    calls: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        for piece in delta.tool_calls:
            calls.setdefault(piece.index, []).append(piece)
    return [replace(pieces[0], arguments="".join(each.arguments for each in pieces)) for pieces in calls.values()]


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence `index` ended. `matched`: the stop string, or the request's stop token; None for an end token.

    `score`: that of a beam. `error`: why it failed, where the reason is ERROR. `weight_versions`: (first token, name of
    the weights) where they have names. `num_virtual_tokens`: of a soft prompt, before the prompt's. `calls_tools`: a
    call of a tool is whole.
    """

    index: int
    reason: FinishReason
    matched: str | int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    determinism_id: str
    score: float | None = None
    error: BlockyardError | None = None
    weight_versions: tuple[tuple[int, str], ...] = ()
    num_virtual_tokens: int = 0
    calls_tools: bool = False


@dataclass(frozen=True, slots=True)
class Recovered:
    """The request continued where it was after a failure inside; `exact`: with the tokens of a run without failure."""

    cause: str
    num_replayed_tokens: int
    exact: bool


Event = Accepted | PromptLogprobs | Delta | Finished | Recovered


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that is served."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    determinism_id: str
    batch_invariant: bool
    # Of an adapter: the model that it adapts.
    parent: str = ""
    task: Task = Task.UNSPECIFIED
    # Numbers of a vector; 0: it makes none, or it is not known how many.
    embedding_size: int = 0
    warnings: tuple[str, ...] = ()
    # How it writes reasoning and calls of tools; empty: not known.
    dialect: str = ""
