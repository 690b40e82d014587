"""Turns prompts into ids, and ids into text, for the whole gateway. Long texts take turns in a few threads.

A prompt with too many characters to fit the model is refused at once, without a turn. Callers pass the model's limits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, takewhile
from typing import TYPE_CHECKING, TypeVar

from blockyard.contract.chat import Conversation
from blockyard.errors import Reason, Violation, invalid
from blockyard.panics import panics_as_errors
from gateway.chat import count_characters, prompt_of
from gateway.text.turns import Turns
from gateway.text.vocabulary import SLICE_CHARACTERS
from gateway.validation import prompt_too_long, size_of

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable, Sequence

    from blockyard.contract.scheduling import Adapter
    from gateway.request import GenerationRequest
    from gateway.text.adapter_tokenizers import AdapterTokenizers
    from gateway.text.fill_in_middle import FillTokens
    from gateway.text.tokenizer import Tokenizer
    from gateway.text.vocabulary import Steps
    from gateway.validation import ModelLimits

T = TypeVar("T")
MAX_INLINE_CHARACTERS = 2048
"""A text of at most this many characters is encoded at once, in the event loop."""
# A template renders this many characters in the time that encoding one takes.
_RENDERED_CHARACTERS = 16
# The approximate number of characters in a token.
_CHARACTERS_OF_TOKEN = 4
COUNTED_LENGTHS = 2
"""The tokens of a text are counted up to this many lengths of the model, to say by how much it is too long."""


class Encoding:
    """Encodes and decodes all texts, in turns. A process has one object; its creator calls `close`."""

    def __init__(self) -> None:
        self._turns = Turns()

    def close(self) -> None:
        self._turns.close()

    async def prompt_of(
        self, request: GenerationRequest, tokenizer: Tokenizer, max_model_len: int | None, last: int | None = None
    ) -> Sequence[int]:
        """Returns the ids of a request's prompt, or the last of them.

        Args:
            request: the request with the prompt.
            tokenizer: the tokenizer of the request's model or adapter.
            max_model_len: the model's length, which a prompt must be shorter than; None: no limit.
            last: the number of ids at the prompt's end to return; None: all ids.

        Raises BlockyardError: FIELD_INVALID for a conversation that cannot be rendered; PROMPT_TOO_LONG for a text so
        long that it was not encoded completely; UNSUPPORTED_PARAMETER for a suffix that the model has no tokens for;
        TENANT_QUOTA, QUEUE_FULL.
        """
        if request.suffix:
            return await self._fill_prompt_of(request, tokenizer, max_model_len)
        text, specials = request.prompt, request.add_special_tokens
        if isinstance(text, tuple):
            return text if last is None else text[-last:]
        if isinstance(text, Conversation):
            # The chat template writes the special tokens itself.
            text, specials = await self._render(text, tokenizer, request.tenant), False
        _require_short(text, tokenizer, max_model_len, last)
        steps = _encode(text, specials, tokenizer, max_model_len, last)
        return await self.take(request.tenant, len(text), steps)

    async def _fill_prompt_of(
        self, request: GenerationRequest, tokenizer: Tokenizer, max_model_len: int | None
    ) -> Sequence[int]:
        """Returns the ids of a prompt to fill in the text between a prefix and a suffix."""
        prefix, suffix, tokens = request.prompt, request.suffix, tokenizer.fill_tokens
        if not isinstance(prefix, str):
            raise invalid([Violation("suffix", "is allowed only with a text as prompt")])
        if request.truncate_prompt_tokens is not None:
            description = "is not supported with truncate_prompt_tokens, which would cut off what it stands behind"
            raise invalid([Violation("suffix", description, Reason.UNSUPPORTED_PARAMETER)])
        if tokens is None:
            description = "is not supported: the model's tokenizer has no tokens for filling in the middle"
            raise invalid([Violation("suffix", description, Reason.UNSUPPORTED_PARAMETER)])
        begin = tokenizer.begin_token_ids if request.add_special_tokens else ()
        steps = _encode_fill(prefix, suffix, tokens, begin, tokenizer, max_model_len)
        return await self.take(request.tenant, len(prefix) + len(suffix), steps)

    async def _render(self, conversation: Conversation, tokenizer: Tokenizer, tenant: str) -> str:
        """Renders a conversation, which is fast and therefore counts as a shorter job than encoding its text."""
        size = count_characters(conversation)
        if size > MAX_INLINE_CHARACTERS:
            size = max(size // _RENDERED_CHARACTERS, MAX_INLINE_CHARACTERS + 1)
        return await self.run(lambda: prompt_of(conversation, tokenizer), tenant, size)

    async def bad_words_of(self, words: Sequence[str], tokenizer: Tokenizer, tenant: str) -> list[tuple[int, ...]]:
        """Returns the token sequences that the bad words forbid."""
        return await self.run(lambda: tokenizer.encode_bad_words(words), tenant, sum(map(len, words)))

    async def prediction_of(self, request: GenerationRequest, tokenizer: Tokenizer, limits: ModelLimits) -> list[int]:
        """Returns the ids of the text that an answer may repeat, as many as the model's length.

        An answer cannot have an id beyond the vocabulary, so such an id ends the text.
        """
        steps = tokenizer.encode_steps(request.prediction, False, enough=limits.max_model_len)
        encoded = await self.take(request.tenant, len(request.prediction), steps)
        known = takewhile(lambda token_id: token_id < limits.vocab_size, encoded.token_ids)
        return list(islice(known, limits.max_model_len))

    async def decode(
        self, token_ids: Sequence[int], tokenizer: Tokenizer, tenant: str, *, skip_special_tokens: bool = True
    ) -> str:
        size = _CHARACTERS_OF_TOKEN * len(token_ids)
        return await self.run(lambda: tokenizer.decode(token_ids, skip_special_tokens), tenant, size)

    async def find(self, tokenizers: AdapterTokenizers, adapter: Adapter | None) -> Tokenizer:
        """Returns the tokenizer of requests with an adapter; raises BlockyardError."""
        if tokenizers.knows(adapter):
            return tokenizers.of(adapter)
        return await self.run(lambda: tokenizers.of(adapter))

    async def run(self, work: Callable[[], T], tenant: str = "", size: int = MAX_INLINE_CHARACTERS + 1) -> T:
        """Runs a function in its turn, by default in a thread. `size`: its cost, in characters."""

        def steps() -> Steps[T]:
            yield size
            return work()

        return await self.take(tenant, size, steps())

    async def take(self, tenant: str, size: int, steps: Steps[T]) -> T:
        """Runs steps in their turn: in threads, unless they are short. `size`: the characters of all steps."""
        steps = _without_panics(steps)
        if size <= MAX_INLINE_CHARACTERS:
            return run_steps(steps)
        return await self._turns.run(tenant, size, join_steps(steps))


def run_steps(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def join_steps(steps: Steps[T]) -> Steps[T]:
    """Merges short steps, since each step costs a change of threads."""
    num_characters = 0
    while True:
        try:
            size = next(steps)
        except StopIteration as stop:
            return stop.value
        if num_characters + size > SLICE_CHARACTERS:
            yield max(size, SLICE_CHARACTERS)
            num_characters = 0
        num_characters += size


def run_all(each: Iterable[Steps[T]]) -> Steps[list[T]]:
    """Runs several generators of steps one after another, and returns their results."""
    results: list[T] = []
    for steps in each:
        results.append((yield from steps))
    return results


def _without_panics(steps: Steps[T]) -> Steps[T]:
    """Runs steps; a panic of the tokenizer's library is raised to the caller as an ordinary error."""
    with panics_as_errors():
        return (yield from steps)


