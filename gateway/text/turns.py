"""Runs jobs on texts in a few threads, in turns: tenants share the threads equally, and short texts go first.

Waiting tenants get equal numbers of characters. Among a tenant's jobs the shortest goes first, but a job is overtaken
by no more characters than it has itself. A job runs in steps, and other jobs have turns between its steps. Long steps
always leave one thread for short steps. The number of waiting characters is limited, for each tenant and in total.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from blockyard.errors import BlockyardError, Reason
from blockyard.service.threads import stopping

if TYPE_CHECKING:
    from gateway.text.vocabulary import Steps

T = TypeVar("T")

NUM_THREADS = 2
SHORT_CHARACTERS = 65_536
"""A job of at most this many characters is short. Short and long jobs are counted separately for the limits."""
LONG_STEP_CHARACTERS = 4 * SHORT_CHARACTERS
"""A step of more characters is long: long steps never occupy all threads."""
MAX_TENANT_CHARACTERS = 16 * 2**20
"""The most characters of a tenant's short jobs, and of its long jobs. A single job may have more."""
MAX_CHARACTERS = 4 * MAX_TENANT_CHARACTERS
"""The most characters of all short jobs, and of all long jobs."""
RETRY_SECONDS = 1.0


class _Job:
    """Work for one caller.

    Attributes:
        size: the characters of all steps.
        steps: the steps; None when the caller has left.
        rank: the tenant's job with the lowest rank goes first.
        step: the characters of the next step.
    """

    def __init__(self, tenant: str, size: int, steps: Steps[Any], rank: tuple[int, int]) -> None:
        self.tenant = tenant
        self.size = size
        self.steps: Steps[Any] | None = steps
        self.rank = rank
        self.step = min(size, SHORT_CHARACTERS)
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: _Job) -> bool:
        return self.rank < other.rank

    @property
    def is_short(self) -> bool:
        return self.size <= SHORT_CHARACTERS

    @property
    def is_at_length(self) -> bool:
        """Whether the next step takes long."""
        return self.step > LONG_STEP_CHARACTERS


class _Line:
    """The waiting jobs of one tenant.

    `served`: the characters served so far. A tenant that was idle is raised to the others' level.
    """

    def __init__(self, served: int) -> None:
        self.served = served
        self._jobs: dict[bool, list[_Job]] = {False: [], True: []}

    def add(self, job: _Job) -> None:
        heapq.heappush(self._jobs[job.is_at_length], job)

    def first(self, *, at_length: bool) -> _Job | None:
        """Returns the next job that a caller still waits for. `at_length`: whether its next step may be long."""
        heads: list[_Job] = []
        for is_long, jobs in self._jobs.items():
            while jobs and jobs[0].future.done():
                heapq.heappop(jobs)
            if jobs and (at_length or not is_long):
                heads.append(jobs[0])
        return min(heads, default=None)

    def take(self, job: _Job) -> None:
        """Removes `job`, which must be the first one, and counts the characters of its step."""
        assert heapq.heappop(self._jobs[job.is_at_length]) is job
        self.served += job.step

    @property
    def is_empty(self) -> bool:
        return not any(self._jobs.values())


