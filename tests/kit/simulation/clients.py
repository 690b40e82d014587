"""Simulated clients: processes with a client of the library that send requests and check what comes."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from blockyard.client.asynchronous import AsyncClient, AsyncStream
from blockyard.client.codec import make_chat_spec, make_spec
from blockyard.client.retry import RetryPolicy, is_of_transport
from blockyard.contract.events import Delta
from blockyard.errors import TABLE, BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2
from tests.kit.oracles.transcript import Transcript, read
from tests.kit.simulation.asks import find_due, vectors_alone
from tests.kit.simulation.cluster import FELT_SECONDS, HTTP_PORT, Process
from tests.kit.simulation.faults import PROMPT, SPOILS
from tests.kit.simulation.http import Call, HttpError, read_events
from tests.kit.simulation.points import AT_POINTS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from blockyard.contract.events import Event
    from blockyard.contract.pooling import Embeddings
    from tests.kit.simulation.asks import Ask
    from tests.kit.simulation.cluster import Cluster
    from tests.kit.simulation.health import Judgement

T = TypeVar("T")

# Longer than any fault, so that a client gives up none of its requests.
PATIENCE_SECONDS = 10_000.0
# How long clients that come back stay away; shorter than the resume window of 60 s.
AWAY_SECONDS = (0.0, 8.0)
# How soon a request is cancelled: most of them still run then.
SHORT_AWAY_SECONDS = (0.0, 3.0)
# A request is given up once its worker was lost three times in a row, or two replicas refused or answered it wrongly.
NUM_LOSSES, NUM_REFUSALS = 3, 2
REFUSALS = (*SPOILS, AT_POINTS)
# What a fault strikes that delays no token on its way, and how long a token is on its way.
WORKER_ROLES, DELIVERY_SECONDS = ("worker", "worker and worker", "any"), 0.5
# Errors that say to send the request again.
PASSING = frozenset({Reason.QUEUE_DEADLINE, Reason.SLEEPING, Reason.NO_READY_WORKER})
# The same for clients that bring their request along, which gateways may have forgotten.
LONG_AWAY_SECONDS = (0.0, 150.0)
NUM_TENANTS = 3


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
        health: how often which role answered rightly or wrongly whether it was ready.
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
    health: Counter[tuple[str, Judgement]] = field(default_factory=Counter[tuple[str, "Judgement"]])


class Client:
    """A process with a client of the library. `number`: decides its tenant, and which gateway it prefers."""

    def __init__(self, cluster: Cluster, number: int, report: Report) -> None:
        self.process = Process(cluster, f"client-{number}", 0)
        self._cluster = cluster
        self.report = report
        self._loop = cluster.loop
        self.tenant = f"tenant-{number % NUM_TENANTS}"
        first = number % len(cluster.targets)
        self._targets = [*cluster.targets[first:], *cluster.targets[:first]]
        self._client: AsyncClient | None = None
        # When the last tokens of each request came.
        self._progress: dict[int, float] = {}

    @property
    def client(self) -> AsyncClient:
        """Opened by the first task of the process, so that it belongs to it."""
        if self._client is None:
            self._client = self.make_client(self._targets)
        return self._client

    def make_client(self, targets: list[str]) -> AsyncClient:
        retry = RetryPolicy(max_attempts=10_000, resume_seconds=PATIENCE_SECONDS)
        process = self.process
        return AsyncClient(targets, retry=retry, tenant=self.tenant, clock=process.clock, transport=process.transport)

    @property
    def http_targets(self) -> list[str]:
        return [f"{target.partition(':')[0]}:{HTTP_PORT}" for target in self._targets]

    @property
    def other_targets(self) -> list[str]:
        """The gateways, in another order."""
        return self._targets[::-1]

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    def open(self, ask: Ask, client: AsyncClient | None = None) -> AsyncStream:
        options: Any = ask.options
        client = client or self.client
        if ask.is_chat:
            return client.stream_chat(ask.messages, timeout=ask.timeout, **options)
        return client.stream(ask.prompt, timeout=ask.timeout, **options)

    async def ask(self, ask: Ask, begin: float) -> None:
        """Sends a request when it is due, and does with it what the request says; raises Violation."""
        self.begin = begin
        await asyncio.sleep(begin + ask.at - self._loop.time())
        await CONDUCTS[ask.conduct](self, ask)

    def check_error(self, ask: Ask, error: BlockyardError, allowed: frozenset[Reason]) -> None:
        """Counts a request that failed; raises Violation for an error that it did not deserve.

        `allowed`: errors that it may get, though `REQUEST_EXPIRED` only after the death of a scheduler.
        """
        self.report.outcomes[error.reason.value] += 1
        since = self.begin + ask.at
        if error.reason is Reason.POISON_REQUEST:
            is_deserved = self._cluster.num_losses(self._find_progress(ask)) >= NUM_LOSSES
        elif error.reason is Reason.BUG:
            is_deserved = self._cluster.num_strikes(since, *REFUSALS) >= NUM_REFUSALS
        elif error.reason is Reason.REQUEST_EXPIRED:
            # Who left may lose an answer with the scheduler and the gateway that knew it. Errors that say to send the
            # request again are not kept.
            was_lost = self._cluster.num_deaths("scheduler", since) > 0 or not ask.allowed.isdisjoint(PASSING)
            is_deserved = error.reason in allowed and was_lost
        else:
            is_deserved = error.reason in allowed
        if not is_deserved:
            raise Violation(f"failed with {error!r}") from None

    def _find_progress(self, ask: Ask) -> float:
        """Returns a time before which a request's last token was computed, so that all its losses are later."""
        at = self._progress.get(ask.number, self.begin + ask.at)
        is_prompt = all(
            strike.kind in PROMPT and strike.role in WORKER_ROLES for strike in self._cluster.felt_strikes(at)
        )
        return at - (DELIVERY_SECONDS if is_prompt else FELT_SECONDS)

    async def _noting(self, ask: Ask, stream: AsyncStream) -> AsyncIterator[Event]:
        """Yields the events of a stream, and notes when tokens come."""
        async for event in stream:
            if isinstance(event, Delta):
                self._progress[ask.number] = self._loop.time()
            yield event

    async def read(
        self,
        ask: Ask,
        stream: AsyncStream,
        more_allowed: frozenset[Reason] = frozenset(),
        transcript: Transcript | None = None,
    ) -> bool:
        """Reads a stream and checks all that comes. Returns whether the answer was whole, and not an allowed error."""
        transcript = transcript or Transcript()
        try:
            await read(self._noting(ask, stream), transcript)
        except BlockyardError as error:
            check_beginning(ask, sequences_of(transcript))
            self.check_error(ask, error, ask.allowed | more_allowed)
            return False
        self.report.outcomes["answered"] += 1
        self.report.num_resumes += stream.num_resumes
        self.report.num_tokens += transcript.num_tokens
        check_beginning(ask, sequences_of(transcript))
        check_whole(ask, sequences_of(transcript))
        return True

    async def generate(self, ask: Ask, client: AsyncClient) -> None:
        """Asks for the whole answer with one call, and checks it."""
        options: Any = ask.options | {"on_disconnect": "keep"}
        spec = make_chat_spec(ask.messages, options) if ask.is_chat else make_spec(ask.prompt, options)
        method, kind = (
            ("Chat", inference_pb2.ChatRequest) if ask.is_chat else ("Generate", inference_pb2.GenerateRequest)
        )
        try:
            answer = await _insist(lambda: client._call(method, kind(spec=spec), ask.timeout))
        except BlockyardError as error:
            self.check_error(ask, error, ask.allowed)
            return
        self.report.outcomes["answered"] += 1
        check_whole(ask, {choice.index: (choice.token_ids, choice.text) for choice in answer.choices})

    async def embed(self, ask: Ask, client: AsyncClient) -> None:
        """Asks for vectors, and checks them."""
        try:
            answer: Embeddings = await _insist(lambda: client.embed(ask.inputs, request_id=ask.request_id))
        except BlockyardError as error:
            self.check_error(ask, error, ask.allowed)
            return
        self.report.outcomes["embedded"] += 1
        if [struct.pack(f"<{len(each)}f", *each) for each in answer.vectors] != vectors_alone(ask):
            raise Violation("a vector is not as if its input ran alone")

    def is_whole_somewhere(self, ask: Ask) -> bool:
        """Whether a gateway may have the whole answer already. It finds stop texts before the scheduler hears of it."""
        wire_id = f"{self.tenant}/{ask.request_id}"
        gateways = (node.service for name, node in self._cluster.nodes.items() if name.startswith("gateway"))
        models = (model for gateway in gateways if gateway for model in gateway.generation.served_models)
        found = (model.live.find(wire_id) for model in models)
        return bool(ask.stop) or any(state is not None and state.has_ended for state in found)

    def may_be_forgotten(self, ask: Ask, called_at: float, *, was_resumed: bool) -> bool:
        """Whether a cancel may be forgotten: all who heard of it died, or its reader brought back what nobody had.

        `was_resumed`: whether the reader had to call a gateway again.
        """
        if was_resumed:
            return self._cluster.num_deaths("scheduler", self.begin + ask.at) > 0
        return self._cluster.num_deaths("scheduler", called_at) > 0 < self._cluster.num_deaths("gateway", called_at)

    async def away(self, seconds: tuple[float, float] = AWAY_SECONDS) -> None:
        await asyncio.sleep(self.process.random.uniform(*seconds))


