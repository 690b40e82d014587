"""One model as this gateway serves it: its tokenizer, the link to its scheduler, and its requests.

Knows nothing of the other models of the gateway; `gateway.generation` chooses the model of a request.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.clock import SYSTEM, Clock
from blockyard.contract.models import LoadState, Model
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from gateway.codec import state as state_codec
from gateway.grammars.checking import GrammarChecks
from gateway.live.continuation import check_ends, check_positions, make_records
from gateway.live.outstanding import RETRY_SECONDS
from gateway.observe.request_log import take_over_request_log
from gateway.pooling.service import PoolingService
from gateway.preparation import Preparation, Prepared
from gateway.text.adapter_tokenizers import AdapterTokenizers, require_vocabulary
from gateway.validation import length_limit, unknown_model

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from pathlib import Path

    from blockyard.contract.request import Position
    from blockyard.contract.scheduling import Adapter, ModelFacts, Resumed, Submission
    from gateway.live.live_requests import Admission, LiveRequests
    from gateway.live.request_state import RequestState
    from gateway.live.scheduler_link import Cancelled, SchedulerLink
    from gateway.observe.request_log import RequestLog
    from gateway.pooling.model import RuleReader
    from gateway.request import GenerationRequest
    from gateway.text.encoding import Encoding
    from gateway.text.tokenizer import Tokenizer


_WAITING = "waiting for its scheduler"


class ModelAway(BlockyardError):
    """No scheduler runs for a model, so that nobody but this gateway knows its requests; a request starts one."""


class ServedModel:
    """Begins, resumes and finds the requests of one model.

    Args:
        name: the model's name in requests.
        tokenizer: the model's tokenizer.
        link: the connection to the model's scheduler.
        live: the model's requests here.
        encoding: runs the tokenizers of all models.
        admission: limits the requests of the gateway.
        seed: the gateway's seed, from which the seeds of requests without a seed are derived.
        clamps_max_tokens: whether a max_tokens that exceeds the room after the prompt is reduced instead of refused.
        lora_root: the folder below which adapters may have tokenizers; None: all use the model's tokenizer.
        read_rule: reads the rule for pooling in the model's files.
        served: the names of all models of the gateway.
        starts_on_demand: whether waiting requests start a scheduler or a worker; the model is ready without them.
        max_wait_seconds: the time for which requests wait for the facts of a model that starts on demand.
        shares_prefixes: whether tenants find each other's prefixes in the prefix cache.
        clock: draws the ids of pooling calls without one.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        link: SchedulerLink,
        live: LiveRequests,
        encoding: Encoding,
        admission: Admission,
        *,
        seed: int = 0,
        clamps_max_tokens: bool = False,
        lora_root: Path | None = None,
        read_rule: RuleReader = lambda _: None,
        served: Sequence[str] = (),
        starts_on_demand: bool = False,
        max_wait_seconds: float = 300.0,
        shares_prefixes: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.link = link
        self.live = live
        self._encoding = encoding
        self._admission = admission
        self._served = served
        self.starts_on_demand = starts_on_demand
        self._max_wait_seconds = max_wait_seconds
        # The number of requests that wait for the model's facts, and of calls that wait for its load.
        self._num_early = 0
        self._tokenizers = AdapterTokenizers(tokenizer, lora_root)
        self._preparation = Preparation(
            self._tokenizers,
            encoding,
            model_name=name,
            seed=seed,
            clamps_max_tokens=clamps_max_tokens,
            served=served,
            shares_prefixes=shares_prefixes,
            grammars=GrammarChecks(),
        )
        self.pooling = PoolingService(
            tokenizer,
            live,
            encoding,
            admission,
            model_name=name,
            find_facts=self.await_facts,
            resolve_model=self.resolve,
            read_rule=read_rule,
            shares_prefixes=shares_prefixes,
            clock=clock,
        )

    def close(self) -> None:
        """Stops the threads and processes that check grammars."""
        self._preparation.close()

    # Names.

    def serves(self, name: str) -> bool:
        """Returns whether the name is the model's or an adapter's. An empty name means the model."""
        return name in ("", self.name) or name in self.link.loras

    def resolve(self, name: str) -> None:
        """Raises BlockyardError MODEL_NOT_FOUND unless the model serves the name."""
        if not self.serves(name):
            raise invalid([unknown_model(name, self._served or (self.name,))])

    def cards(self) -> list[Model]:
        """Lists the model and its adapters.

        Before the scheduler has sent the model's facts the list is empty, unless the model starts on demand: then the
        card has what the tokenizer knows.
        """
        if (facts := self.link.facts) is None:
            return [_make_early_card(self.name, self.tokenizer)] if self.starts_on_demand else []
        model = _make_model_card(self.name, facts, self.pooling.find_width(facts), self.tokenizer)
        return [model, *(_make_card(adapter, model, self._tokenizers) for adapter in self.link.loras.values())]

    # Facts.

    def facts(self) -> ModelFacts:
        """Returns the model's facts; raises BlockyardError NO_READY_WORKER while they are not known."""
        facts = self.link.facts
        if facts is None or self.link.has_other_model:
            raise BlockyardError(Reason.NO_READY_WORKER, self.link.message, retry_after_seconds=RETRY_SECONDS)
        return facts

    async def await_facts(self) -> ModelFacts:
        """Returns the model's facts; if the model starts on demand, waits until its first start has brought them.

        Raises BlockyardError NO_READY_WORKER if they are not known, or do not come in time.
        """
        link = self.link
        if self.starts_on_demand and link.facts is None:
            with self._waiting():
                async with asyncio.timeout(self._max_wait_seconds):
                    await link.wait_until(lambda: link.facts is not None)
        return self.facts()

    async def load(self) -> None:
        """Waits until the model is loaded. A model that starts on demand is loaded as for a request.

        Raises BlockyardError NO_READY_WORKER if the load fails, or does not end in time, or if nothing starts it.
        """
        link = self.link
        if self.starts_on_demand:
            with self._waiting():
                async with asyncio.timeout(self._max_wait_seconds):
                    await link.wait_until(lambda: link.is_ready or link.needs_repair)
        if not link.is_ready:
            message = f"{self.name!r} is not loaded: {self._progress}"
            raise BlockyardError(Reason.NO_READY_WORKER, message, retry_after_seconds=RETRY_SECONDS)

    @contextmanager
    def _waiting(self) -> Generator[None]:
        """Counts a caller that waits for the model, which starts the model, and ends with its timeout."""
        self._num_early += 1
        try:
            with suppress(TimeoutError):
                yield
        finally:
            self._num_early -= 1

    @property
    def is_ready(self) -> bool:
        """Whether requests for the model should be sent here. Any thread may read it."""
        return self.link.is_ready or self.starts_on_demand

    @property
    def is_away(self) -> bool:
        """Whether no scheduler runs, and a request starts one."""
        return self.starts_on_demand and not self.link.takes_requests

    @property
    def message(self) -> str:
        """Why requests would not be computed now, for a person; empty if they would be."""
        if self.starts_on_demand and not self.link.is_attached:
            return _WAITING if self.num_requests else _make_away(self.name).message
        return self.link.message

    @property
    def state(self) -> LoadState:
        """Whether the model is loaded; `message` tells why it is not."""
        if self.link.is_ready:
            return LoadState.READY
        if self.link.needs_repair:
            return LoadState.FAILED
        if not self.starts_on_demand:
            return LoadState.NOT_READY
        return LoadState.LOADING if self.link.is_attached or self.num_requests else LoadState.UNLOADED

    @property
    def loading(self) -> str:
        """What is being done to load a model that starts on demand, for a person; empty: it is loaded."""
        if self.link.is_ready or not self.starts_on_demand:
            return ""
        return f"loading {self.name}: {self._progress}"

    @property
    def _progress(self) -> str:
        return " ".join(self.link.message.split()) if self.link.is_attached else _WAITING

    @property
    def num_requests(self) -> int:
        """The number of requests that run or wait."""
        return self.live.num_running + self._num_early

    @property
    def num_waiting_here(self) -> int:
        """The number of requests that wait for a scheduler or worker, because none would compute them now."""
        return 0 if self.link.is_ready else self.num_requests

    @property
    def vocab_size(self) -> int:
        """The size of the model's vocabulary; the tokenizer's size before the model's facts are known."""
        return self.link.facts.vocab_size if self.link.facts else self.tokenizer.vocab_size

    # Requests.

    async def begin(
        self, request: GenerationRequest, positions: Mapping[int, Position], request_log: RequestLog, *, is_new: bool
    ) -> RequestState:
        """Begins a request, or continues it after the tokens that its client sent back.

        Returns the state of the same request if it was sent before. Raises BlockyardError: all violations together;
        REQUEST_ID_CONFLICT; QUEUE_FULL; NO_READY_WORKER if the model's facts are not known.
        """
        with request_log.beginning(), self._admission.beginning(is_new=is_new):
            _require_tokens(await self.await_facts())
            prepared = await self._preparation.prepare(request, self.facts, self.link.loras)
            submission = prepared.submission
            if positions:
                check_positions(positions, submission, self.vocab_size)
            if known := self._find(submission):
                request_log.on_joined()
                return known
            records = make_records(positions, submission) if positions else []
            # The worker that computed the client's tokens is unknown and may differ from the one that continues.
            determinism_id = "" if records else self.facts().determinism_id
            state = self._preparation.make_state(prepared, determinism_id, request_log, is_known=bool(records))
            if records:
                state.take_records(records)
                check_ends(positions, state)
        request_log.on_submitted(submission, state.origin.accepted.warnings)
        self.live.open(state)
        return state

    def _find(self, submission: Submission) -> RequestState | None:
        """Returns the same request if it was sent before; None if its id is new.

        Raises BlockyardError REQUEST_ID_CONFLICT if the id belongs to a different request.
        """
        known = self.live.find(submission.request_id)
        if known is not None and known.submission.digest != submission.digest:
            message = f"request_id {known.origin.accepted.request_id!r} belongs to another request: choose another id"
            raise BlockyardError(Reason.REQUEST_ID_CONFLICT, message)
        return known

    async def look_up(self, wire_id: str) -> RequestState:
        """Returns a request that another gateway served; see OutstandingRequests.look_up.

        Raises ModelAway at once if no scheduler runs, instead of waiting for one that only requests start.
        """
        if self.is_away:
            raise _make_away(self.name)
        return await self.live.look_up(wire_id, self._adopt)

    async def cancel(self, wire_ids: Sequence[str]) -> Cancelled:
        """Cancels requests of all gateways. Raises BlockyardError NO_READY_WORKER, which may be a ModelAway."""
        if self.is_away:
            raise _make_away(self.name)
        return await self.link.cancel(wire_ids)

    def _adopt(self, resumed: Resumed) -> RequestState:
        # The scheduler keeps the remaining deadline.
        submission = replace(state_codec.read_submission(resumed.submission), remaining_seconds=None)
        request_log = take_over_request_log(submission.request_id, submission.trace_context)
        return self._preparation.make_state(
            Prepared(state_codec.request_of(submission), submission), self.facts().determinism_id, request_log
        )

    # Texts.

    async def prompt_of(self, request: GenerationRequest) -> Sequence[int]:
        """Returns the ids of a request's prompt; raises BlockyardError for an invalid conversation."""
        tokenizer = await self.find_tokenizer(request.model)
        return await self._preparation.prompt_of(request, self.facts, tokenizer)

    async def text_of(
        self, token_ids: Sequence[int], name: str, tenant: str, *, skip_special_tokens: bool = True
    ) -> str:
        """Returns the text of token ids, with the tokenizer of the model or an adapter.

        Raises BlockyardError: PROMPT_TOO_LONG for more ids than the model's length, and the errors of `find_tokenizer`.
        """
        if (facts := self.link.facts) is not None and len(token_ids) > facts.max_model_len:
            description = f"has {len(token_ids)} ids. {length_limit(facts.max_model_len)}"
            raise invalid([Violation("token_ids", description, Reason.PROMPT_TOO_LONG)])
        tokenizer = await self.find_tokenizer(name)
        return await self._encoding.decode(token_ids, tokenizer, tenant, skip_special_tokens=skip_special_tokens)

    async def find_tokenizer(self, name: str) -> Tokenizer:
        """Finds the tokenizer of the model or an adapter. Raises BlockyardError MODEL_NOT_LOADED."""
        return await self._preparation.find_tokenizer(self.link.loras.get(name))

    async def check_tokenizer(self, name: str, path: str) -> None:
        """Raises BlockyardError if an adapter's own tokenizer, in the folder `path`, cannot be used here."""
        tokenizer = await self._encoding.run(lambda: self._tokenizers.read(name, path))
        if tokenizer is not self.tokenizer and self.link.facts is not None:
            require_vocabulary(name, tokenizer, self.link.facts.vocab_size)


