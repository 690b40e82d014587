"""Puts load on a server and measures latencies and rates. Prints nothing.

Closed loop: a number of clients, each sending its next request when the last is answered. Open loop: requests arrive as
a Poisson process, however slow the answers are. Real users arrive like that, and queueing shows, which a closed loop
hides.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from blockyard.contract.events import Accepted, Delta, Finished
from blockyard.errors import BlockyardError, Reason
from blockyard.load.http_stream import post_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from blockyard.client.asynchronous import AsyncClient

# Common words; most are a single token in most vocabularies.
_WORDS = ("the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "as", "at", "by", "it", "from")
PERCENTILES = (50, 90, 99)
# Reasons with which a server refuses because it is full for now.
_REJECTIONS = frozenset({Reason.QUEUE_FULL, Reason.TOKEN_BACKLOG, Reason.TENANT_QUOTA})
# A request that is refused this often has failed.
MAX_REJECTIONS = 100


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranges of prompt and output lengths in tokens, both ends included; lengths are drawn uniformly."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    temperature: float = 0.0
    ignore_eos: bool = True


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a load. Its prompt is `text`, or without one generated from `prompt_seed`."""

    prompt_seed: int
    num_prompt_tokens: int
    num_output_tokens: int
    temperature: float
    ignore_eos: bool
    text: str = ""


def draw_requests(shape: Shape, seed: int) -> Iterator[Request]:
    """Yields requests without end; the same seed yields the same requests."""
    draws = random.Random(seed)
    while True:
        yield Request(
            draws.getrandbits(32),
            draws.randint(*shape.prompt_tokens),
            draws.randint(*shape.output_tokens),
            shape.temperature,
            shape.ignore_eos,
        )


@dataclass(slots=True)
class Sample:
    """The measurements of one request. Times are monotonic seconds; `gaps_seconds`: between tokens.

    `num_rejections`: how often the server was full and the request was sent again.
    """

    arrival: float
    first_token: float = 0.0
    last_token: float = 0.0
    end: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    gaps_seconds: list[float] = field(default_factory=list[float])
    num_rejections: int = 0
    error: str = ""

    def on_tokens(self) -> None:
        now = time.monotonic()
        if self.first_token:
            self.gaps_seconds.append(now - self.last_token)
        else:
            self.first_token = now
        self.last_token = now


class Api(Protocol):
    async def send(self, request: Request, sample: Sample) -> None:
        """Sends a request and fills the sample in; raises BlockyardError."""


class GrpcApi:
    """Sends requests by StreamGenerate, with random token ids as the prompt where a request has no text."""

    def __init__(self, client: AsyncClient, model: str, vocab_size: int) -> None:
        self._client = client
        self._model = model
        self._vocab_size = vocab_size

    async def send(self, request: Request, sample: Sample) -> None:
        draws = random.Random(request.prompt_seed)
        prompt = [draws.randrange(self._vocab_size) for _ in range(request.num_prompt_tokens)]
        async with self._client.stream(
            request.text or prompt,
            model=self._model,
            max_tokens=request.num_output_tokens,
            temperature=request.temperature,
            ignore_eos=request.ignore_eos,
        ) as stream:
            async for event in stream:
                match event:
                    case Accepted():
                        sample.num_prompt_tokens = event.num_prompt_tokens
                    case Delta():
                        sample.num_output_tokens = event.num_tokens
                        sample.on_tokens()
                    case Finished():
                        sample.num_output_tokens = event.usage.num_completion_tokens
                    case _:
                        pass


class HttpApi:
    """Sends streamed requests to /v1/completions; a prompt without text has one word per requested token."""

    def __init__(self, base_url: str, model: str, headers: Mapping[str, str]) -> None:
        self._url = f"{base_url}/v1/completions"
        self._model = model
        self._headers = headers

    async def send(self, request: Request, sample: Sample) -> None:
        draws = random.Random(request.prompt_seed)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.text or " ".join(draws.choice(_WORDS) for _ in range(request.num_prompt_tokens)),
            "max_tokens": request.num_output_tokens,
            "temperature": request.temperature,
            "ignore_eos": request.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with aclosing(post_events(self._url, body, self._headers)) as events:
            async for event in events:
                if event.get("usage"):
                    sample.num_prompt_tokens = event["usage"]["prompt_tokens"]
                    sample.num_output_tokens = event["usage"]["completion_tokens"]
                if any(choice.get("text") for choice in event["choices"]):
                    sample.on_tokens()


@dataclass(frozen=True, slots=True)
class Plan:
    """A load: a closed loop by `concurrency` or an open one by `rate`, limited by number or duration or both.

    Attributes:
        concurrency: clients of a closed loop.
        rate: requests a second of an open loop; 0: a closed one.
        num_requests: requests to send; 0: no limit.
        duration_seconds: how long to send; running requests are then waited for; 0: no limit.
        seed: of the random arrival times.
    """

    concurrency: int = 1
    rate: float = 0.0
    num_requests: int = 0
    duration_seconds: float = 0.0
    seed: int = 0