def _require_short(text: str, tokenizer: Tokenizer, max_model_len: int | None, last: int | None) -> None:
    """Raises BlockyardError PROMPT_TOO_LONG for a text with too many characters to fit the model."""
    if max_model_len is None or len(text) < max_model_len or (last is not None and last < max_model_len):
        return
    if (least := tokenizer.min_tokens(text, max_model_len)) >= max_model_len:
        raise invalid([prompt_too_long(size_of(len(text), least), max_model_len)])


def _encode(
    text: str, specials: bool, tokenizer: Tokenizer, max_model_len: int | None, last: int | None
) -> Steps[array[int]]:
    """Encodes a text as far as needed; raises BlockyardError PROMPT_TOO_LONG for a text that is much too long."""
    if last is not None and (max_model_len is None or last < max_model_len):
        encoded = yield from tokenizer.encode_steps(text, specials, enough=last, from_end=True)
        return encoded.token_ids[-last:]
    enough = None if max_model_len is None else COUNTED_LENGTHS * max_model_len
    encoded = yield from tokenizer.encode_steps(text, specials, enough=enough)
    if not encoded.is_whole and max_model_len is not None:
        raise invalid([prompt_too_long(size_of(len(text), len(encoded.token_ids)), max_model_len)])
    return encoded.token_ids if last is None else encoded.token_ids[-last:]


def with_fill_ends(request: GenerationRequest, tokenizer: Tokenizer) -> GenerationRequest:
    """Adds the tokens that end a filled-in middle to a request with a suffix, and drops the suffix.

    To be called when the prompt has become ids, which hold the suffix.
    """
    if not request.suffix or tokenizer.fill_tokens is None:
        return request
    ends = () if request.stop.ignore_eos else tokenizer.fill_tokens.end_token_ids
    stop = replace(request.stop, stop_token_ids=(*request.stop.stop_token_ids, *ends))
    return replace(request, suffix="", stop=stop)


def _encode_fill(
    prefix: str,
    suffix: str,
    tokens: FillTokens,
    begin: Sequence[int],
    tokenizer: Tokenizer,
    max_model_len: int | None,
) -> Steps[array[int]]:
    """Encodes a prompt to fill in the middle; raises BlockyardError PROMPT_TOO_LONG for texts that are too long."""
    mark, num_mark_tokens = tokenizer.inner_mark
    for text in (prefix, suffix):
        _require_short(text, tokenizer, max_model_len, None)
    before = yield from _encode(prefix, False, tokenizer, max_model_len, None)
    behind = yield from _encode(mark + suffix, False, tokenizer, max_model_len, None)
    return tokens.join(begin, before, behind[num_mark_tokens:])
