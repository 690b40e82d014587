"""A scenario: what a simulated cluster is asked for and what goes wrong meanwhile, all drawn from a seed.

The mix of faults is drawn too: some scenarios have one kind of fault only, some have none, some tiny pools of blocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blockyard.contract.models import Task
from blockyard.errors import Reason
from tests.kit.simulation.asks import FEATURES, HTTP_CONDUCTS, SECONDS, draw_ask, draw_pooling_ask
from tests.kit.simulation.cluster import Sizes
from tests.kit.simulation.faults import FAULTS, SPOILS
from tests.kit.simulation.operators import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kit.simulation.asks import Ask


# The errors with which any request may fail because of what operators do.
ALLOWED_BY = {"sleep": Reason.SLEEPING, "update weights": Reason.SLEEPING}
# What goes wrong between gateways, their scheduler and their clients.
CONTROL_FAULTS = (
    *("kill", "kill silently", "kill two", "stop", "freeze", "slow"),
    *("part", "isolate", "flap", "delay", "break", "reset"),
)
# What a scenario's faults are about: their kinds, the roles of the nodes that they strike, and the share of scenarios.
# One with all kinds and all roles seldom has three of a kind in the life of one request.
THEMES: dict[str, tuple[Sequence[str], Sequence[str], float]] = {
    "all": (tuple(FAULTS), ("worker", "scheduler", "gateway"), 4),
    "workers": (("kill", "kill silently", "stop", "break", *SPOILS), ("worker",), 2),
    "gateways": (CONTROL_FAULTS, ("scheduler", "gateway"), 3),
    "operators": ((*OPERATIONS, "kill"), ("worker", "scheduler", "gateway"), 1),
}
# How many of the faults come while the last one is felt, at a place that it struck; and how many of them repeat it.
FOLLOWING_SHARE, REPEATED_SHARE = 0.4, 0.4
# In so many scenarios most requests come at once, the others a little later, each time within so many seconds.
BURSTS_SHARE, BURST_SECONDS = 0.25, 0.05
# How many requests of a scenario do other than to be read to the end.
CONDUCT_SHARES = (0.2, 0.4, 0.8)
# The workers of each replica, and the stages of their pipelines.
SHAPES = (((1,), 1), ((1, 1), 1), ((1, 1), 1), ((1, 1, 1), 1), ((1, 2), 1), ((1, 2), 1), ((4,), 1), ((2, 2), 2))


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

    @property
    def version(self) -> str:
        """The name of the weights of an update."""
        return f"weights {self.at}"


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
    features = draw.sample(list(FEATURES), draw.choice((2, 3, 5)))
    # Drawn apart, so that scenarios of known seeds stay what they are.
    speculation = random.Random(f"{seed}/drafts").choice(("none", "none", "ngram", "auto"))
    sizes = replace(_draw_sizes(draw, features), speculation=speculation)
    if sizes.task is Task.EMBED:
        asks = tuple(draw_pooling_ask(draw, number) for number in range(num_asks))
    else:
        conducts = [*conducts, *HTTP_CONDUCTS * len(conducts)] if sizes.has_http else conducts
        share = draw.choice(CONDUCT_SHARES)
        asks = tuple(draw_ask(draw, number, features, conducts, share) for number in range(num_asks))
        if sizes.is_slow:
            asks = tuple(replace(ask, max_tokens=min(ask.max_tokens, 5)) for ask in asks[: num_asks // 4])
    if draw.random() < BURSTS_SHARE:
        asks = tuple(replace(ask, at=_draw_burst(draw)) for ask in asks)
    kinds, names = _draw_theme(draw, kinds, sizes)
    if not sizes.max_loras:
        kinds = [kind for kind in kinds if "adapter" not in kind]
    if sizes.task is Task.EMBED:
        # Nobody is told which weights made a vector.
        kinds = [kind for kind in kinds if kind != "update weights"]
    used = draw.sample(kinds, draw.randint(1, len(kinds))) if draw.random() < 0.7 else kinds
    num_faults = 0 if draw.random() < 0.05 else draw.choice((1, 2, 3, 6, 6, 6, 9, 15))
    faults = _draw_faults(draw, names, used, num_faults)
    more_allowed = {ALLOWED_BY[fault.kind] for fault in faults if fault.kind in ALLOWED_BY}
    if sizes.max_waiting_requests:
        more_allowed.add(Reason.QUEUE_FULL)
    versions = tuple(fault.version for fault in faults if fault.kind == "update weights")
    asks = tuple(replace(ask, allowed=ask.allowed | more_allowed, versions=versions) for ask in asks)
    return Scenario(seed, sizes, asks, sorted(faults, key=lambda fault: fault.at))


def _draw_sizes(draw: random.Random, features: Sequence[str]) -> Sizes:
    ranks, stages = draw.choice(SHAPES)
    return Sizes(
        ranks=ranks,
        stages=stages,
        num_device_blocks=draw.choice((36, 44, 60, 150)),
        num_host_blocks=draw.choice((0, 10, 60, 200)),
        block_size=4,
        max_num_seqs=draw.choice((4, 8, 16)),
        max_num_batched_tokens=draw.choice((16, 64, 256)),
        policy=draw.choice(("fcfs", "priority")),
        max_waiting_requests=draw.choice((0, 0, 0, 0, 2, 3, 10)),
        max_loras=draw.choice((1, 2, 3)) if "adapter" in features else 0,
        # The applications of HTTP are slow to make.
        has_http=draw.random() < 0.1,
        is_slow=draw.random() < 0.06,
        task=Task.EMBED if draw.random() < 0.08 else Task.GENERATE,
    )


def _draw_theme(draw: random.Random, kinds: Sequence[str], sizes: Sizes) -> tuple[list[str], list[str]]:
    """Draws a theme; returns its kinds of faults and the nodes that they strike."""
    own, roles, _ = draw.choices(list(THEMES.values()), [share for *_, share in THEMES.values()])[0]
    names = [*sizes.workers, *(f"gateway-{number}" for number in range(sizes.num_gateways)), "scheduler"]
    chosen = [name for name in names if name.startswith(tuple(roles))]
    return [kind for kind in kinds if kind in own], chosen if len(chosen) > 1 else names


def _draw_burst(draw: random.Random) -> float:
    """Draws when a request is sent: within a short time, in which most are, or within another one."""
    return draw.choice((0.1, 0.1, 1.0)) + draw.uniform(0.0, BURST_SECONDS)


def _draw_faults(draw: random.Random, names: Sequence[str], kinds: Sequence[str], num_faults: int) -> list[Fault]:
    faults: list[Fault] = []
    for _ in range(num_faults):
        fault = _draw_fault(draw, names, kinds)
        if faults and draw.random() < FOLLOWING_SHARE:
            last = faults[-1]
            targets = last.targets[0], draw.choice([name for name in names if name != last.targets[0]])
            kind = last.kind if draw.random() < REPEATED_SHARE else fault.kind
            at = last.at + draw.uniform(0.0, max(last.seconds, 1.0))
            fault = replace(fault, at=at, kind=kind, targets=targets if draw.random() < 0.5 else targets[::-1])
        faults.append(fault)
    return faults


def _draw_fault(draw: random.Random, names: Sequence[str], kinds: Sequence[str]) -> Fault:
    targets = tuple(draw.sample(names, 2))
    seconds = draw.choice((0.05, 0.5, 2.0, 8.0, 13.0)) * draw.uniform(0.5, 1.5)
    return Fault(draw.uniform(0.5, SECONDS + 2.0), draw.choice(kinds), targets, seconds, draw.random())
