"""Tokenizes, validates and completes requests, and makes their initial states. Sends nothing."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from blockyard.contract.chat import Conversation
from blockyard.contract.events import Accepted
from blockyard.contract.request import OnDisconnect
from blockyard.errors import BlockyardError, invalid
from gateway.codec import state as state_codec
from gateway.grammars.checking import wrong_format
from gateway.live.answer import AnswerRules, PromptAnswer, SequenceAnswer
from gateway.live.request_state import Origin, RequestState
from gateway.request import derive_cache_salt, wire_id
from gateway.text.adapter_tokenizers import require_vocabulary
from gateway.text.answer_parsing import answer_context_of, parsers_of, with_parsing
from gateway.text.encoding import with_fill_ends
from gateway.text.thinking import with_thinking
from gateway.validation import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    ModelLimits,
    complete,
    find_violations,
    length_limit,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from blockyard.contract.scheduling import Adapter, ModelFacts, Submission
    from blockyard.errors import Violation
    from gateway.grammars.checking import GrammarChecks
    from gateway.observe.request_log import RequestLog
    from gateway.request import GenerationRequest
    from gateway.text.adapter_tokenizers import AdapterTokenizers
    from gateway.text.encoding import Encoding
    from gateway.text.tokenizer import Tokenizer

T = TypeVar("T")


async def _result_or_violations(work: Awaitable[T]) -> tuple[T | None, tuple[Violation, ...]]:
    """Returns a result, or the violations of the BlockyardError that was raised instead.

    Raises a BlockyardError without violations.
    """
    try:
        return await work, ()
    except BlockyardError as error:
        if not error.violations:
            raise
        return None, error.violations


class Prepared(NamedTuple):
    """A request with its warnings, and its submission to the scheduler."""

    request: GenerationRequest
    submission: Submission


class Preparation:
    """Prepares requests for one model. A process has one object; its creator calls `close`.

    Args:
        tokenizers: the tokenizers of the model and of adapters.
        encoding: runs the tokenizers, in threads for long texts.
        model_name: the model's name in requests.
        seed: the gateway's seed, from which the seeds of requests without a seed are derived.
        clamps_max_tokens: whether a max_tokens that exceeds the room after the prompt is reduced instead of refused.
        served: the names of all models of the gateway.
        shares_prefixes: whether tenants find each other's prefixes in the prefix cache.
        grammars: checks the grammars; closed by `close`.
    """

    def __init__(
        self,
        tokenizers: AdapterTokenizers,
        encoding: Encoding,
        *,
        model_name: str,
        seed: int,
        clamps_max_tokens: bool = False,
        served: Sequence[str] = (),
        shares_prefixes: bool = False,
        grammars: GrammarChecks,
    ) -> None:
        self._tokenizers = tokenizers
        self._encoding = encoding
        self._grammars = grammars
        self._model_name = model_name
        self._seed = seed
        self._clamps_max_tokens = clamps_max_tokens
        self._served = served
        self._shares_prefixes = shares_prefixes

    def close(self) -> None:
        """Stops the threads and processes that check grammars, but not the threads of `encoding`."""
        self._grammars.close()

    async def find_tokenizer(self, adapter: Adapter | None) -> Tokenizer:
        """Finds the tokenizer of an adapter, or of the model for None. Raises BlockyardError MODEL_NOT_LOADED."""
        if adapter is None:
            return self._tokenizers.model
        return await self._encoding.find(self._tokenizers, adapter)

    async def prompt_of(
        self, request: GenerationRequest, facts: Callable[[], ModelFacts], tokenizer: Tokenizer
    ) -> Sequence[int]:
        """Returns the ids of a request's prompt, truncated if the request asks for truncation.

        Raises BlockyardError: PROMPT_TOO_LONG for a text so long that it was not encoded completely; TENANT_QUOTA or
        QUEUE_FULL if too many characters wait to be tokenized; the error of `facts` if truncation needs the facts.
        """
        limit = request.truncate_prompt_tokens
        try:
            max_model_len = facts().max_model_len
        except BlockyardError:
            if limit == -1:
                raise
            # Without the model's facts the limit is unknown: do not check the length here.
            max_model_len = None
        if limit == -1 and max_model_len is not None:
            limit = self._longest_prompt(max_model_len, request.stop.max_tokens or 1)
        last = limit if limit is not None and limit > 0 else None
        return await self._encoding.prompt_of(request, tokenizer, max_model_len, last)

    def _longest_prompt(self, max_model_len: int, max_tokens: int) -> int:
        """Returns the length of the longest prompt that leaves room for `max_tokens`; at least 1."""
        if self._clamps_max_tokens and max_tokens >= max_model_len:
            max_tokens = 1
        return max(1, max_model_len - max_tokens)

    async def prepare(
        self, request: GenerationRequest, facts: Callable[[], ModelFacts], loras: Mapping[str, Adapter]
    ) -> Prepared:
        """Makes the submission of a request. The request must have an id; its model may be the name of an adapter.

        Raises BlockyardError with all violations, or the error of `facts`, which is only called when needed.
        """
        adapter = loras.get(request.model)

        def facts_of_adapter() -> ModelFacts:
            return facts().behind(adapter)

        tokenizer = await self.find_tokenizer(adapter)
        token_ids, wrong = await _result_or_violations(self.prompt_of(request, facts_of_adapter, tokenizer))
        bad_word_ids, wrong_words = await _result_or_violations(
            self._encoding.bad_words_of(_fitting_words(request), tokenizer, request.tenant)
        )
        if isinstance(request.prompt, Conversation):
            request = with_parsing(request, tokenizer.dialect)
        if request.sampling.thinking_token_budget is not None:
            request = with_thinking(request, token_ids or (), tokenizer)
        grammar, wrong_grammar = await self._grammar_of(request, token_ids or (), tokenizer)
        known = facts_of_adapter()
        if adapter is not None and tokenizer is not self._tokenizers.model:
            require_vocabulary(adapter.name, tokenizer, known.vocab_size)
        # Ids beyond the model's vocabulary cannot be generated.
        bad_word_ids = tuple(ids for ids in bad_word_ids or () if max(ids, default=0) < known.vocab_size)
        limits = ModelLimits(
            adapter.name if adapter else self._model_name,
            known.vocab_size,
            known.max_model_len,
            tokenizer.end_token_ids,
            known.max_num_seqs,
            self._served,
        )
        if request.prediction:
            request = await self._with_predicted_ids(request, tokenizer, limits)
        if self._clamps_max_tokens and token_ids is not None:
            request = _with_clamped_length(request, len(token_ids), known.max_model_len)
        found = find_violations(request, token_ids, limits, bad_word_ids=bad_word_ids)
        if violations := [*wrong, *wrong_words, *wrong_grammar, *found]:
            raise invalid(violations)
        assert token_ids is not None
        request = with_fill_ends(request, tokenizer)
        submission = complete(
            request,
            token_ids,
            limits,
            generation_defaults=tokenizer.generation_defaults,
            gateway_seed=self._seed,
            bad_word_ids=bad_word_ids,
            grammar=grammar,
        )
        submission = replace(
            submission,
            request_id=wire_id(request.tenant, request.request_id),
            lora=adapter,
            cache_salt=derive_cache_salt("" if self._shares_prefixes else request.tenant, request.cache_salt),
        )
        return Prepared(request, state_codec.with_state(submission, request))

    async def _with_predicted_ids(
        self, request: GenerationRequest, tokenizer: Tokenizer, limits: ModelLimits
    ) -> GenerationRequest:
        predicted = await self._encoding.prediction_of(request, tokenizer, limits)
        return replace(request, sampling=replace(request.sampling, predicted_token_ids=tuple(predicted)))

    async def _grammar_of(
        self, request: GenerationRequest, token_ids: Sequence[int], tokenizer: Tokenizer
    ) -> tuple[str, list[Violation]]:
        """Returns the compiled grammar of the answer, empty if it may have any form, and what is wrong with it."""
        if not request.has_form:
            return "", []
        context = answer_context_of(request, token_ids, tokenizer)
        grammar, wrong = await _result_or_violations(self._grammars.grammar_of(request, context))
        return grammar or "", [*wrong, *wrong_format(request, tokenizer, self._tokenizers.model)]

    def make_state(
        self, prepared: Prepared, determinism_id: str, request_log: RequestLog, *, is_known: bool = False
    ) -> RequestState:
        """Makes the initial state of a request that this or another gateway has prepared. Raises BlockyardError.

        `is_known`: whether a scheduler had accepted the request before.
        """
        request, submission = prepared
        if (context := request_log.span.context) is not None:
            submission = replace(submission, trace_context=context)
        now = asyncio.get_running_loop().time()
        remaining = submission.remaining_seconds
        prompt_token_ids, sampling = submission.prompt_token_ids, submission.sampling
        model = submission.lora.name if submission.lora else self._model_name
        tokenizer = self._tokenizers.of(submission.lora) if submission.lora else self._tokenizers.model
        texts = tokenizer.token_texts(skip_special_tokens=request.skip_special_tokens)
        return RequestState(
            submission,
            Origin(
                Accepted(request.request_id, len(prompt_token_ids), sampling.seed or 0, model, request.warnings),
                arrived_at=now,
                outlives_readers=request.on_disconnect is OnDisconnect.KEEP,
                deadline_at=None if remaining is None else now + remaining,
                is_known=is_known,
                front_state=request.front_state,
            ),
            _make_answers(request, submission, tokenizer),
            determinism_id=determinism_id,
            request_log=request_log,
            prompt=None
            if sampling.prompt_logprobs is None
            else PromptAnswer(len(prompt_token_ids), texts, submission.num_virtual_tokens),
        )


def _fitting_words(request: GenerationRequest) -> list[str]:
    """Returns the bad words within the limits. Words beyond them are refused later, and there may be millions."""
    return [word for word in request.sampling.bad_words[:MAX_BAD_WORDS] if len(word) <= MAX_BAD_WORD_CHARACTERS]


def _make_answers(request: GenerationRequest, submission: Submission, tokenizer: Tokenizer) -> list[SequenceAnswer]:
    skip, rule = request.skip_special_tokens, request.parsing
    parsers = parsers_of(rule, request.request_id, submission.prompt_token_ids, tokenizer) if rule else None
    has_logprobs = submission.sampling.logprobs is not None
    rules = AnswerRules(
        request.stop,
        end_token_ids=frozenset() if request.stop.ignore_eos else tokenizer.end_token_ids,
        stop_token_ids=frozenset(submission.stop_token_ids),
        return_token_ids=request.return_token_ids,
        logprobs=tokenizer.token_texts(skip_special_tokens=skip) if has_logprobs else None,
        parsers=parsers,
    )
    context = submission.prompt_token_ids[-1:]
    make = functools.partial(
        tokenizer.make_detokenizer, skip_special_tokens=skip, keeps_markers=request.parsing is not None
    )
    return [SequenceAnswer(index, rules, make(context)) for index in range(submission.n)]


def _with_clamped_length(request: GenerationRequest, num_prompt_tokens: int, max_model_len: int) -> GenerationRequest:
    """Reduces a max_tokens that exceeds the room after the prompt to that room, and adds a warning.

    A prompt that leaves no room at all is refused later.
    """
    room, max_tokens = max_model_len - num_prompt_tokens, request.stop.max_tokens
    if max_tokens is None or not 0 < room < max_tokens:
        return request
    warning = (
        f"max_tokens: {room} instead of {max_tokens}, which do not fit behind a prompt of {num_prompt_tokens} tokens. "
        f"{length_limit(max_model_len)}"
    )
    stop = replace(request.stop, max_tokens=room)
    return replace(request, stop=stop, warnings=(*request.warnings, warning))
