"""Runs work on texts in a few threads, in turns: tenants share them equally, and a tenant's short texts go first.

Waiting tenants get equal numbers of characters. Among a tenant's jobs the shortest goes first, but no job is overtaken
by more characters than it has itself. A job works step by step, and others have turns between its steps; long steps
leave one thread to short ones. The characters that wait are limited, for each tenant and in all.
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
"""A job of at most this many characters is short: what waits of these is counted apart from long ones."""
LONG_STEP_CHARACTERS = 4 * SHORT_CHARACTERS
"""A step of more is one that others do not wait behind."""
MAX_TENANT_CHARACTERS = 16 * 2**20
"""The characters of a tenant's jobs of either kind. One job alone may have more."""
MAX_CHARACTERS = 4 * MAX_TENANT_CHARACTERS
"""The characters of all jobs of either kind."""
RETRY_SECONDS = 1.0


class _Job:
    """Work for one caller. `rank`: the tenant's job with the lowest goes first. `step`: characters of its next step."""

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
    """The jobs of one tenant that wait. `served`: characters of its steps so far, and of the time when it had none."""

    def __init__(self, served: int) -> None:
        self.served = served
        self._jobs: dict[bool, list[_Job]] = {False: [], True: []}

    def add(self, job: _Job) -> None:
        heapq.heappush(self._jobs[job.is_at_length], job)

    def first(self, *, at_length: bool) -> _Job | None:
        """Returns the first job that a caller still waits for."""
        heads: list[_Job] = []
        for is_long, jobs in self._jobs.items():
            while jobs and jobs[0].future.done():
                heapq.heappop(jobs)
            if jobs and (at_length or not is_long):
                heads.append(jobs[0])
        return min(heads, default=None)

    def take(self, job: _Job) -> None:
        """Removes the first job, and counts its step."""
        assert heapq.heappop(self._jobs[job.is_at_length]) is job
        self.served += job.step

    @property
    def is_empty(self) -> bool:
        return not any(self._jobs.values())


class Turns:
    """The threads and the jobs that wait for them. Used on the event loop only; its maker closes it."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._executor = ThreadPoolExecutor(num_threads, "tokenize")
        self._num_threads = self._num_free = num_threads
        # One thread is left to short steps.
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
            size: characters in all.
            steps: yields the number of characters of each step before it; a short first step may be left out.

        Raises BlockyardError: DRAINING after `close`; TENANT_QUOTA or QUEUE_FULL if too many characters wait already;
        and what the steps raise.
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
            # The caller is gone: jobs that are still queued release their texts.
            job.steps = None
            for key in held:
                self._held[key] -= size
                if not self._held[key]:
                    del self._held[key]
            # Break the cycle of the job, the raised error and this frame: it would keep the text until a collection.
            del job, steps

    def _line_of(self, tenant: str) -> _Line:
        if tenant not in self._lines:
            # Forget idle tenants that have not had more than the others.
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
        """Begins steps while there are threads for them."""
        loop = asyncio.get_running_loop()
        while self._num_free and not self._is_closed and (job := self._take()) is not None:
            self._num_free -= 1
            self._num_free_at_length -= job.is_at_length
            loop.run_in_executor(self._executor, _run_step, job).add_done_callback(
                lambda done, job=job: self._on_step(job, done)
            )

    def _take(self) -> _Job | None:
        """Takes the next job: of the tenant that has been served least."""
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
            # No job waits, so there are no shares to compare.
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


def _run_step(job: _Job) -> tuple[bool, Any]:
    """Runs a job's next step; returns whether it was the last one, with its result or the characters of the next."""
    steps = job.steps
    # Break the cycle of the job, the error and this frame.
    del job
    if steps is None:
        return True, None
    try:
        return False, next(steps)
    except StopIteration as stop:
        return True, stop.value