Sequences = dict[int, tuple["Sequence[int]", str]]


def sequences_of(transcript: Transcript) -> Sequences:
    """Returns the tokens and the text of each sequence that came."""
    return {index: (came.token_ids, came.text) for index, came in transcript.sequences.items()}


def check_beginning(ask: Ask, sequences: Sequences) -> None:
    """Raises Violation unless each sequence has the first tokens that it has alone."""
    for index, (came, text) in sequences.items():
        due = find_due(ask, index, came)
        if due is None:
            continue
        if tuple(came) != due.token_ids[: len(came)]:
            pairs = zip(came, (*due.token_ids, None), strict=False)
            position = next(position for position, (a, b) in enumerate(pairs) if a != b)
            raise Violation(f"sequence {index}: token {position} is {came[position]}, not as if it ran alone")
        if not due.text.startswith(text):
            raise Violation(f"sequence {index}: its text is {text!r}, and alone {due.text!r}")


def check_whole(ask: Ask, sequences: Sequences) -> None:
    """Raises Violation unless each sequence is the one that it is alone."""
    if sorted(sequences) != list(range(ask.n)):
        raise Violation(f"sequences {sorted(sequences)} came of {ask.n}")
    for index, (token_ids, text) in sequences.items():
        due = find_due(ask, index, token_ids)
        if due is None:
            continue
        if tuple(token_ids) != due.token_ids:
            raise Violation(f"sequence {index} has {len(token_ids)} tokens, and alone others, {len(due.token_ids)}")
        if text != due.text:
            raise Violation(f"sequence {index}: its text is {text!r}, and alone {due.text!r}")


