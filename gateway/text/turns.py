"""Has a few threads work on texts, in turns: by tenant first, and of one tenant's the shorter ones first.

Each tenant gets as many characters as the others that wait. Of its own jobs the one goes first that is shortest, but
nothing is passed by more characters than it has itself. A job works step by step, and others have turns between its
steps; a step that takes long leaves one thread to the others. What waits is bounded, for each tenant and for all.
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
    """Work for one caller. `rank`: the lowest of its tenant's goes first. `step`: characters of its next step."""

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
        """Whether its next step takes long."""
        return self.step > LONG_STEP_CHARACTERS


class _Line:
    """The jobs of one tenant that wait. `served`: characters of its steps so far, and of the time when it had none."""

    def __init__(self, served: int) -> None:
        self.served = served
        self._jobs: dict[bool, list[_Job]] = {False: [], True: []}

    def add(self, job: _Job) -> None:
        heapq.heappush(self._jobs[job.is_at_length], job)

    def first(self, *, at_length: bool) -> _Job | None:
        """Returns the job that goes first and still has somebody who waits for it."""
        heads: list[_Job] = []
        for is_long, jobs in self._jobs.items():
            while jobs and jobs[0].future.done():
                heapq.heappop(jobs)
            if jobs and (at_length or not is_long):
                heads.append(jobs[0])
        return min(heads, default=None)

    def take(self, job: _Job) -> None:
        """Takes out the first job, whose step is counted."""
        assert heapq.heappop(self._jobs[job.is_at_length]) is job
        self.served += job.step

    @property
    def is_empty(self) -> bool:
        return not any(self._jobs.values())


class Turns:
    """The threads, and who waits for them. Used in the event loop alone; its maker closes it."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._executor = ThreadPoolExecutor(num_threads, "tokenize")
        self._num_threads = self._num_free = num_threads
        # One thread is left to steps that are soon done.
        self._num_free_at_length = max(1, num_threads - 1)
        self._lines: dict[str, _Line] = {}
        self._served = 0
        self._numbers = itertools.count()
        self._held: Counter[tuple[str | None, bool]] = Counter()
        self._is_closed = False

    def close(self) -> None:
        """Stops the threads: steps that run are finished, and what waits fails."""
        self._is_closed = True
        self._executor.shutdown(wait=False)
        for line in self._lines.values():
            while (job := line.first(at_length=True)) is not None:
                job.future.set_exception(stopping())

    async def run(self, tenant: str, size: int, steps: Steps[T]) -> T:
        """Runs steps in the threads, when it is their turn. No more of them is run for a caller who was cancelled.

        Args:
            tenant: whose they are.
            size: characters in all.
            steps: yields, before each step but a short first one, how many characters that takes.

        Raises BlockyardError: DRAINING once it is closed; TENANT_QUOTA or QUEUE_FULL where too much waits already; and
        what the steps raise.
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
            # Nobody waits any more: the jobs that are still queued release their texts.
            job.steps = None
            for key in held:
                self._held[key] -= size
                if not self._held[key]:
                    del self._held[key]
            # It has the error that is raised here, which has this frame: the text would stay for the collector.
            del job, steps

    def _line_of(self, tenant: str) -> _Line:
        if tenant not in self._lines:
            # Tenants that had no more than everybody else need not be remembered.
            self._lines = {
                name: line for name, line in self._lines.items() if not line.is_empty or line.served > self._served
            }
        line = self._lines.setdefault(tenant, _Line(self._served))
        if line.is_empty:
            line.served = max(line.served, self._served)
        return line

    def _require_room(self, job: _Job) -> None:
        """Raises BlockyardError where a job has no place to wait."""
        of_tenant, of_all = self._held[job.tenant, job.is_short], self._held[None, job.is_short]
        if of_tenant and of_tenant + job.size > MAX_TENANT_CHARACTERS:
            reason, whose = Reason.TENANT_QUOTA, "your texts"
        elif of_all and of_all + job.size > MAX_CHARACTERS:
            reason, whose = Reason.QUEUE_FULL, "texts"
        else:
            return
        message = f"{of_tenant if reason is Reason.TENANT_QUOTA else of_all} characters of {whose} wait to be tokenized"
        raise BlockyardError(reason, f"{message}: try again", retry_after_seconds=RETRY_SECONDS)

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
        """Takes the job whose turn it is: of the tenant that has been served least."""
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
            # Nobody waits, so no shares are compared.
            self._lines.clear()

    def _go_on(self, job: _Job, has_ended: bool, result: Any) -> None:
        """Ends a job, or has it wait for its next turn."""
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
    # It gets the error that is raised here, which has this frame.
    del job
    if steps is None:
        return True, None
    try:
        return False, next(steps)
    except StopIteration as stop:
        return True, stop.value
