"""One request's life, for both fronts: validated, tokenized, sent to the scheduler, turned into text, ended.

Knows neither messages nor HTTP: both fronts hand it a GenerationRequest and read events.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.telemetry import EventLogger
from gateway.answer import AnswerRules, SequenceAnswer
from gateway.live_requests import RETRY_SECONDS, LiveRequests, Outlet
from gateway.request import Accepted, Finished, Recovered
from gateway.validation import ModelLimits, complete, find_violations

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gateway.attachment import ModelFacts
    from gateway.request import Event, GenerationRequest
    from gateway.tokenizer import Tokenizer

log = EventLogger(__name__)

# A longer prompt is tokenized in a thread, so that the streams of others go on.
_MAX_INLINE_CHARACTERS = 2048


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that is served."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    determinism_id: str
    batch_invariant: bool


class Generation:
    """One request's events, read by `async for`: Accepted first, then Delta and one Finished for each sequence;
    Recovered where a failure was outlived.

    Reading raises BlockyardError when the request fails or is cancelled (CLIENT_CANCELLED), after what came before.
    A front that answers with a status line awaits Accepted first (`await anext(generation)`), since the scheduler may
    refuse the request. Whoever started it calls `aclose`, always. There is one reader.
    """

    def __init__(
        self,
        accepted: Accepted,
        answers: list[SequenceAnswer],
        *,
        wire_id: str,
        determinism_id: str,
        owner: LiveRequests,
    ) -> None:
        self.request_id = accepted.request_id
        self.wire_id = wire_id
        self.answers = answers
        self.num_cached_tokens = 0
        self._accepted = accepted
        self._determinism_id = determinism_id
        self._owner = owner
        self._first_sequence_id: int | None = None
        self._events: deque[Event] = deque()
        self._untold = list(answers)
        self._error: BlockyardError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._has_news = False

    @property
    def is_accepted(self) -> bool:
        """Whether the scheduler has queued it."""
        return self._first_sequence_id is not None

    def route_of(self, answer: SequenceAnswer) -> int:
        """The sequence id of one of its answers, once accepted."""
        assert self._first_sequence_id is not None
        return self._first_sequence_id + answer.index

    def __aiter__(self) -> Generation:
        """Is its own iterator."""
        return self

    async def __anext__(self) -> Event:
        """Waits for the next event."""
        while True:
            if self._events:
                return self._events.popleft()
            if self._has_news:
                self._has_news = False
                self._collect()
            elif self._error is not None:
                raise self._error
            elif not self._untold:
                raise StopAsyncIteration
            else:
                await self._wait()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _collect(self) -> None:
        for answer in tuple(self._untold):
            if answer.advance():
                self._owner.stopped(self, answer)
            delta = answer.take()
            if delta is not None:
                self._events.append(delta)
            if answer.ended is not None:
                self._untold.remove(answer)
                self._events.append(self._finished(answer))

    def _finished(self, answer: SequenceAnswer) -> Finished:
        assert answer.ended is not None
        return Finished(
            index=answer.index,
            reason=answer.ended.reason,
            matched=answer.ended.matched,
            num_prompt_tokens=self._accepted.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_completion_tokens=answer.num_tokens,
            determinism_id=self._determinism_id,
        )

    def accept(self, first_sequence_id: int) -> None:
        """Takes the scheduler's word that the request is queued."""
        self._first_sequence_id = first_sequence_id
        self._events.append(self._accepted)
        self.wake()

    def recover(self, event: Recovered) -> None:
        """Takes the scheduler's word that it goes on after a failure, behind the tokens that came before."""
        self._collect()
        if self._untold:
            self._events.append(event)
        if not event.exact:
            # What is one answer of two workers repeats neither's.
            self._determinism_id = ""
        self.wake()

    def fail(self, error: BlockyardError) -> None:
        """Ends it with an error, which is raised after what has come."""
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        """Tells the reader that there is something new."""
        self._has_news = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """Ends it: aborts what still runs. Idempotent; for callbacks."""
        self._owner.close(self)

    async def aclose(self) -> None:
        """Ends it: aborts what still runs (the client is gone). Idempotent."""
        self.close()


class Link(Outlet, Protocol):
    """The connection to the scheduler, as the core needs it."""

    @property
    def facts(self) -> ModelFacts | None:
        """What is known of the model."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether requests would be computed now."""
        ...

    @property
    def takes_requests(self) -> bool:
        """Whether requests can be sent; they wait while nobody is ready."""
        ...

    @property
    def message(self) -> str:
        """If not ready: what is missing, for a person."""
        ...