async def _send(api: Api, request: Request, sample: Sample) -> None:
    """Sends a request, and sends it again after each rejection with a retry time; raises BlockyardError."""
    while True:
        try:
            return await api.send(request, sample)
        except BlockyardError as error:
            hint = error.retry_after_seconds
            if error.reason not in _REJECTIONS or hint is None or sample.num_rejections == MAX_REJECTIONS:
                raise
        sample.num_rejections += 1
        # Requests that were refused together must not come back together.
        await asyncio.sleep(hint * random.uniform(1.0, 1.25))


async def run_load(
    api: Api, requests: Iterator[Request], plan: Plan, on_done: Callable[[Sample], None] = lambda sample: None
) -> list[Sample]:
    """Runs a load to its end; returns the samples in the order in which requests ended."""
    samples: list[Sample] = []
    start = time.monotonic()

    def next_request() -> Request | None:
        nonlocal num_sent
        over = plan.duration_seconds and time.monotonic() - start >= plan.duration_seconds
        if over or (plan.num_requests and num_sent >= plan.num_requests):
            return None
        num_sent += 1
        return next(requests)

    async def send(request: Request, arrival: float) -> None:
        sample = Sample(arrival)
        try:
            await _send(api, request, sample)
        except BlockyardError as error:
            sample.error = str(error.reason)
        sample.end = time.monotonic()
        samples.append(sample)
        on_done(sample)

    async def client() -> None:
        while (request := next_request()) is not None:
            await send(request, time.monotonic())

    num_sent = 0
    async with asyncio.TaskGroup() as group:
        if not plan.rate:
            for _ in range(plan.concurrency):
                group.create_task(client())
            return samples
        draws, due = random.Random(plan.seed), start
        while True:
            due += draws.expovariate(plan.rate)
            await asyncio.sleep(due - time.monotonic())
            if (request := next_request()) is None:
                break
            # Measure from the due time: if this process was busy and sends late, the client has waited too.
            group.create_task(send(request, due))
    return samples


@dataclass(frozen=True, slots=True)
class Distribution:
    """The mean and the percentiles of one measure, in seconds."""

    mean: float
    percentiles: dict[int, float]


def distribution(values: Sequence[float]) -> Distribution | None:
    """Summarizes values; None if there are none. Percentiles are interpolated linearly, as in numpy."""
    if not values:
        return None
    ordered = sorted(values)

    def percentile(percent: int) -> float:
        position = (len(ordered) - 1) * percent / 100
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (position - below)

    return Distribution(sum(ordered) / len(ordered), {percent: percentile(percent) for percent in PERCENTILES})


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of a load. Rates are over the time from first arrival to last end, without failed requests.

    Attributes:
        num_rejections: how often requests were refused and sent again; their latencies include the waiting.
        time_to_first_token: from arrival.
        inter_token_latency: gaps between arrivals of tokens, of all requests together; tokens that came at once make
            one arrival.
        time_per_output_token: each request's mean after its first token.
        end_to_end: from arrival to the end of the stream.
    """

    num_requests: int
    num_errors: int
    errors: dict[str, int]
    num_rejections: int
    elapsed_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    time_to_first_token: Distribution | None
    inter_token_latency: Distribution | None
    time_per_output_token: Distribution | None
    end_to_end: Distribution | None


def summarize(samples: Sequence[Sample]) -> Summary:
    good = [sample for sample in samples if not sample.error]
    errors = Counter(sample.error for sample in samples if sample.error)
    elapsed = max((s.end for s in samples), default=0.0) - min((s.arrival for s in samples), default=0.0)
    num_prompt_tokens = sum(sample.num_prompt_tokens for sample in good)
    num_output_tokens = sum(sample.num_output_tokens for sample in good)
    rate = 1 / elapsed if elapsed > 0 else 0.0
    return Summary(
        num_requests=len(good),
        num_errors=errors.total(),
        errors=dict(errors),
        num_rejections=sum(sample.num_rejections for sample in samples),
        elapsed_seconds=elapsed,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        requests_per_second=len(good) * rate,
        output_tokens_per_second=num_output_tokens * rate,
        total_tokens_per_second=(num_prompt_tokens + num_output_tokens) * rate,
        time_to_first_token=distribution([s.first_token - s.arrival for s in good if s.first_token]),
        inter_token_latency=distribution([gap for sample in good for gap in sample.gaps_seconds]),
        time_per_output_token=distribution(
            [(s.last_token - s.first_token) / (s.num_output_tokens - 1) for s in good if s.num_output_tokens > 1]
        ),
        end_to_end=distribution([sample.end - sample.arrival for sample in good]),
    )
