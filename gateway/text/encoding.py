"""Tokenizes long texts in a thread, so that the streams of others do not wait."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from gateway.chat import prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.chat import Conversation
    from gateway.request import GenerationRequest
    from gateway.text.tokenizer import Tokenizer

T = TypeVar("T")
_MAX_INLINE_CHARACTERS = 2048


class Encoding:
    """A tokenizer with threads. One for each process; its maker closes it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._executor = ThreadPoolExecutor(2, "tokenize")

    def close(self) -> None:
        """Stops its threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def prompt_of(self, request: GenerationRequest) -> tuple[int, ...]:
        """Returns the ids of a request's prompt; raises BlockyardError where it has none."""
        prompt = request.prompt
        if isinstance(prompt, tuple):
            return prompt
        if isinstance(prompt, str):
            return tuple(await self.encode(prompt, add_special_tokens=request.add_special_tokens))
        return tuple(await self._run(prompt.num_characters, lambda: self._encode_conversation(prompt)))

    def _encode_conversation(self, conversation: Conversation) -> list[int]:
        # The template has put special tokens where they belong.
        return self._tokenizer.encode(prompt_of(conversation, self._tokenizer), add_special_tokens=False)

    async def bad_words_of(self, request: GenerationRequest) -> list[tuple[int, ...]]:
        """Returns the token sequences that a request's bad words forbid."""
        words = request.sampling.bad_words
        return await self._run(sum(map(len, words)), lambda: self._tokenizer.encode_bad_words(words))

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turns text into ids."""
        return await self._run(len(text), lambda: self._tokenizer.encode(text, add_special_tokens))

    async def _run(self, num_characters: int, work: Callable[[], T]) -> T:
        if num_characters <= _MAX_INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