async def read_some(client: Client, ask: Ask, stream: AsyncStream) -> Transcript | None:
    """Reads the first events; None if it failed with an allowed error."""
    transcript = Transcript()
    try:
        for _ in range(ask.num_events):
            with suppress(StopAsyncIteration):
                transcript.take(await anext(stream))
    except BlockyardError as error:
        client.check_error(ask, error, ask.allowed)
        return None
    finally:
        check_beginning(ask, sequences_of(transcript))
    return transcript


async def _insist(call: Callable[[], Awaitable[T]]) -> T:
    """Calls again as long as a proxy cancels the call. It names its request, which runs once."""
    while True:
        try:
            return await call()
        except BlockyardError as error:
            if not (is_of_transport(error) and error.reason is Reason.CLIENT_CANCELLED):
                raise


def cut_off(stream: AsyncStream) -> None:
    """Ends the call of a stream without a word; the request goes on."""
    stream._closed.set()
    stream._call.cancel()


# What clients do.


async def _at_two(client: Client, work: Callable[[AsyncClient], Awaitable[Any]]) -> None:
    """Does something at the client's gateway, and meanwhile at another one again."""

    async def do_again() -> None:
        await client.away()
        async with client.make_client(client.other_targets) as other:
            await work(other)

    await asyncio.gather(work(client.client), do_again())


