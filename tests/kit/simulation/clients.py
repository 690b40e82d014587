"""Simulated clients: processes with a client of the library that send requests and check what comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.client.asynchronous import AsyncClient
from blockyard.client.retry import RetryPolicy
from blockyard.errors import BlockyardError, Reason
from tests.kit.oracles.transcript import Transcript, read
from tests.kit.simulation.cluster import Process
from tests.kit.simulation.scenario import answers_alone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from blockyard.client.asynchronous import AsyncStream
    from tests.kit.simulation.cluster import Cluster
    from tests.kit.simulation.scenario import Ask

# Longer than any fault, so that a client gives up none of its requests.
PATIENCE_SECONDS = 10_000.0
# How long clients that come back stay away; shorter than the resume window of 60 s.
AWAY_SECONDS = (0.0, 8.0)
# A request that so many workers died with is given up.
NUM_POISON_DEATHS = 2


class Violation(AssertionError):
    """A promise that was not kept."""


class Strike(NamedTuple):
    """A fault: its kind, the role that it struck, and what the system was doing."""

    kind: str
    role: str
    phase: str


@dataclass
class Report:
    """What became of a scenario.

    Attributes:
        outcomes: how many requests were answered, cancelled, or failed for which reason.
        strikes: how many faults there were.
        violations: the promises that were not kept, in words.
    """

    seed: int | str
    trace_hash: str = ""
    virtual_seconds: float = 0.0
    num_callbacks: int = 0
    num_tokens: int = 0
    num_resumes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    strikes: Counter[Strike] = field(default_factory=Counter[Strike])
    violations: list[str] = field(default_factory=list[str])


class Client:
    """A process with a client of the library. `number`: decides which gateway it prefers."""

    def __init__(self, cluster: Cluster, number: int, report: Report) -> None:
        self.process = Process(cluster, f"client-{number}", 0)
        self._cluster = cluster
        self.report = report
        self._loop = cluster.loop
        first = number % len(cluster.targets)
        self._targets = [*cluster.targets[first:], *cluster.targets[:first]]
        self._client: AsyncClient | None = None

    @property
    def client(self) -> AsyncClient:
        """Opened by the first task of the process, so that it belongs to it."""
        if self._client is None:
            self._client = self.make_client(self._targets)
        return self._client

    def make_client(self, targets: list[str]) -> AsyncClient:
        retry = RetryPolicy(max_attempts=10_000, resume_seconds=PATIENCE_SECONDS)
        return AsyncClient(targets, retry=retry, clock=self.process.clock, transport=self.process.transport)

    @property
    def other_targets(self) -> list[str]:
        """The gateways, in another order."""
        return self._targets[::-1]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def open(self, ask: Ask) -> AsyncStream:
        options: Any = ask.options
        return self.client.stream(list(ask.prompt), **options)

    async def ask(self, ask: Ask, begin: float) -> None:
        """Sends a request when it is due, and does with it what the request says; raises Violation."""
        self.begin = begin
        await asyncio.sleep(begin + ask.at - self._loop.time())
        await CONDUCTS[ask.conduct](self, ask)

    def check_error(self, ask: Ask, error: BlockyardError, *allowed: Reason) -> None:
        """Raises Violation for an error that the request did not deserve. `allowed`: what its client asked for."""
        begin = self.begin + ask.at
        if error.reason is Reason.POISON_REQUEST:
            is_deserved = self._cluster.num_deaths("worker", begin) >= NUM_POISON_DEATHS
        elif error.reason is Reason.REQUEST_EXPIRED:
            # Who left before the end may lose the answer with the scheduler and the gateway that knew it.
            is_deserved = error.reason in allowed and self._cluster.num_deaths("scheduler", begin) > 0
        else:
            is_deserved = error.reason in allowed
        if not is_deserved:
            raise Violation(f"failed with {error!r}") from None

    async def read(self, ask: Ask, stream: AsyncStream, *allowed: Reason) -> bool:
        """Reads a stream and checks all that comes. Returns whether the answer was whole, and not an allowed error."""
        transcript = Transcript()
        try:
            await read(stream, transcript)
        except BlockyardError as error:
            self.report.outcomes[error.reason.value] += 1
            check_beginning(ask, transcript)
            self.check_error(ask, error, *allowed)
            return False
        self.report.outcomes["answered"] += 1
        self.report.num_resumes += stream.num_resumes
        self.report.num_tokens += transcript.num_tokens
        check_beginning(ask, transcript)
        for index, due in enumerate(answers_alone(ask)):
            came = transcript.sequences[index]
            if came.token_ids != due:
                raise Violation(f"sequence {index} ended after {len(came.token_ids)} tokens of {len(due)}")
        return True

    async def away(self) -> None:
        await asyncio.sleep(self.process.random.uniform(*AWAY_SECONDS))


def check_beginning(ask: Ask, transcript: Transcript) -> None:
    """Raises Violation unless each sequence has the first tokens that it has alone."""
    due = answers_alone(ask)
    for index, sequence in transcript.sequences.items():
        came = sequence.token_ids
        if came != due[index][: len(came)]:
            position = next(p for p, (a, b) in enumerate(zip(came, (*due[index], None), strict=False)) if a != b)
            raise Violation(f"sequence {index}: token {position} is {came[position]}, not as if it ran alone")


async def read_some(ask: Ask, stream: AsyncStream) -> Transcript:
    """Reads the first events."""
    transcript = Transcript()
    for _ in range(ask.num_events):
        with suppress(StopAsyncIteration):
            transcript.take(await anext(stream))
    check_beginning(ask, transcript)
    return transcript


# What clients do.


async def _reads(client: Client, ask: Ask) -> None:
    """Reads to the end."""
    await client.read(ask, client.open(ask))


async def _leaves(client: Client, ask: Ask) -> None:
    """Closes the stream after some events, which cancels the request."""
    stream = client.open(ask)
    try:
        await read_some(ask, stream)
    except BlockyardError as error:
        client.check_error(ask, error)
    stream.close()
    client.report.outcomes["left"] += 1


async def _is_cut_off(client: Client, ask: Ask) -> None:
    """Loses its gateway after some events without a word, and reads the whole answer later at another one."""
    stream = client.open(ask)
    try:
        transcript = await read_some(ask, stream)
    except BlockyardError as error:
        client.check_error(ask, error)
        return
    # The call ends, the request does not.
    stream._closed.set()
    stream._call.cancel()
    await client.away()
    if not transcript.is_accepted:
        # The gateway may never have had it.
        client.report.outcomes["not accepted"] += 1
        return
    async with client.make_client(client.other_targets) as other:
        if await client.read(ask, other.resume(ask.options["request_id"]), Reason.REQUEST_EXPIRED):
            client.report.outcomes["read anew"] += 1


async def _is_two(client: Client, ask: Ask) -> None:
    """Sends the request a second time through another gateway; both read one answer."""
    first = asyncio.ensure_future(client.read(ask, client.open(ask)))
    await client.away()
    options: Any = ask.options
    async with client.make_client(client.other_targets) as other:
        await client.read(ask, other.stream(list(ask.prompt), **options))
    await first


async def _is_cancelled(client: Client, ask: Ask) -> None:
    """Has its request cancelled by another client while it reads."""
    reading = asyncio.ensure_future(client.read(ask, client.open(ask), Reason.CLIENT_CANCELLED))
    await client.away()
    async with client.make_client(client.other_targets) as other:
        with suppress(BlockyardError):
            if await other.cancel(ask.options["request_id"]):
                client.report.outcomes["cancelled"] += 1
    await reading


CONDUCTS: dict[str, Callable[[Client, Ask], Awaitable[None]]] = {
    "reads": _reads,
    "leaves": _leaves,
    "is cut off": _is_cut_off,
    "is two": _is_two,
    "is cancelled": _is_cancelled,
}
