"""Starts, resumes and cancels requests for all fronts, and reports the gateway's readiness.

Chooses the model of a request. Knows neither protobuf messages nor HTTP: the fronts pass values to it and read events.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from blockyard.clock import SYSTEM, Clock
from blockyard.errors import BlockyardError, Reason, invalid, is_unknown_request, quote
from gateway.codec import state as state_codec
from gateway.live.continuation import NOWHERE, check_positions
from gateway.live.live_requests import Admission, LiveRequests
from gateway.live.scheduler_link import Cancelled, SchedulerLink
from gateway.observe.gen_ai_metrics import CHAT, TEXT_COMPLETION
from gateway.observe.request_log import begin_request_log
from gateway.request import check_request_id, is_request_id, wire_id
from gateway.served_model import ModelAway, ServedModel
from gateway.text.encoding import Encoding
from gateway.validation import unknown_model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from blockyard.contract.models import Model
    from blockyard.contract.request import Position
    from gateway.live.reader import Reader
    from gateway.live.request_state import RequestState
    from gateway.observe.metrics import GatewayMetrics
    from gateway.pooling.model import RuleReader
    from gateway.request import GenerationRequest, ResumeRequest
    from gateway.text.tokenizer import Tokenizer

T = TypeVar("T")
# How often a request that waits for its model is told how far the loading is.
_LOADING_SECONDS = 1.0
_STOPPING = "the gateway is stopping"
_DRAINED = "the gateway was drained"


class GenerationService:
    """Starts, resumes and cancels requests for all fronts. A process has one object, with one or several models.

    Args:
        max_requests: the most requests at the same time, of all models; 0: no limit.
        clock: gives the fronts the time, and draws the ids of requests without one.
    """

    def __init__(
        self,
        *,
        max_requests: int = 0,
        clock: Clock = SYSTEM,
    ) -> None:
        self.clock = clock
        self._models: list[ServedModel] = []
        self._names: list[str] = []
        self._encoding = Encoding()
        self._admission = Admission(max_requests, lambda: sum(model.live.num_running for model in self._models))
        # The reason why the gateway reports not ready although it still serves requests; empty: it is not draining.
        self._draining = ""

    def add_model(
        self,
        name: str,
        tokenizer: Tokenizer,
        link: SchedulerLink,
        live: LiveRequests,
        *,
        seed: int = 0,
        clamps_max_tokens: bool = False,
        lora_root: Path | None = None,
        read_rule: RuleReader = lambda _: None,
        starts_on_demand: bool = False,
        max_wait_seconds: float = 300.0,
        shares_prefixes: bool = False,
    ) -> ServedModel:
        """Adds a model; see ServedModel. Requests that name no model are those of the first one."""
        model = ServedModel(
            name,
            tokenizer,
            link,
            live,
            self._encoding,
            self._admission,
            seed=seed,
            clamps_max_tokens=clamps_max_tokens,
            lora_root=lora_root,
            read_rule=read_rule,
            served=self._names,
            starts_on_demand=starts_on_demand,
            max_wait_seconds=max_wait_seconds,
            shares_prefixes=shares_prefixes,
            clock=self.clock,
        )
        self._models.append(model)
        self._names.append(name)
        return model

    # Models.

    @property
    def served_models(self) -> Sequence[ServedModel]:
        """The models without their adapters; the first is that of requests which name none."""
        return self._models

    def model_of(self, name: str) -> ServedModel:
        """Returns the model that serves a name, its own or an adapter's.

        For an unknown name returns the first model, which refuses the request together with its other violations.
        """
        return next((model for model in self._models if model.serves(name)), self._models[0])

    def models(self) -> list[Model]:
        """Lists the models and their adapters, without those whose facts no scheduler has sent yet."""
        return [card for model in self._models for card in model.cards()]

    def find_model(self, name: str) -> Model:
        """Finds a model or an adapter by its name; raises BlockyardError MODEL_NOT_FOUND."""
        for model in self.models():
            if model.name == name:
                return model
        raise BlockyardError(Reason.MODEL_NOT_FOUND, f"the model {quote(name)} is not served here")

    def resolve_model(self, name: str) -> None:
        """Raises BlockyardError MODEL_NOT_FOUND unless the name is empty, a served model's or an adapter's."""
        if not self.serves(name):
            raise invalid([unknown_model(name, self._names)])

    def serves(self, name: str) -> bool:
        """Returns whether requests may name this model. An empty name means the first model."""
        return any(model.serves(name) for model in self._models)

    async def load(self, name: str) -> Model:
        """Loads a model that starts on demand, as a request for it does, and waits for that; see ServedModel.load.

        `name`: of a model or an adapter; empty: the first model. Returns the card of the name. Raises BlockyardError
        MODEL_NOT_FOUND or NO_READY_WORKER.
        """
        self.resolve_model(name)
        model = self.model_of(name)
        await model.load()
        return self.find_model(name or model.name)

    def is_loading(self, name: str) -> bool:
        """Returns whether requests for a model or an adapter wait because it is being loaded on demand."""
        return bool(self.model_of(name).loading)

    async def loading(self, name: str, begun: asyncio.Task[Any]) -> AsyncGenerator[str]:
        """Yields every second what the loading of a model waits for, in words, until a task is done."""
        model = self.model_of(name)
        while not (await asyncio.wait({begun}, timeout=_LOADING_SECONDS))[0]:
            if message := model.loading:
                yield message

    # Requests.

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
        request = request if request.request_id else replace(request, request_id=f"gen-{self.clock.token_hex(12)}")
        model, state = await self._begin(request, positions)
        return model.live.read(state, positions, replay=replay)

    async def resume(self, resume: ResumeRequest, *, replay: bool = False) -> Reader:
        """Reads a request from positions on; it may run, or have run, at another gateway.

        `replay`: whether the part before the positions is read too.

        Raises BlockyardError: FIELD_INVALID for wrong positions; REQUEST_EXPIRED if no server knows the request and
        `resume` does not contain it; NO_READY_WORKER if a scheduler has just started and another gateway may still
        send it the request. Also raises the errors of `start`.
        """
        try:
            model, state = await self._known(resume.request_id, resume.tenant, resume.request)
        except BlockyardError as error:
            if resume.request is None or not (is_unknown_request(error) or isinstance(error, ModelAway)):
                raise
            model, state = await self._begin(resume.request, resume.positions)
        check_positions(resume.positions, state.submission, model.vocab_size)
        state.request_log.on_resumed()
        return model.live.read(state, resume.positions, replay=replay)

    async def find(self, request_id: str, tenant: str = "") -> GenerationRequest:
        """Returns a request with its prompt as ids and its defaults filled in; raises BlockyardError like `resume`."""
        model, state = await self._known(request_id, tenant)
        request = state_codec.request_of(state.submission)
        return request if request.model else replace(request, model=model.name)

    async def _known(
        self, request_id: str, tenant: str, request: GenerationRequest | None = None
    ) -> tuple[ServedModel, RequestState]:
        check_request_id(request_id)
        name = wire_id(tenant, request_id)
        asked = self._models if request is None else [self.model_of(request.model)]
        model, state = self._find_here(name) or await self._look_up(name, asked)
        if state.submission.pooling is not None:
            message = (
                "calls of Embed, Score and Classify, of which this request is a part, cannot be resumed: send again"
            )
            raise BlockyardError(Reason.FEATURE_DISABLED, message)
        return model, state

    def _find_here(self, wire_id: str) -> tuple[ServedModel, RequestState] | None:
        found = ((model, model.live.find(wire_id)) for model in self._models)
        return next(((model, state) for model, state in found if state is not None), None)

    async def _look_up(self, wire_id: str, models: Sequence[ServedModel]) -> tuple[ServedModel, RequestState]:
        """Asks the schedulers of models for a request.

        If none knows it, raises the error that leaves most hope: a scheduler that does not answer may know the request.
        """
        [first, *others] = models
        if not others:
            return first, await first.look_up(wire_id)
        answers = await asyncio.gather(*(model.look_up(wire_id) for model in models), return_exceptions=True)
        errors: list[BaseException] = []
        for model, answer in zip(models, answers, strict=True):
            if not isinstance(answer, BaseException):
                return model, answer
            errors.append(answer)
        raise next((error for error in errors if not _is_expired(error)), errors[0])

    async def _begin(
        self, request: GenerationRequest, positions: Mapping[int, Position]
    ) -> tuple[ServedModel, RequestState]:
        """Begins a request, or continues it after the tokens that its client sent back."""
        model, name = self.model_of(request.model), wire_id(request.tenant, request.request_id)
        operation = TEXT_COMPLETION if isinstance(request.prompt, str | tuple) else CHAT
        request_log = begin_request_log(request.tenant, request.request_id, model.name, operation)
        known = self._find_here(name)
        if known is not None and known[0] is not model:
            message = f"request_id {request.request_id!r} belongs to a request of another model: choose another id"
            raise BlockyardError(Reason.REQUEST_ID_CONFLICT, message)
        is_new = not any(position.num_tokens for position in positions.values()) and known is None
        return model, await model.begin(request, positions, request_log, is_new=is_new)

    async def cancel(self, request_ids: Iterable[str], *, tenant: str = "") -> Cancelled:
        """Ends requests of any gateway with CLIENT_CANCELLED, by their ids.

        Requests that ran here are pending if their scheduler does not answer: other gateways may read them, until this
        one can tell the scheduler. Raises BlockyardError NO_READY_WORKER if some requests are not here and a scheduler
        does not answer.
        """
        names = {wire_id(tenant, request_id): request_id for request_id in request_ids if is_request_id(request_id)}
        cancelled: set[str] = set()
        pending: set[str] = set()
        here = [{*model.live.cancel(names), *model.pooling.cancel(list(names))} for model in self._models]
        elsewhere = (model.cancel(list(names)) for model in self._models)
        answers = await asyncio.gather(*elsewhere, return_exceptions=True)
        for ended, answer in zip(here, answers, strict=True):
            if isinstance(answer, BaseException):
                (cancelled if isinstance(answer, ModelAway) else pending).update(ended)
            else:
                cancelled.update(ended, answer.cancelled)
                pending.update(answer.pending)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors and any(name not in cancelled | pending and self._find_here(name) is None for name in names):
            raise errors[0]
        return Cancelled(
            [request_id for name, request_id in names.items() if name in cancelled],
            [request_id for name, request_id in names.items() if name in pending - cancelled],
        )

    # Texts.

    async def prompt_of(self, request: GenerationRequest) -> Sequence[int]:
        """Returns the ids of a request's prompt; raises BlockyardError for an invalid conversation."""
        return await self.model_of(request.model).prompt_of(request)

    async def run(self, work: Callable[[], T], tenant: str, size: int) -> T:
        """Runs work on a tenant's text in its turn: in a thread, unless the text is short.

        `size`: the number of characters of the text.
        """
        return await self._encoding.run(work, tenant, size)

    async def find_tokenizer(self, name: str) -> Tokenizer:
        """Finds the tokenizer of a model or an adapter by its name. Raises BlockyardError MODEL_NOT_LOADED."""
        return await self.model_of(name).find_tokenizer(name)

    async def token_counter(self, model: str) -> Callable[[str], int]:
        """Returns a function that counts the tokens of a text with the tokenizer of a model or an adapter."""
        tokenizer = await self.find_tokenizer(model)
        return lambda text: len(tokenizer.encode(text, add_special_tokens=False)) if text else 0

    # Readiness.

    def is_ready(self, *models: ServedModel) -> bool:
        """Returns whether requests for some of these models, by default of all, should be sent here.

        `readiness_message` has the reason. Any thread may call it.
        """
        return any(model.is_ready for model in models or self._models) and not self._draining

    @property
    def readiness_message(self) -> str:
        """The reason why the gateway, or one of its models, is not ready, in words; empty if all are ready."""
        if self._draining or len(self._models) == 1:
            return self._draining or self._models[0].message
        return "; ".join(f"{model.name}: {model.message}" for model in self._models if not model.is_ready)

    @property
    def is_draining(self) -> bool:
        """Whether new requests should go to other gateways."""
        return bool(self._draining)

    @property
    def num_requests(self) -> int:
        return sum(model.num_requests for model in self._models)

    @property
    def num_readers(self) -> int:
        return sum(model.live.num_readers for model in self._models)

    @property
    def metrics(self) -> GatewayMetrics:
        return self._models[0].live.metrics

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
        for model in self._models:
            model.live.on_idle = idle.set
        while self.num_readers:
            idle.clear()
            await idle.wait()

    def stop(self, error: BlockyardError) -> None:
        """Ends all requests here with an error. They continue at the scheduler, for another gateway to resume."""
        for model in self._models:
            model.live.end_all(error)
            model.close()
        self._encoding.close()


def _is_expired(error: BaseException) -> bool:
    return isinstance(error, BlockyardError) and error.reason is Reason.REQUEST_EXPIRED
