"""Remembers recent prompts of a model, and finds why prompts were computed again although they began like others.

Nothing is compared until an operator asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from blockyard.retention import Retention

if TYPE_CHECKING:
    from array import array
    from collections.abc import Hashable, Sequence

    from blockyard.contract.scheduling import Submission
    from gateway.live.request_state import RequestState

# A bound of the memory, in tokens of 4 bytes.
_MAX_TOKENS = 8 * 2**20
_MAX_AGE_SECONDS = 24 * 3600.0
# A prompt whose first block is new is compared with as many prompts before it.
_NUM_COMPARED = 16


class MissCause(StrEnum):
    """Why tokens of a prompt were computed although an earlier prompt began with them, or nearly did.

    Attributes:
        PARTED: the prompts have other tokens from a position on.
        NOT_KEPT: the blocks were not in the prefix cache any more, or not at the replica that computed the prompt.
        AT_ONCE: the earlier prompt was still being computed when this one came.
        OTHER_TENANT: the earlier prompt is another tenant's.
        OTHER_SALT: the earlier prompt has another cache_salt.
        OTHER_ADAPTER: the earlier prompt was computed with another adapter, or without one.
        WHOLE_PROMPT: the request needs every row of its prompt, for the prompt's log probabilities or for pooling.
    """

    PARTED = "parted"
    NOT_KEPT = "not kept"
    AT_ONCE = "at once"
    OTHER_TENANT = "other tenant"
    OTHER_SALT = "other salt"
    OTHER_ADAPTER = "other adapter"
    WHOLE_PROMPT = "whole prompt"


@dataclass(frozen=True, slots=True)
class PastPrompt:
    """A prompt that was computed. Times are of the event loop's clock, in seconds.

    Attributes:
        answer_token_ids: the tokens of the first answer, whose blocks are in the prefix cache behind the prompt's.
        num_cached_tokens: the number of the prompt's tokens that were found in the prefix cache.
        computed_at: the time of the first token; None: the request ended before its first token.
    """

    submission: Submission
    answer_token_ids: array[int]
    num_cached_tokens: int
    arrived_at: float
    computed_at: float | None

    @property
    def num_tokens(self) -> int:
        return len(self.submission.prompt_token_ids)

    @property
    def token_ids(self) -> array[int]:
        """The tokens of the prompt and of its answer."""
        return self.submission.prompt_token_ids + self.answer_token_ids

    @property
    def weight(self) -> int:
        """The memory for keeping the prompt, in units of a token's 4 bytes."""
        texts = (self.submission.gateway_state, self.submission.sampling.grammar)
        return self.num_tokens + len(self.answer_token_ids) + sum(map(len, texts)) // 4

    @property
    def keeper(self) -> Hashable:
        """What two requests must have in common to share blocks."""
        lora = self.submission.lora
        return self.submission.cache_salt, lora.lora_id if lora else 0


class Miss(NamedTuple):
    """A prompt of which more was computed than what is new in it.

    `earlier` began with the same `num_common_tokens` tokens; none did if it is None, for WHOLE_PROMPT alone.
    """

    prompt: PastPrompt
    cause: MissCause
    earlier: PastPrompt | None
    num_common_tokens: int


class PromptHistory:
    """Keeps the last prompts of a model for a day. Only used on the event loop.

    Args:
        max_prompts: the number of prompts; 0: none is kept.
    """

    def __init__(self, max_prompts: int) -> None:
        self._prompts = Retention[str, PastPrompt](
            max_age_seconds=_MAX_AGE_SECONDS, max_entries=max_prompts, max_weight=_MAX_TOKENS
        )

    def add(self, state: RequestState, now: float) -> None:
        """Adds the prompt of a request that has ended, unless no scheduler ever had it."""
        if not state.was_accepted:
            return
        log = state.request_log
        computed_at = now if log.first_token_at is None and state.has_ended else log.first_token_at
        prompt = PastPrompt(
            state.submission, state.answers[0].token_ids, state.num_cached_prompt_tokens, log.arrived_at, computed_at
        )
        self._prompts.add(state.wire_id, prompt, prompt.weight, now)

    def prompts(self, now: float) -> list[PastPrompt]:
        """Returns the kept prompts in the order of their arrival."""
        self._prompts.expire(now)
        return sorted(self._prompts.values(), key=lambda prompt: prompt.arrived_at)


class _Found(NamedTuple):
    """An earlier prompt, and the number of its first tokens that another prompt has too."""

    prompt: PastPrompt
    num_tokens: int