async def _reads(client: Client, ask: Ask) -> None:
    """Reads to the end."""
    await client.read(ask, client.open(ask))


async def _leaves(client: Client, ask: Ask) -> None:
    """Closes the stream after some events, which cancels the request."""
    stream = client.open(ask)
    await read_some(client, ask, stream)
    stream.close()
    client.report.outcomes["left"] += 1


async def _is_cut_off(client: Client, ask: Ask) -> None:
    """Loses its gateway after some events without a word, and reads the whole answer later at another one."""
    stream = client.open(ask)
    transcript = await read_some(client, ask, stream)
    if transcript is None:
        return
    cut_off(stream)
    await client.away()
    if not transcript.is_accepted:
        # The gateway may never have had it.
        client.report.outcomes["not accepted"] += 1
        return
    async with client.make_client(client.other_targets) as other:
        # Nobody may have it any more: who has not got an answer whole may lose it with all who knew it.
        lost = frozenset({Reason.REQUEST_EXPIRED})
        if await client.read(ask, other.resume(ask.request_id), lost):
            client.report.outcomes["read anew"] += 1


async def _moves_on(client: Client, ask: Ask) -> None:
    """Loses its gateway after some events, brings the request to another one later, and reads on from there.

    It may come after everybody has forgotten the request: then it is computed again.
    """
    stream = client.open(ask)
    if (transcript := await read_some(client, ask, stream)) is None:
        return
    cut_off(stream)
    await client.away(LONG_AWAY_SECONDS)
    async with client.make_client(client.other_targets) as other:
        if not stream._resumption._is_over and await client.read(
            ask, AsyncStream(other._connections, stream._resumption), transcript=transcript
        ):
            client.report.outcomes["read on"] += 1


async def _asks_once(client: Client, ask: Ask) -> None:
    """Asks for the whole answer at once, and meanwhile at another gateway again."""
    await _at_two(client, lambda one: client.generate(ask, one))


def _may_be_others(ask: Ask) -> frozenset[Reason]:
    """Returns the error of a reader whose tokens are not those of the answer any more.

    What nobody remembers is generated again, from the tokens of one reader or from none: other weights make others.
    """
    return frozenset({Reason.REQUEST_EXPIRED}) if ask.versions else frozenset[Reason]()


class _HttpStream:
    """A stream of OpenAI's completions, with what a client keeps of it to read on."""

    def __init__(self, ask: Ask, headers: dict[str, str]) -> None:
        self.place = ""
        self.is_over = False
        self.num_events = 0
        self._pieces = {index: (list[int](), list[str]()) for index in range(ask.n)}
        self._headers = {"Content-Type": "application/json", "Idempotency-Key": ask.request_id, **headers}
        self._ask = ask

    @property
    def call(self) -> Call:
        headers = self._headers | ({"Last-Event-ID": self.place} if self.place else {})
        return Call("POST", self._ask.http_path, headers, self._ask.http_body)

    @property
    def sequences(self) -> Sequences:
        return {index: (token_ids, "".join(texts)) for index, (token_ids, texts) in self._pieces.items()}

    def take(self, place: str, data: str) -> None:
        """Takes an event; raises HttpError if it is one."""
        self.num_events += 1
        self.is_over = data == "[DONE]"
        chunk: dict[str, Any] = {} if self.is_over else json.loads(data)
        if "error" in chunk:
            raise HttpError(200, chunk["error"])
        for choice in chunk.get("choices", ()):
            token_ids, texts = self._pieces[choice["index"]]
            token_ids += choice.get("token_ids") or []
            texts.append(choice["delta"].get("content") or "" if self._ask.is_chat else choice["text"])
        self.place = place or self.place


