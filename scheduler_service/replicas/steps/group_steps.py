"""The steps of one epoch, for all ranks of a replica: each gets the same bytes, and all answers must agree.

Every rank chains two hashes over the steps of the epoch: of each step as it resolved it, and of what was sampled. A
token counts when all ranks have answered its step with equal hashes, so that no rank goes on with a token that another
does not know. In large groups so many answers cost too much, so most steps are quiet: only the sampling rank answers,
and the hashes are compared at every COMPARED_STEPS-th step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.service import faults
from blockyard.service.roots import start_task
from blockyard.telemetry import EventLogger
from scheduler_service.replicas import codec
from scheduler_service.replicas.steps.answer_checks import AnswerLimits, check_turn, require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blockyard.contract.parallel import ParallelSizes
    from scheduler_service.core.values import SchedulerOutput, StepResult
    from scheduler_service.replicas.codec import Receipt
    from scheduler_service.replicas.worker_link import StepCall

log = EventLogger(__name__)

# Larger groups compare ranks only at every COMPARED_STEPS-th step.
LOUD_WORLD_SIZE = 4
COMPARED_STEPS = 8
# How many hashes of each rank are kept for the log.
NUM_HASHES = 16
# A rank that reports a broken group reports an effect. The cause follows from another rank within this time, if at all.
CAUSE_SECONDS = 0.25


class _RankStream:
    """One rank's stream of an epoch: its answers that were not taken yet, and its last hashes."""

    def __init__(self, rank: int, call: StepCall) -> None:
        self.rank = rank
        self.call = call
        self.unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self.receipts: deque[Receipt] = deque()
        self.last_receipts: deque[Receipt] = deque(maxlen=NUM_HASHES)
        self.last_step_id = 0
        self.error: Exception | None = None

    def describe(self) -> str:
        """Formats the last hashes, for the person who has to find the bug."""
        return " ".join(
            f"{each.step_id}:{each.input_digest:016x}/{each.output_digest:016x}" for each in self.last_receipts
        )


class GroupSteps:
    """See `Steps`. `find_timeout`: how long ranks may take for the step that was scheduled last."""

    def __init__(
        self,
        calls: Sequence[StepCall],
        epoch: int,
        limits: AnswerLimits,
        parallel: ParallelSizes,
        find_timeout: Callable[[], float],
    ) -> None:
        self.epoch = epoch
        self.step_seconds = 0.0
        self.encode_seconds = 0.0
        self._limits = limits
        self._parallel = parallel
        self._find_timeout = find_timeout
        self._ranks = [_RankStream(rank, call) for rank, call in enumerate(calls)]
        self._last_stage = self._ranks[-parallel.tensor_parallel_size :]
        self._sampling = self._last_stage[0]
        self._has_quiet_steps = len(calls) > LOUD_WORLD_SIZE
        self._results: deque[StepResult] = deque()
        self._last_sent = self._last_answered = 0
        self._news = asyncio.Event()
        self._tasks = [
            start_task(work(each), "rank stream") for each in self._ranks for work in (self._write, self._read)
        ]

    async def send(self, output: SchedulerOutput) -> None:
        faults.reach(faults.BEFORE_SEND)
        now = asyncio.get_running_loop().time
        begin = now()
        step_id, timeout = output.step_id, self._find_timeout()
        step = codec.encode_group_step(output, self.epoch, self._parallel, timeout, is_quiet=self._is_quiet(step_id))
        self.encode_seconds = now() - begin
        self._last_sent = step_id
        for rank in self._ranks:
            rank.unsent.put_nowait(step)
        faults.reach(faults.AFTER_SEND)

    async def receive(self) -> StepResult:
        """Waits until all ranks have answered the next step."""
        step_id = self._last_answered + 1
        ranks = [self._sampling] if self._is_quiet(step_id) else self._ranks
        while not all(rank.receipts for rank in ranks):
            if any(rank.error for rank in self._ranks):
                raise await self._find_cause()
            await self._wait()
        for rank in ranks:
            rank.last_receipts.append(rank.receipts.popleft())
        if ranks is self._ranks:
            self._compare()
        self._last_answered = step_id
        self.step_seconds = max(rank.last_receipts[-1].seconds for rank in ranks)
        return self._results.popleft()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        for rank in self._ranks:
            rank.call.cancel()

    def _is_quiet(self, step_id: int) -> bool:
        """Whether a step is answered by the sampling rank alone, unless it fails."""
        return self._has_quiet_steps and step_id % COMPARED_STEPS > 0

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    # Each rank has a task that writes and one that reads, so that none waits for another.

    async def _write(self, rank: _RankStream) -> None:
        try:
            while True:
                await rank.call.write(await rank.unsent.get())
        except BlockyardError:
            # The stream is broken; the reading task gets the better error.
            pass
        except Exception as error:  # noqa: BLE001 - raised by `receive`
            self._fail(rank, error)

    async def _read(self, rank: _RankStream) -> None:
        try:
            while True:
                message = await rank.call.read()
                receipt = codec.decode_receipt(message)
                due = self._find_due(rank)
                check_turn(message.epoch, receipt.step_id, self.epoch, due)
                require(due <= self._last_sent, f"it answers step {due}, which was not sent")
                if rank is self._sampling:
                    self._results.append(codec.decode_answer(message, self._limits))
                rank.last_step_id = due
                rank.receipts.append(receipt)
                self._news.set()
        except Exception as error:  # noqa: BLE001 - raised by `receive`
            self._fail(rank, error)

    def _fail(self, rank: _RankStream, error: Exception) -> None:
        rank.error = error
        self._news.set()

    def _find_due(self, rank: _RankStream) -> int:
        due = rank.last_step_id + 1
        return due if rank is self._sampling or not self._has_quiet_steps else due + -due % COMPARED_STEPS

    async def _find_cause(self) -> Exception:
        """Returns the error that ends the epoch: the first one that is not the effect of another rank's failure."""
        causes: list[_RankStream] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(CAUSE_SECONDS):
                while not (causes := [rank for rank in self._ranks if rank.error and not _is_effect(rank.error)]):
                    if all(rank.error for rank in self._ranks):
                        break
                    await self._wait()
        rank = next(rank for rank in causes or self._ranks if rank.error)
        assert rank.error is not None
        log.warning("a rank ended the epoch", epoch=self.epoch, rank=rank.rank, reason=str(rank.error))
        return rank.error

    def _compare(self) -> None:
        """Raises BlockyardError BUG if a rank computed something else than the first one."""
        for ranks, name in ((self._ranks, "input_digest"), (self._last_stage, "output_digest")):
            first, *others = ranks
            for other in others:
                if getattr(first.last_receipts[-1], name) != getattr(other.last_receipts[-1], name):
                    raise self._make_difference(first, other, name)

    def _make_difference(self, one: _RankStream, other: _RankStream, name: str) -> BlockyardError:
        step_id = one.last_receipts[-1].step_id
        log.error(
            "two ranks differ: a bug",
            epoch=self.epoch,
            step_id=step_id,
            ranks=f"{one.rank}, {other.rank}",
            differs=name,
            history=one.describe(),
            other_history=other.describe(),
        )
        return BlockyardError(
            Reason.BUG, f"ranks {one.rank} and {other.rank} differ in the {name} of the steps up to {step_id}"
        )


def _is_effect(error: Exception) -> bool:
    return isinstance(error, BlockyardError) and error.reason is Reason.GROUP_BROKEN