class GenerationService:
    """Starts requests, for both fronts. One for each process."""

    def __init__(self, tokenizer: Tokenizer, link: Link, live: LiveRequests, *, model_name: str, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self._link = link
        self._live = live
        self._seed = seed
        self._executor = ThreadPoolExecutor(2, "tokenize")
        self._is_draining = False

    async def start(self, request: GenerationRequest) -> Generation:
        """Validates, tokenizes and submits a request.

        Raises BlockyardError: every violation at once; REQUEST_ID_CONFLICT; NO_READY_WORKER, at once, while there is
        no scheduler or the model is not known. Without a worker it waits, as long as the scheduler lets it.
        """
        self._facts()
        request = request if request.request_id else replace(request, request_id=f"gen-{secrets.token_hex(12)}")
        self._live.reserve(request.request_id)
        try:
            return await self._start(request)
        finally:
            self._live.unreserve(request.request_id)

    async def _start(self, request: GenerationRequest) -> Generation:
        token_ids = await self._encode(request)
        bad_word_ids = await self._encode_bad_words(request)
        # Read again: the scheduler may have gone meanwhile.
        facts = self._facts()
        limits = ModelLimits(self.model_name, facts.vocab_size, facts.max_model_len, self.tokenizer.end_token_ids)
        violations = find_violations(request, token_ids, limits, bad_word_ids=bad_word_ids)
        if violations:
            raise invalid(violations)
        submission = complete(
            request,
            token_ids,
            limits,
            generation_defaults=self.tokenizer.generation_defaults,
            gateway_seed=self._seed,
            bad_word_ids=bad_word_ids,
        )
        wire_id = self._live.wire_id(request.request_id)
        generation = Generation(
            Accepted(request.request_id, len(token_ids), submission.sampling.seed or 0, self.model_name),
            self._make_answers(request, token_ids),
            wire_id=wire_id,
            determinism_id=facts.determinism_id,
            owner=self._live,
        )
        self._live.open(generation, replace(submission, request_id=wire_id))
        log.debug("submitted", request_id=request.request_id, num_prompt_tokens=len(token_ids), n=request.n)
        return generation

    def _make_answers(self, request: GenerationRequest, prompt_token_ids: tuple[int, ...]) -> list[SequenceAnswer]:
        end_token_ids = frozenset[int]() if request.stop.ignore_eos else self.tokenizer.end_token_ids
        rules = AnswerRules(request.stop, end_token_ids, request.return_token_ids)
        skip = request.skip_special_tokens
        return [
            SequenceAnswer(index, rules, self.tokenizer.make_detokenizer(prompt_token_ids, skip_special_tokens=skip))
            for index in range(request.n)
        ]

    async def _encode(self, request: GenerationRequest) -> tuple[int, ...]:
        prompt = request.prompt
        if not isinstance(prompt, str):
            return prompt
        return tuple(await self.encode(prompt, add_special_tokens=request.add_special_tokens))

    async def _encode_bad_words(self, request: GenerationRequest) -> list[tuple[int, ...]]:
        words = request.sampling.bad_words
        if sum(map(len, words)) <= _MAX_INLINE_CHARACTERS:
            return self.tokenizer.encode_bad_words(words)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self.tokenizer.encode_bad_words, words)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turns text into ids, a long one in a thread."""
        if len(text) <= _MAX_INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self.tokenizer.encode, text, add_special_tokens)

    def cancel(self, request_ids: Iterable[str]) -> list[str]:
        """Ends requests by id with CLIENT_CANCELLED, and returns those that were running."""
        return self._live.cancel(request_ids)

    def is_ready(self) -> bool:
        """Whether requests should be sent here; `readiness_message` says why not. May be called from any thread."""
        return self._link.is_ready and not self._is_draining

    @property
    def readiness_message(self) -> str:
        """If not ready: what is missing, for a person; else empty."""
        if self._is_draining:
            return "the gateway is stopping"
        return self._link.message

    @property
    def num_requests(self) -> int:
        """Requests that run."""
        return self._live.num_running

    def models(self) -> list[ModelCard]:
        """Lists the models: one, or none while the scheduler has not told its facts."""
        facts = self._link.facts
        if facts is None:
            return []
        return [
            ModelCard(
                name=self.model_name,
                max_model_len=facts.max_model_len,
                vocab_size=facts.vocab_size,
                has_chat_template=self.tokenizer.has_chat_template,
                determinism_id=facts.determinism_id,
                batch_invariant=facts.batch_invariant,
            )
        ]

    def resolve_model(self, name: str) -> None:
        """Raises BlockyardError MODEL_NOT_FOUND unless the name is empty or the served model's."""
        if name not in ("", self.model_name):
            told = f"{name!r} is not served; {self.model_name!r} is"
            raise invalid([Violation("model", told, Reason.MODEL_NOT_FOUND)])

    def _facts(self) -> ModelFacts:
        """The model's facts; raises BlockyardError NO_READY_WORKER while requests cannot be sent."""
        facts = self._link.facts
        if facts is None or not self._link.takes_requests:
            raise BlockyardError(Reason.NO_READY_WORKER, self._link.message, retry_after_seconds=RETRY_SECONDS)
        return facts

    def start_draining(self) -> None:
        """Stops being ready; requests are still served."""
        self._is_draining = True

    async def drained(self) -> None:
        """Waits until nobody reads an answer."""
        idle = asyncio.Event()
        self._live.on_idle = idle.set
        while self._live.num_open:
            idle.clear()
            await idle.wait()

    def stop(self, error: BlockyardError) -> None:
        """Ends what still runs with an error."""
        self._live.end_all(error)
        self._executor.shutdown(wait=False, cancel_futures=True)