async def _streams_over_http(client: Client, ask: Ask, is_cut_off: bool = False) -> None:
    """Reads a stream of OpenAI's API; when the connection is lost, sends the call again elsewhere, and reads on.

    `is_cut_off`: the client closes the first connection itself after some events.
    """
    stream = _HttpStream(ask, {"X-Blockyard-Tenant": client.tenant})
    for target in cycle(client.http_targets):
        try:
            async with aclosing(read_events(client.process, target, stream.call)) as events:
                async for place, data in events:
                    stream.take(place, data)
                    if is_cut_off and stream.num_events == ask.num_events:
                        break
        except HttpError as error:
            reason = Reason(error.error["reason"])
            if TABLE[reason].http_status != HTTPStatus.SERVICE_UNAVAILABLE:
                check_beginning(ask, stream.sequences)
                client.check_error(ask, BlockyardError(reason, str(error.error)), ask.allowed | _may_be_others(ask))
                return
        except (ConnectionError, TimeoutError):
            client.report.num_resumes += 1
        if stream.is_over:
            break
        await asyncio.sleep(client.process.random.uniform(0.1, 1.0))
    check_whole(ask, stream.sequences)
    client.report.outcomes["streamed over HTTP"] += 1


async def _embeds(client: Client, ask: Ask) -> None:
    """Asks for vectors."""
    await client.embed(ask, client.client)


async def _embeds_twice(client: Client, ask: Ask) -> None:
    """Asks for vectors, and meanwhile at another gateway for the same ones."""
    await _at_two(client, lambda one: client.embed(ask, one))


async def _is_two(client: Client, ask: Ask) -> None:
    """Sends the request a second time through another gateway; both read one answer."""
    # Who has no time left cancels the request.
    late = frozenset({Reason.CLIENT_CANCELLED}) if ask.timeout else frozenset[Reason]()
    await _at_two(client, lambda one: client.read(ask, client.open(ask, one), late | _may_be_others(ask)))


async def _is_cancelled(client: Client, ask: Ask) -> None:
    """Has its request cancelled by another client while it reads."""
    stream = client.open(ask)
    reading = asyncio.ensure_future(client.read(ask, stream, frozenset({Reason.CLIENT_CANCELLED})))
    await client.away(SHORT_AWAY_SECONDS)
    has_begun, called_at = stream._resumption.has_begun, client._loop.time()
    holds = False
    async with client.make_client(client.other_targets) as other:
        with suppress(BlockyardError):
            if await other.cancel(ask.request_id):
                client.report.outcomes["cancelled"] += 1
                holds = has_begun and not reading.done() and not client.is_whole_somewhere(ask)
    was_read = await reading
    if was_read and holds and not client.may_be_forgotten(ask, called_at, was_resumed=stream.num_resumes > 0):
        raise Violation("the cancel of a request was confirmed, and the request went on")


CONDUCTS: dict[str, Callable[[Client, Ask], Awaitable[None]]] = {
    "reads": _reads,
    "leaves": _leaves,
    "is cut off": _is_cut_off,
    "is two": _is_two,
    "is cancelled": _is_cancelled,
    "moves on": _moves_on,
    "asks once": _asks_once,
    "streams over HTTP": _streams_over_http,
    "is cut off over HTTP": partial(_streams_over_http, is_cut_off=True),
    "embeds": _embeds,
    "embeds twice": _embeds_twice,
}