class _Beginnings:
    """Finds the prompt that shares most blocks with another one from the beginning on: the last one if there are many.

    A tree of blocks: a node is a block of tokens behind all blocks of the nodes above it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_bytes = 4 * block_size
        self._nodes: dict[tuple[int, bytes], int] = {}
        self._last: list[PastPrompt] = []

    def add(self, prompt: PastPrompt) -> None:
        # The last token of an answer is never computed, and so its block is not kept.
        content, node = prompt.token_ids[:-1].tobytes(), -1
        for begin in range(0, len(content) - self._block_bytes + 1, self._block_bytes):
            node = self._nodes.setdefault((node, content[begin : begin + self._block_bytes]), len(self._last))
            if node == len(self._last):
                self._last.append(prompt)
            self._last[node] = prompt

    def find(self, prompt: PastPrompt) -> _Found | None:
        content, node = prompt.submission.prompt_token_ids.tobytes(), -1
        begin = 0
        while (next_node := self._nodes.get((node, content[begin : begin + self._block_bytes]))) is not None:
            node, begin = next_node, begin + self._block_bytes
        return _Found(self._last[node], _count_common(prompt, self._last[node], begin // 4)) if begin else None


def _count_common(prompt: PastPrompt, earlier: PastPrompt, num_known: int = 0) -> int:
    """Counts the first tokens that two prompts have in common, at least `num_known`; the earlier one has an answer."""
    pairs = zip(prompt.submission.prompt_token_ids[num_known:], earlier.token_ids[num_known:], strict=False)
    count = num_known
    for one, other in pairs:
        if one != other:
            break
        count += 1
    return count


def find_misses(prompts: Sequence[PastPrompt], block_size: int) -> list[Miss]:
    """Compares each prompt with the prompts that arrived before it, and returns those that were computed again.

    A prompt that continues an earlier one, with all earlier tokens found in the prefix cache, is no miss; nor is one
    that has nothing in common with the prompts before it.

    Args:
        prompts: in the order of their arrival.
        block_size: the number of tokens of a block; only whole blocks can be found in the prefix cache.
    """
    every = _Beginnings(block_size)
    of_keeper: dict[Hashable, tuple[_Beginnings, list[PastPrompt]]] = {}
    misses: list[Miss] = []
    for prompt in prompts:
        own, recent = of_keeper.setdefault(prompt.keeper, (_Beginnings(block_size), []))
        found = own.find(prompt) or _find_likest(prompt, recent[-_NUM_COMPARED:])
        if miss := _explain(prompt, found, every.find(prompt), block_size):
            misses.append(miss)
        own.add(prompt)
        every.add(prompt)
        recent.append(prompt)
    return misses


def _find_likest(prompt: PastPrompt, recent: Sequence[PastPrompt]) -> _Found | None:
    found = [_Found(earlier, _count_common(prompt, earlier)) for earlier in reversed(recent)]
    return max(found, key=lambda each: each.num_tokens, default=None)


def _explain(prompt: PastPrompt, own: _Found | None, any_: _Found | None, block_size: int) -> Miss | None:
    """Returns why a prompt was computed again; None if only what is new was computed.

    Args:
        own: the earlier prompt that it could share blocks with.
        any_: the earlier prompt that it has most in common with.
    """

    def is_lost(found: _Found) -> bool:
        # The last token of a prompt is always computed, since its row gives the first token of the answer.
        num_kept = min(found.num_tokens, len(found.prompt.token_ids) - 1) // block_size * block_size
        return min(num_kept, prompt.num_tokens - 1) > prompt.num_cached_tokens

    if prompt.submission.computes_whole_prompt:
        return Miss(prompt, MissCause.WHOLE_PROMPT, *(own or (None, 0)))
    if own is not None and is_lost(own):
        was_computed = own.prompt.computed_at is not None and own.prompt.computed_at <= prompt.arrived_at
        return Miss(prompt, MissCause.NOT_KEPT if was_computed else MissCause.AT_ONCE, *own)
    if any_ is not None and is_lost(any_):
        return Miss(prompt, _difference(prompt.submission, any_.prompt.submission), *any_)
    if own is not None and 0 < own.num_tokens < min(prompt.num_tokens, len(own.prompt.token_ids)):
        return Miss(prompt, MissCause.PARTED, *own)
    return None


def _difference(one: Submission, other: Submission) -> MissCause:
    """Returns why two requests share no blocks."""
    if one.tenant != other.tenant and one.cache_salt != other.cache_salt:
        return MissCause.OTHER_TENANT
    return MissCause.OTHER_SALT if one.cache_salt != other.cache_salt else MissCause.OTHER_ADAPTER
