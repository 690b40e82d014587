"""A scenario: what a simulated cluster is asked for and what goes wrong meanwhile, all drawn from a seed.

The mix of faults is drawn too: some scenarios have one kind of fault only, some have none, some tiny pools of blocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from scheduler_service.core.values import GroupSpec
from tests.kit.oracles.model_worker import generate_alone
from tests.kit.simulation.cluster import VOCAB_SIZE, Sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_MODEL_LEN = 512
SHARED_PREFIX = tuple(range(40, 60))
# Within this time all requests and faults begin.
SECONDS = 5.0


@dataclass(frozen=True)
class Ask:
    """A request of a client.

    Attributes:
        at: when it is sent, in seconds after the start.
        client: the client's number; each prefers another gateway.
        conduct: what the client does, a key of `tests.kit.simulation.clients.CONDUCTS`.
        num_events: the number of events after which it does so.
    """

    number: int
    at: float
    client: int
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    seed: int = 1
    conduct: str = "reads"
    num_events: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "stop_token_ids": sorted(self.stop_token_ids),
            "seed": self.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "request_id": f"request-{self.number}",
        }


@lru_cache(1000)
def answers_alone(ask: Ask) -> list[tuple[int, ...]]:
    """Computes the tokens of each sequence of a request, had it run alone."""
    spec = GroupSpec("", "", ask.prompt, ask.n, ask.max_tokens, ask.min_tokens, ask.stop_token_ids, payload=b"")

    def generate(index: int) -> list[int]:
        return generate_alone(
            spec, index, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, seed_of=lambda _: ask.seed
        )

    return [tuple(generate(index)) for index in range(ask.n)]


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        at: when, in seconds after the start.
        kind: a key of `tests.kit.simulation.faults.FAULTS`.
        targets: names of nodes.
        seconds: how long it lasts, if it lasts.
        size: a number from 0 to 1, of which the kind makes what it needs.
    """

    at: float
    kind: str
    targets: tuple[str, ...]
    seconds: float
    size: float


@dataclass(frozen=True)
class Scenario:
    seed: int | str
    sizes: Sizes
    asks: Sequence[Ask]
    faults: Sequence[Fault]


def draw_scenario(
    seed: int | str, kinds: Sequence[str], conducts: Sequence[str] = ("reads",), num_asks: int = 30
) -> Scenario:
    """Draws a scenario. `kinds`: the kinds of faults; `conducts`: what clients may do."""
    draw = random.Random(f"{seed}/scenario")
    sizes = _draw_sizes(draw)
    asks = tuple(_draw_ask(draw, number, conducts) for number in range(num_asks))
    names = [
        *(f"worker-{number}" for number in range(sizes.num_workers)),
        *(f"gateway-{number}" for number in range(sizes.num_gateways)),
        "scheduler",
    ]
    used = draw.sample(kinds, draw.randint(1, len(kinds))) if draw.random() < 0.7 else kinds
    num_faults = 0 if draw.random() < 0.05 else draw.choice((1, 2, 3, 6, 6, 6, 9, 15))
    faults = tuple(_draw_fault(draw, names, used) for _ in range(num_faults))
    return Scenario(seed, sizes, asks, sorted(faults, key=lambda fault: fault.at))


def _draw_sizes(draw: random.Random) -> Sizes:
    return Sizes(
        num_workers=draw.choice((1, 2, 2, 3)),
        num_device_blocks=draw.choice((140, 150, 200, 400)),
        num_host_blocks=draw.choice((0, 10, 60, 200)),
        block_size=4,
        max_num_seqs=draw.choice((4, 8, 16)),
        max_num_batched_tokens=draw.choice((16, 64, 256)),
    )


def _draw_ask(draw: random.Random, number: int, conducts: Sequence[str]) -> Ask:
    prompt = tuple(draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randint(1, 40)))
    if draw.random() < 0.4:
        prompt = SHARED_PREFIX + prompt
    ask = Ask(number, draw.uniform(0.0, SECONDS), draw.randrange(16), prompt, draw.choice((1, 5, 20, 40)))
    ask = replace(ask, seed=draw.getrandbits(31))
    if draw.random() < 0.25:
        ask = replace(ask, n=draw.choice((2, 3, 4)))
    if draw.random() < 0.25:
        stops = frozenset(draw.sample(range(5, VOCAB_SIZE), 20))
        ask = replace(ask, stop_token_ids=stops, min_tokens=draw.choice((0, 0, min(4, ask.max_tokens))))
    conduct = "reads" if draw.random() < 0.6 else draw.choice(conducts)
    return replace(ask, conduct=conduct, num_events=draw.randint(0, 12))


def _draw_fault(draw: random.Random, names: Sequence[str], kinds: Sequence[str]) -> Fault:
    targets = tuple(draw.sample(names, 2))
    seconds = draw.choice((0.05, 0.5, 2.0, 8.0)) * draw.uniform(0.5, 1.5)
    return Fault(draw.uniform(0.5, SECONDS + 2.0), draw.choice(kinds), targets, seconds, draw.random())
