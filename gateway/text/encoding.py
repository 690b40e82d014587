"""Tokenizes long texts in a thread, so that the streams of others do not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from blockyard.service.threads import Threads
from gateway.chat import prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gateway.request import GenerationRequest
    from gateway.scheduler_messages import Adapter
    from gateway.text.adapter_tokenizers import AdapterTokenizers
    from gateway.text.tokenizer import Tokenizer

T = TypeVar("T")
_MAX_INLINE_CHARACTERS = 2048


class Encoding:
    """Threads in which tokenizers work. One for each process; its maker closes it."""

    def __init__(self) -> None:
        self._threads = Threads(2, "tokenize")

    def close(self) -> None:
        """Stops its threads."""
        self._threads.close()

    async def prompt_of(self, request: GenerationRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Returns the ids of a request's prompt; raises BlockyardError where it has none."""
        prompt, specials = request.prompt, request.add_special_tokens
        if isinstance(prompt, tuple):
            return prompt
        if isinstance(prompt, str):
            return tuple(await self._run(len(prompt), lambda: tokenizer.encode(prompt, specials)))
        # The template has put special tokens where they belong.
        return tuple(
            await self._run(prompt.num_characters, lambda: tokenizer.encode(prompt_of(prompt, tokenizer), False))
        )

    async def bad_words_of(self, words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
        """Returns the token sequences that bad words forbid."""
        return await self._run(sum(map(len, words)), lambda: tokenizer.encode_bad_words(words))

    async def find(self, tokenizers: AdapterTokenizers, adapter: Adapter | None) -> Tokenizer:
        """Returns the tokenizer of requests with an adapter; raises BlockyardError."""
        if tokenizers.knows(adapter):
            return tokenizers.of(adapter)
        return await self.run(lambda: tokenizers.of(adapter))

    async def _run(self, num_characters: int, work: Callable[[], T]) -> T:
        return work() if num_characters <= _MAX_INLINE_CHARACTERS else await self.run(work)

    async def run(self, work: Callable[[], T]) -> T:
        """Runs work in a thread."""
        return await self._threads.run(work)