class Turns:
    """The threads and the waiting jobs. Only used on the event loop; its creator calls `close`."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._executor = ThreadPoolExecutor(num_threads, "tokenize")
        self._num_threads = self._num_free = num_threads
        # Long steps leave one thread for short steps.
        self._num_free_at_length = max(1, num_threads - 1)
        self._lines: dict[str, _Line] = {}
        self._served = 0
        self._numbers = itertools.count()
        self._held: Counter[tuple[str | None, bool]] = Counter()
        self._is_closed = False

    def close(self) -> None:
        """Stops the threads: running steps are finished, and waiting jobs fail."""
        self._is_closed = True
        self._executor.shutdown(wait=False)
        for line in self._lines.values():
            while (job := line.first(at_length=True)) is not None:
                job.future.set_exception(stopping())

    async def run(self, tenant: str, size: int, steps: Steps[T]) -> T:
        """Runs steps in the threads, in their turn. A cancelled caller's steps stop.

        Args:
            tenant: the tenant of the text.
            size: the characters of all steps.
            steps: yields the number of characters before each step; before a short first step it need not.

        Raises BlockyardError: DRAINING after `close`; TENANT_QUOTA or QUEUE_FULL if too many characters wait already.
        Errors of the steps are raised too.
        """
        if self._is_closed:
            raise stopping()
        line = self._line_of(tenant)
        job = _Job(tenant, size, steps, (line.served + size, next(self._numbers)))
        held = [(tenant, job.is_short), (None, job.is_short)]
        self._require_room(job)
        for key in held:
            self._held[key] += size
        try:
            line.add(job)
            self._start()
            return await job.future
        finally:
            # If the caller was cancelled, its job is still queued: release the text.
            job.steps = None
            for key in held:
                self._held[key] -= size
                if not self._held[key]:
                    del self._held[key]
            # Break the reference cycle of the job, the raised error and this frame, which would keep the text alive
            # until a garbage collection.
            del job, steps

    def _line_of(self, tenant: str) -> _Line:
        if tenant not in self._lines:
            # Forget idle tenants that were not served more than the others.
            self._lines = {
                name: line for name, line in self._lines.items() if not line.is_empty or line.served > self._served
            }
        line = self._lines.setdefault(tenant, _Line(self._served))
        if line.is_empty:
            line.served = max(line.served, self._served)
        return line

    def _require_room(self, job: _Job) -> None:
        """Raises BlockyardError TENANT_QUOTA or QUEUE_FULL if too many characters wait already."""
        of_tenant, of_all = self._held[job.tenant, job.is_short], self._held[None, job.is_short]
        if of_tenant and of_tenant + job.size > MAX_TENANT_CHARACTERS:
            reason, texts = Reason.TENANT_QUOTA, f"{of_tenant} characters of this tenant's texts"
        elif of_all and of_all + job.size > MAX_CHARACTERS:
            reason, texts = Reason.QUEUE_FULL, f"{of_all} characters of texts"
        else:
            return
        message = f"{texts} are waiting to be tokenized: try again"
        raise BlockyardError(reason, message, retry_after_seconds=RETRY_SECONDS)

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._num_free and not self._is_closed and (job := self._take()) is not None:
            self._num_free -= 1
            self._num_free_at_length -= job.is_at_length
            loop.run_in_executor(self._executor, _run_step, job.steps).add_done_callback(
                lambda done, job=job: self._on_step(job, done)
            )

    def _take(self) -> _Job | None:
        """Takes the next job of the tenant that was served least."""
        at_length = self._num_free_at_length > 0
        lines = sorted((line.served, name) for name, line in self._lines.items() if not line.is_empty)
        for served, name in lines:
            if (job := self._lines[name].first(at_length=at_length)) is not None:
                self._served = max(self._served, served)
                self._lines[name].take(job)
                return job
        return None

    def _on_step(self, job: _Job, done: asyncio.Future[tuple[bool, Any]]) -> None:
        self._num_free += 1
        self._num_free_at_length += job.is_at_length
        error = done.exception()
        if not job.future.done():
            if error is not None:
                job.future.set_exception(error)
            else:
                self._go_on(job, *done.result())
        self._start()
        if self._num_free == self._num_threads:
            # No job waits or runs, so there are no shares to compare.
            self._lines.clear()

    def _go_on(self, job: _Job, has_ended: bool, result: Any) -> None:
        """Ends a job, or queues it for its next turn."""
        if has_ended:
            job.future.set_result(result)
        elif self._is_closed:
            job.future.set_exception(stopping())
        else:
            job.step = result
            self._line_of(job.tenant).add(job)


def _run_step(steps: Steps[Any] | None) -> tuple[bool, Any]:
    """Runs a job's next step. Returns whether it was the last, with the job's result or the next step's characters.

    It is not given the job: from Python 3.14 on, the executor keeps arguments in the frames of an error, which the
    job's future has, and only a garbage collection would release the text.
    """
    if steps is None:
        return True, None
    try:
        return False, next(steps)
    except StopIteration as stop:
        return True, stop.value