def _make_away(name: str) -> ModelAway:
    message = f"no scheduler runs for {name!r}: the next request starts one"
    return ModelAway(Reason.NO_READY_WORKER, message, retry_after_seconds=RETRY_SECONDS)


def _require_tokens(facts: ModelFacts) -> None:
    """Raises BlockyardError FEATURE_DISABLED for a model that embeds, scores or classifies."""
    if facts.task.pools:
        message = f"the model is served for --task {facts.task.value}, which generates no text"
        raise BlockyardError(Reason.FEATURE_DISABLED, message)


def _make_model_card(name: str, facts: ModelFacts, width: int, tokenizer: Tokenizer) -> Model:
    return Model(
        name=name,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        has_chat_template=tokenizer.has_chat_template,
        dialect=_dialect_name(tokenizer),
        determinism_id=facts.determinism_id,
        batch_invariant=facts.batch_invariant,
        warnings=facts.warnings,
        task=facts.task,
        embedding_size=width,
    )


def _make_early_card(name: str, tokenizer: Tokenizer) -> Model:
    return Model(
        name=name,
        max_model_len=0,
        vocab_size=tokenizer.vocab_size,
        has_chat_template=tokenizer.has_chat_template,
        dialect=_dialect_name(tokenizer),
        determinism_id="",
        batch_invariant=False,
    )


def _dialect_name(tokenizer: Tokenizer) -> str:
    return tokenizer.dialect.name if tokenizer.dialect else ""


def _make_card(adapter: Adapter, model: Model, tokenizers: AdapterTokenizers) -> Model:
    # This adapter's tokenizer is not loaded yet; its chat template may differ from the model's.
    tokenizer = tokenizers.of(adapter) if tokenizers.knows(adapter) else tokenizers.model
    return replace(
        model,
        name=adapter.name,
        parent=model.name,
        max_model_len=model.max_model_len - adapter.num_virtual_tokens,
        determinism_id=adapter.identify(model.determinism_id),
        has_chat_template=tokenizer.has_chat_template,
        dialect=_dialect_name(tokenizer),
    )
