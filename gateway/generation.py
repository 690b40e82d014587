"""Starts, resumes and cancels requests for all fronts, and reports the gateway's readiness.

Knows neither protobuf messages nor HTTP: the fronts pass values to it and read events.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from blockyard.contract.models import Model
from blockyard.errors import BlockyardError, Reason, Violation, invalid, is_unknown_request, quote
from gateway.codec import state as state_codec
from gateway.live.continuation import NOWHERE, check_ends, check_positions, make_records
from gateway.live.live_requests import Admission, LiveRequests
from gateway.live.outstanding import RETRY_SECONDS
from gateway.live.scheduler_link import Cancelled, SchedulerLink
from gateway.observe.request_log import RequestLog, begin_request_log, take_over_request_log
from gateway.pooling.service import PoolingService
from gateway.preparation import Preparation, Prepared
from gateway.request import GenerationRequest, ResumeRequest, check_request_id, is_request_id, wire_id
from gateway.text.adapter_tokenizers import AdapterTokenizers, require_vocabulary
from gateway.text.encoding import Encoding
from gateway.validation import length_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from blockyard.contract.request import Position
    from blockyard.contract.scheduling import Adapter, ModelFacts, Resumed, Submission
    from gateway.live.reader import Reader
    from gateway.live.request_state import RequestState
    from gateway.observe.metrics import GatewayMetrics
    from gateway.pooling.model import RuleReader
    from gateway.text.tokenizer import Tokenizer

T = TypeVar("T")
_STOPPING = "the gateway is stopping"
_DRAINED = "the gateway was drained"


class GenerationService:
    """Starts, resumes and cancels requests. A process has one object."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        link: SchedulerLink,
        live: LiveRequests,
        *,
        model_name: str,
        seed: int = 0,
        clamps_max_tokens: bool = False,
        max_requests: int = 0,
        lora_root: Path | None = None,
        read_rule: RuleReader = lambda _: None,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self._link = link
        self._live = live
        self._encoding = Encoding()
        self._tokenizers = AdapterTokenizers(tokenizer, lora_root)
        self._preparation = Preparation(
            self._tokenizers, self._encoding, model_name=model_name, seed=seed, clamps_max_tokens=clamps_max_tokens
        )
        self._admission = Admission(max_requests, lambda: live.num_running)
        self.pooling = PoolingService(
            tokenizer,
            live,
            self._encoding,
            self._admission,
            model_name=model_name,
            find_facts=self._facts,
            resolve_model=self.resolve_model,
            read_rule=read_rule,
        )
        # The reason why the gateway reports not ready although it still serves requests; empty: it is not draining.
        self._draining = ""

    async def start(
        self, request: GenerationRequest, positions: Mapping[int, Position] = NOWHERE, *, replay: bool = False
    ) -> Reader:
        """Validates, tokenizes and submits a request. If the same request was sent before, reads its answer.

        Args:
            request: the request; it gets an id if it has none.
            positions: the client's positions in the answer, by the sequence's index; reading begins there.
            replay: whether the part before the positions is read too.

        Raises BlockyardError: all violations together; REQUEST_ID_CONFLICT; QUEUE_FULL at the gateway's limit of
        requests; NO_READY_WORKER if the model's facts are not known yet. Later, if there is no scheduler or worker, the
        request waits up to the configured limit.
        """
        request = request if request.request_id else replace(request, request_id=f"gen-{secrets.token_hex(12)}")
        return self._live.read(await self._begin(request, positions), positions, replay=replay)

    def _is_new(self, request: GenerationRequest) -> bool:
        return self._live.find(wire_id(request.tenant, request.request_id)) is None

    def _begin_log(self, request: GenerationRequest) -> RequestLog:
        operation = "text_completion" if isinstance(request.prompt, str | tuple) else "chat"
        return begin_request_log(request.tenant, request.request_id, self.model_name, operation)

    def _find(self, submission: Submission) -> RequestState | None:
        """Returns the same request if it was sent before; None if its id is new.

        Raises BlockyardError REQUEST_ID_CONFLICT if the id belongs to a different request.
        """
        known = self._live.find(submission.request_id)
        if known is not None and known.submission.digest != submission.digest:
            message = f"request_id {known.origin.accepted.request_id!r} belongs to another request: choose another id"
            raise BlockyardError(Reason.REQUEST_ID_CONFLICT, message)
        return known

    async def resume(self, resume: ResumeRequest, *, replay: bool = False) -> Reader:
        """Reads a request from positions on; it may run, or have run, at another gateway.

        `replay`: whether the part before the positions is read too.

        Raises BlockyardError: FIELD_INVALID for wrong positions; REQUEST_EXPIRED if no server knows the request and
        `resume` does not contain it; NO_READY_WORKER if the scheduler has just started and another gateway may still
        send it the request. Also raises the errors of `start`.
        """
        try:
            state = await self._known(resume.request_id, resume.tenant)
        except BlockyardError as error:
            if not is_unknown_request(error) or resume.request is None:
                raise
            state = await self._begin(resume.request, resume.positions)
        check_positions(resume.positions, state.submission, self._vocab_size)
        state.request_log.on_resumed()
        return self._live.read(state, resume.positions, replay=replay)

    async def find(self, request_id: str, tenant: str = "") -> GenerationRequest:
        """Returns a request with its prompt as ids and its defaults filled in; raises BlockyardError like `resume`."""
        return state_codec.request_of((await self._known(request_id, tenant)).submission)

    async def _known(self, request_id: str, tenant: str) -> RequestState:
        check_request_id(request_id)
        name = wire_id(tenant, request_id)
        state = self._live.find(name) or await self._live.look_up(name, self._adopt)
        if state.submission.pooling is not None:
            message = (
                "calls of Embed, Score and Classify, of which this request is a part, cannot be resumed: send again"
            )
            raise BlockyardError(Reason.FEATURE_DISABLED, message)
        return state

    def _adopt(self, resumed: Resumed) -> RequestState:
        # The scheduler keeps the remaining deadline.
        submission = replace(state_codec.read_submission(resumed.submission), remaining_seconds=None)
        request_log = take_over_request_log(submission.request_id, submission.trace_context)
        return self._preparation.make_state(
            Prepared(state_codec.request_of(submission), submission), self._facts().determinism_id, request_log
        )

    async def _begin(self, request: GenerationRequest, positions: Mapping[int, Position]) -> RequestState:
        """Begins a request, or continues it after the tokens that its client sent back."""
        request_log = self._begin_log(request)
        is_new = not any(position.num_tokens for position in positions.values()) and self._is_new(request)
        with request_log.beginning(), self._admission.beginning(is_new=is_new):
            _require_tokens(self._facts())
            prepared = await self._preparation.prepare(request, self._facts, self._link.loras)
            submission = prepared.submission
            if positions:
                check_positions(positions, submission, self._vocab_size)
            if known := self._find(submission):
                request_log.on_joined()
                return known
            records = make_records(positions, submission) if positions else []
            # The worker that computed the client's tokens is unknown and may differ from the one that continues.
            determinism_id = "" if records else self._facts().determinism_id
            state = self._preparation.make_state(prepared, determinism_id, request_log, is_known=bool(records))
            if records:
                state.take_records(records)
                check_ends(positions, state)
        request_log.on_submitted(submission, state.origin.accepted.warnings)
        self._live.open(state)
        return state

    async def cancel(self, request_ids: Iterable[str], *, tenant: str = "") -> Cancelled:
        """Ends requests of any gateway with CLIENT_CANCELLED, by their ids.

        Raises BlockyardError NO_READY_WORKER if some requests are not here and the scheduler does not answer.
        """
        names = {wire_id(tenant, request_id): request_id for request_id in request_ids if is_request_id(request_id)}
        cancelled = {*self._live.cancel(names), *self.pooling.cancel(list(names))}
        pending: set[str] = set()
        try:
            elsewhere = await self._link.cancel(list(names))
        except BlockyardError:
            if cancelled != names.keys():
                raise
        else:
            cancelled.update(elsewhere.cancelled)
            pending.update(elsewhere.pending)
        return Cancelled(
            [request_id for name, request_id in names.items() if name in cancelled],
            [request_id for name, request_id in names.items() if name in pending - cancelled],
        )

    async def prompt_of(self, request: GenerationRequest) -> tuple[int, ...]:
        """Returns the ids of a request's prompt; raises BlockyardError for an invalid conversation."""
        tokenizer = await self.find_tokenizer(request.model)
        return await self._preparation.prompt_of(request, self._facts, tokenizer)

    async def text_of(
        self, token_ids: Sequence[int], model: str, tenant: str, *, skip_special_tokens: bool = True
    ) -> str:
        """Returns the text of token ids, with the tokenizer of a model or an adapter.

        Raises BlockyardError: PROMPT_TOO_LONG for more ids than the model's length, and the errors of `find_tokenizer`.
        """
        if (facts := self._link.facts) is not None and len(token_ids) > facts.max_model_len:
            description = f"has {len(token_ids)} ids. {length_limit(facts.max_model_len)}"
            raise invalid([Violation("token_ids", description, Reason.PROMPT_TOO_LONG)])
        tokenizer = await self.find_tokenizer(model)
        return await self._encoding.decode(token_ids, tokenizer, tenant, skip_special_tokens=skip_special_tokens)

    async def run(self, work: Callable[[], T], tenant: str, size: int) -> T:
        """Runs work on a tenant's text in its turn: in a thread, unless the text is short.

        `size`: the number of characters of the text.
        """
        return await self._encoding.run(work, tenant, size)

    async def find_tokenizer(self, name: str) -> Tokenizer:
        """Finds the tokenizer of a model or an adapter by its name. Raises BlockyardError MODEL_NOT_LOADED."""
        return await self._preparation.find_tokenizer(self._link.loras.get(name))

    async def token_counter(self, model: str) -> Callable[[str], int]:
        """Returns a function that counts the tokens of a text with the tokenizer of a model or an adapter."""
        tokenizer = await self.find_tokenizer(model)
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False)) if text else 0

    async def check_tokenizer(self, name: str, path: str) -> None:
        """Raises BlockyardError if an adapter's own tokenizer, in the folder `path`, cannot be used here."""
        tokenizer = await self._encoding.run(lambda: self._tokenizers.read(name, path))
        if tokenizer is not self.tokenizer and self._link.facts is not None:
            require_vocabulary(name, tokenizer, self._link.facts.vocab_size)

    def is_ready(self) -> bool:
        """Returns whether requests should be sent here. `readiness_message` has the reason. Any thread may call it."""
        return self._link.is_ready and not self._draining

    @property
    def readiness_message(self) -> str:
        """The reason why the gateway is not ready, in words; empty if it is ready."""
        return self._draining or self._link.message

    @property
    def is_draining(self) -> bool:
        """Whether new requests should go to other gateways."""
        return bool(self._draining)

    @property
    def num_requests(self) -> int:
        return self._live.num_running

    @property
    def num_readers(self) -> int:
        return self._live.num_readers

    @property
    def metrics(self) -> GatewayMetrics:
        return self._live.metrics

    def models(self) -> list[Model]:
        """Lists the model and its adapters; empty before the scheduler has sent the model's facts."""
        if (facts := self._link.facts) is None:
            return []
        width = self.pooling.find_width(facts)
        model = _make_model_card(self.model_name, facts, width, self.tokenizer)
        return [model, *(_make_card(adapter, model, self._tokenizers) for adapter in self._link.loras.values())]

    def find_model(self, name: str) -> Model:
        """Finds a model or an adapter by its name; raises BlockyardError MODEL_NOT_FOUND."""
        for model in self.models():
            if model.name == name:
                return model
        raise BlockyardError(Reason.MODEL_NOT_FOUND, f"the model {quote(name)} is not served here")

    def resolve_model(self, name: str) -> None:
        """Raises BlockyardError MODEL_NOT_FOUND unless the name is empty, the served model's or an adapter's."""
        if not self.serves(name):
            description = f"{quote(name)} is not served; {self.model_name!r} is"
            raise invalid([Violation("model", description, Reason.MODEL_NOT_FOUND)])

    def serves(self, name: str) -> bool:
        """Returns whether requests may name this model. An empty name means the served model."""
        return name in ("", self.model_name) or name in self._link.loras

    def _facts(self) -> ModelFacts:
        """Returns the model's facts; raises BlockyardError NO_READY_WORKER while they are not known."""
        facts = self._link.facts
        if facts is None or self._link.has_other_model:
            raise BlockyardError(Reason.NO_READY_WORKER, self._link.message, retry_after_seconds=RETRY_SECONDS)
        return facts

    @property
    def _vocab_size(self) -> int:
        """The size of the model's vocabulary; the tokenizer's size before the model's facts are known."""
        return self._link.facts.vocab_size if self._link.facts else self.tokenizer.vocab_size

    def start_draining(self) -> None:
        """Reports not ready from now on; requests are still served."""
        self._draining = _STOPPING

    def drain(self) -> None:
        """Reports not ready until `undrain`; requests are still served."""
        self._draining = self._draining or _DRAINED

    def undrain(self) -> None:
        """Reports the scheduler's readiness again; raises BlockyardError WRONG_STATE if the process is stopping."""
        if self._draining == _STOPPING:
            raise BlockyardError(Reason.WRONG_STATE, _STOPPING)
        self._draining = ""

    async def wait_until_idle(self) -> None:
        idle = asyncio.Event()
        self._live.on_idle = idle.set
        while self._live.num_readers:
            idle.clear()
            await idle.wait()

    def stop(self, error: BlockyardError) -> None:
        """Ends all requests here with an error. They continue at the scheduler, for another gateway to resume."""
        self._live.end_all(error)
        self._encoding.close()
        self._preparation.close()


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
