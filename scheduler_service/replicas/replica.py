"""One copy of the model, on one worker or on a group of them: sets it up until it can take steps, and opens epochs.

Owns its ranks, and ensures that they agree where they must. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from blockyard.contract.parallel import Parallel
from blockyard.contract.scheduling import ModelFacts, Readiness
from blockyard.contract.workers import CacheInfo, CachePlan, LoadedModel, WeightsSource, WorkerState
from blockyard.telemetry import EventLogger
from scheduler_service.replicas.cache_plan import find_least, plan_as, plan_cache
from scheduler_service.replicas.epoch_failure import (
    LAST_FAILURE_RETRY_SECONDS,
    Misconfigured,
    NotReady,
    Unreachable,
    Unusable,
)
from scheduler_service.replicas.rank import Rank
from scheduler_service.replicas.steps.group_steps import GroupSteps
from scheduler_service.replicas.worker_link import Steps, StepStream, WorkerLink

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from blockyard.configuration import SchedulerSettings
    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.replicas.steps.answer_checks import AnswerLimits

log = EventLogger(__name__)

FIRST_RETRY_SECONDS = 0.1
# Services that start together need not warn about each other.
START_SECONDS = 10.0
FORM_GROUP_SECONDS = 30.0
# Facts that must be equal at all ranks of a replica: otherwise the ranks would compute different models.
_OF_THE_MODEL = ("model_digest", "vocab_size", "max_model_len", "task")
_OF_THE_WEIGHTS = ("weights_digest",)
_OF_THE_CACHE = ("determinism_id", "batch_invariant", "kv_windows", "num_state_blocks")
_POOLS = ("block_size", "num_device_blocks", "num_host_blocks", "max_model_len")

T = TypeVar("T")


class Replica:
    """One worker for each of `links`, by rank. `report` is called with what is missing, whenever that changes."""

    def __init__(
        self,
        links: Sequence[WorkerLink],
        configuration: SchedulerConfiguration,
        report: Callable[[Readiness], None],
        may_claim: Callable[[str], bool] = lambda incarnation: True,
        may_serve: Callable[[ModelFacts], bool] = lambda facts: True,
    ) -> None:
        self.message = ""
        self._reported = ("", False)
        self.epoch = 0
        parallel = configuration.parallel
        sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
        self.ranks = [
            Rank(link, Parallel(*sizes, rank), configuration, self._report_progress) for rank, link in enumerate(links)
        ]
        self._configuration = configuration
        self._report = report
        # Returns whether no other replica has the worker with this incarnation.
        self._may_claim = may_claim
        # Returns whether all other replicas that serve have this model.
        self._may_serve = may_serve
        # The incarnations that cannot serve this configuration, and why.
        self._hopeless: tuple[tuple[str, ...], str] | None = None
        # The weights that an operator loaded last.
        self.weights = WeightsSource()
        # The epoch that the group was formed for.
        self._group_epoch = 0

    @property
    def address(self) -> str:
        """The workers' addresses, as --worker-address has them."""
        return "+".join(rank.address for rank in self.ranks)

    @property
    def incarnations(self) -> tuple[str, ...]:
        """The worker processes by rank; an empty name for one that did not answer."""
        return tuple(rank.incarnation for rank in self.ranks)

    @property
    def _is_group(self) -> bool:
        return len(self.ranks) > 1

    async def set_up(self) -> tuple[ModelFacts, CacheInfo]:
        """Waits for the workers and sets them up, for as long as that takes.

        Raises Unusable if a replica that was never set up needs a repair, unless the settings say to wait for one.
        """
        delay, begin = FIRST_RETRY_SECONDS, asyncio.get_running_loop().time()
        self.message = ""
        try:
            while True:
                try:
                    return await self._set_up_once()
                except NotReady as error:
                    message, longest = str(error), error.retry_seconds
                    if error.needs_repair and not self.epoch and not self._configuration.service.wait_for_repair:
                        raise Unusable(message) from None
                    is_early = not self.epoch and asyncio.get_running_loop().time() - begin < START_SECONDS
                    is_expected = is_early and isinstance(error, Unreachable)
                    self._report_missing(message, needs_repair=error.needs_repair, expected=is_expected)
                await asyncio.sleep(min(delay, longest))
                delay = min(2 * delay, LAST_FAILURE_RETRY_SECONDS)
        finally:
            for rank in self.ranks:
                rank.stop_loading()

    async def look(self) -> None:
        """Updates the last known state of the workers. Changes nothing there."""
        await asyncio.gather(*(rank.look() for rank in self.ranks))

    def _report_missing(self, message: str, *, needs_repair: bool, expected: bool) -> None:
        """Reports what is missing when that changes, with a warning unless it is `expected`."""
        if (message, expected) != self._reported:
            self._reported = (message, expected)
            (log.info if expected else log.warning)("the replica is not ready", reason=message)
        self._tell(Readiness(False, message, needs_repair))

    def _report_progress(self) -> None:
        who = "workers are" if self._is_group else "worker is"
        if all(self.incarnations):
            share = min(rank.loaded_share for rank in self.ranks)
            self._tell(Readiness(False, f"the {who} loading the model: {share:.0%}"))

    def _tell(self, readiness: Readiness) -> None:
        if readiness.message != self.message:
            self.message = readiness.message
            self._report(readiness)

    async def each(self, work: Callable[[Rank], Coroutine[Any, Any, T]], ranks: Sequence[Rank] = ()) -> list[T]:
        """Runs `work` for all ranks at once. Raises the first error, and cancels the others."""
        if not self._is_group:
            return [await work(self.ranks[0])]
        tasks = [asyncio.create_task(work(rank)) for rank in ranks or self.ranks]
        try:
            # Not a task group: one in which a task fails swallows a cancellation of that moment.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _set_up_once(self) -> tuple[ModelFacts, CacheInfo]:
        try:
            with ExitStack() as spans:
                models = await self._load(spans)
                if self._hopeless and self._hopeless[0] == self.incarnations:
                    raise NotReady(self._hopeless[1], needs_repair=True)
                model, cache = await self._set_up_loaded(models)
        except Misconfigured as error:
            self._hopeless = (self.incarnations, str(error))
            raise
        # The workers' present state is needed, above all their epochs.
        await self.each(Rank.ask)
        facts = _make_facts(model, cache, self._configuration.scheduler)
        if not self._may_serve(facts):
            raise NotReady(
                "the worker has loaded another model than the replicas that serve: give all workers the same --model"
            )
        self.message, self._reported = "", ("", False)
        return facts, cache

    async def _load(self, spans: ExitStack) -> list[LoadedModel]:
        """Loads the model at all ranks. If some do not answer, raises that once the others have begun."""
        answers = await asyncio.gather(*(rank.ask() for rank in self.ranks), return_exceptions=True)
        missing = {rank: error for rank, error in zip(self.ranks, answers, strict=True) if error is not None}

        async def load(rank: Rank) -> LoadedModel:
            if rank in missing:
                raise missing[rank]
            if self.incarnations.count(rank.incarnation) > 1:
                raise NotReady(
                    "two addresses lead to one worker: give each rank an address of its own (--worker-address)"
                )
            await rank.check(self._may_claim)
            spans.enter_context(rank.begin_set_up())
            return await rank.load()

        # Tasks begin in this order.
        return await self.each(load, sorted(self.ranks, key=missing.__contains__))

    async def _set_up_loaded(self, models: Sequence[LoadedModel]) -> tuple[LoadedModel, CacheInfo]:
        _demand_equal(models, _OF_THE_MODEL)
        if _are_equal(models, ("weights_version",)):
            _demand_equal(models, _OF_THE_WEIGHTS)
        if not self._is_group:
            await self._initialize_caches(models[0])
            return await self._align_weights()
        # The group takes device memory, so it is formed before blocks are counted.
        epoch = self._group_epoch = 1 + max(rank.last_epoch for rank in self.ranks)
        try:
            await self._form_group(epoch)
            await self._initialize_caches(models[0])
            return await self._align_weights()
        except NotReady as error:
            await asyncio.gather(*(rank.leave_group(epoch, str(error)) for rank in self.ranks))
            raise

    async def _form_group(self, epoch: int) -> None:
        """Forms a group of the ranks for one epoch, or takes over the present one if it is complete and idle."""
        members, begin = self.incarnations, asyncio.get_running_loop().time()
        is_reused = self._is_group_reusable()
        meeting = None if is_reused else await self.ranks[0].open_rendezvous(epoch, members)
        kinds = await self.each(lambda rank: rank.form_group(epoch, members, FORM_GROUP_SECONDS, meeting))
        seconds = round(asyncio.get_running_loop().time() - begin, 3)
        log.info(
            "the group is formed",
            epoch=epoch,
            worker_address=self.address,
            kind=kinds[0],
            reused=is_reused,
            seconds=seconds,
        )

    def _is_group_reusable(self) -> bool:
        digest = hashlib.sha256("".join(f"{member}\n" for member in self.incarnations).encode()).digest()
        groups = [rank.group for rank in self.ranks]
        return all(group is not None and group.reusable and group.members_digest == digest for group in groups)

    async def _align_weights(self) -> tuple[LoadedModel, CacheInfo]:
        """Gives all ranks the same weights: those that they have, or the last ones of an operator if a rank is new.

        Weights that a trainer sent are lost with any rank that had them.
        """
        wanted = self.weights.version
        versions = {rank: rank.model.weights_version for rank in self.ranks if rank.model}
        is_one = len(set(versions.values())) == 1
        if not is_one or (wanted and "" in versions.values()):
            unlike = [rank for rank, version in versions.items() if version != wanted]
            log.info("ranks get other weights", worker_address=self.address, version=wanted, num_ranks=len(unlike))
            await self.each(lambda rank: rank.reload(self.weights), unlike)
            await self.each(Rank.ask)
        models = [model for rank in self.ranks if (model := rank.model)]
        caches = [cache for rank in self.ranks if (cache := rank.cache)]
        _demand_equal(models, _OF_THE_WEIGHTS)
        _demand_equal(caches, _OF_THE_CACHE)
        return models[0], caches[0]

    async def _initialize_caches(self, model: LoadedModel) -> None:
        """Gives all ranks the same pools: those of the ranks that have some, or else what fits at each rank."""
        there = [(rank, rank.cache) for rank in self.ranks if rank.cache is not None]
        for rank, cache in there:
            if not _are_equal([there[0][1], cache], _POOLS):
                await rank.dismiss("another cache")
        without = [rank for rank in self.ranks if rank.cache is None]
        if without:
            plan = await self._plan(without, model, there[0][1] if there else None)
            await self.each(lambda rank: rank.initialize_cache(plan), without)

    async def _plan(self, ranks: Sequence[Rank], model: LoadedModel, cache: CacheInfo | None) -> CachePlan:
        """Plans the pools of ranks that have none; `cache`: the pools of the others."""
        block_size = cache.block_size if cache else self._configuration.cache.block_size
        available = await self.each(lambda rank: rank.determine_num_available_blocks(block_size), ranks)
        least = find_least(available)
        if cache is not None:
            return plan_as(self._configuration, cache, least)
        plan = plan_cache(self._configuration, least, model.max_model_len)
        if plan.max_model_len < model.max_model_len:
            log.info(
                "the model's length is limited", max_model_len=plan.max_model_len, of_the_model=model.max_model_len
            )
        return plan

    def open_steps(self, limits: AnswerLimits, find_timeout: Callable[[], float]) -> Steps:
        """Opens the next epoch's steps, after `set_up`. `find_timeout`: how long the step sent next may take."""
        epoch = self.epoch = self._group_epoch if self._is_group else self.ranks[0].last_epoch + 1
        for rank in self.ranks:
            rank.note(state=WorkerState.RUNNING, epoch=epoch)
        calls = [rank.link.open_steps() for rank in self.ranks]
        if not self._is_group:
            return StepStream(calls[0], epoch, limits)
        return GroupSteps(calls, epoch, limits, self.ranks[0].parallel, find_timeout)

    async def close(self) -> None:
        await asyncio.gather(*(rank.link.close() for rank in self.ranks))


def _are_equal(values: Sequence[object], names: Iterable[str]) -> bool:
    return all(getattr(value, name) == getattr(values[0], name) for name in names for value in values)


def _demand_equal(values: Sequence[object], names: Iterable[str]) -> None:
    """Raises Misconfigured if ranks differ in one of these facts."""
    for name in names:
        first, *others = (getattr(value, name) for value in values)
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise Misconfigured(f"ranks 0 and {rank} differ in {name}: {first} and {other}")


def _make_facts(model: LoadedModel, cache: CacheInfo, step: SchedulerSettings) -> ModelFacts:
    return ModelFacts(
        model_digest=model.model_digest,
        vocab_size=model.vocab_size,
        max_model_len=cache.max_model_len,
        block_size=cache.block_size,
        determinism_id=cache.determinism_id,
        batch_invariant=cache.batch_invariant,
        # Each sequence that runs has a token of every step.
        max_num_seqs=min(step.max_num_seqs, step.max_num_batched_tokens),
        weights_version=model.weights_version,
        task=model.task,
        max_prompt_len=min(cache.max_model_len, step.max_num_batched_tokens) if model.whole_prompts else 0,
        warnings=model.warnings,
    )
