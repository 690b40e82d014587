"""Asks the services of a simulated cluster for their health, and compares it with what is true.

A service that takes requests must give tokens, and one that could give them must take requests, with a long step in
progress too. Neither can be so at once: a peer that is frozen or cut off is noticed after some seconds, and what is
back has to be found and set up. So an answer is wrong only once the opposite has been true for long.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tests.kit.simulation.cluster import FELT_SECONDS

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

    from tests.kit.simulation.cluster import Cluster, Node

ASK_SECONDS = 0.5
# Keepalive asks after five seconds, and waits for as long.
NOTICE_SECONDS = 12.0
# The longest pauses between attempts to connect and to set up, and the loading of a model.
RECOVERY_SECONDS = FELT_SECONDS


class Judgement(StrEnum):
    """What an answer was: right, not yet right, or wrong. Of processes that are slow or stop nothing can be said."""

    READY = "ready, and it was"
    NOT_READY = "not ready, and it was not"
    EARLY = "ready, while a failure was not noticed yet"
    LATE = "not ready, while it recovered"
    OPEN = "while it was stopped, slowed or operated on"
    WRONG = "wrong"


class Health:
    """Asks again and again until some time after the last fault.

    Args:
        until: when no fault is felt any more.
        judgements: counts those of each role's answers.

    Attributes:
        violations: the wrong answers, in words.
        has_ended: set after the last answers.
    """

    def __init__(self, cluster: Cluster, until: float, judgements: Counter[tuple[str, Judgement]]) -> None:
        self.violations: list[str] = []
        self.has_ended = asyncio.Event()
        self._cluster = cluster
        # Long enough for what never recovers to be wrong.
        self._until = until + RECOVERY_SECONDS + 2 * ASK_SECONDS
        self._judgements = judgements
        # Since when each service could or could not serve.
        self._since: dict[str, tuple[bool, float]] = {}

    def start(self) -> None:
        loop = self._cluster.loop
        if loop.time() < self._until:
            self._ask_all()
            loop.call_later(ASK_SECONDS, self.start)
        else:
            self.has_ended.set()

    def _ask_all(self) -> None:
        can_schedule = self._can_schedule()
        for name, node in self._cluster.nodes.items():
            if name.startswith("worker"):
                continue
            can_serve = can_schedule
            if name != "scheduler" and can_serve is not False:
                can_serve = self._can_reach(name, "scheduler") and can_schedule
            self._judge(node, can_serve)

    def _judge(self, node: Node, can_serve: bool | None) -> None:
        now, role = self._cluster.loop.time(), node.name.partition("-")[0]
        if not _is_usual(node) or can_serve is None:
            self._since.pop(node.name, None)
            self._judgements[role, Judgement.OPEN] += 1
            return
        before, since = self._since.get(node.name, (can_serve, now))
        since = since if before is can_serve else now
        self._since[node.name] = can_serve, since
        is_ready = _is_ready(node)
        if is_ready is can_serve:
            judgement = Judgement.READY if is_ready else Judgement.NOT_READY
        elif now - since < (RECOVERY_SECONDS if can_serve else NOTICE_SECONDS):
            judgement = Judgement.LATE if can_serve else Judgement.EARLY
        else:
            judgement = Judgement.WRONG
            answer = "ready" if is_ready else "not ready"
            self.violations.append(f"{node.name} is {answer}, which has not been true for {now - since:.1f} s")
        self._judgements[role, judgement] += 1

    # What is true: None: it cannot be said.

    def _can_schedule(self) -> bool | None:
        """Whether the scheduler and the workers of a replica can work together."""
        if any(not task.done() for task in self._cluster.operations):
            return None
        can_serve = [self._can_serve(names) for names in self._replicas()]
        if any(can_serve):
            return True
        return None if None in can_serve else False

    def _replicas(self) -> Iterator[list[str]]:
        sizes = self._cluster.sizes
        yield from (names for names in sizes.replicas if len(names) == max(sizes.ranks))

    def _can_serve(self, names: list[str]) -> bool | None:
        nodes = [self._cluster.nodes[name] for name in names]
        if not all(node.process.owner.alive for node in nodes):
            return False
        # Only the deadline of a step tells a frozen worker from one that computes.
        is_usual = all(_is_usual(node) for node in nodes)
        reaches = [self._can_reach("scheduler", name) for name in names]
        reaches += [self._can_reach(one, other) for one in names for other in names if one < other]
        if False in reaches:
            return False
        return True if is_usual and None not in reaches else None

    def _can_reach(self, one: str, other: str) -> bool | None:
        """Whether two machines can talk, and processes run there."""
        nodes, network = [self._cluster.nodes[name] for name in (one, other)], self._cluster.network
        if network.is_blocked(one, other) or network.is_blocked(other, one):
            return False
        if not all(node.process.owner.alive for node in nodes):
            return False
        return None if network.is_delayed(one, other) or not all(map(_is_usual, nodes)) else True


def _is_usual(node: Node) -> bool:
    """Whether a node's process is neither frozen nor slow nor told to stop. One that does not run answers nothing."""
    owner = node.process.owner
    return not (owner.frozen or node.stopping.is_set()) and owner.slowdown == 1.0


def _is_ready(node: Node) -> bool:
    """Asks a service. One that does not run is not ready."""
    service: Any = node.service
    if service is None or not node.process.owner.alive:
        return False
    return service.generation.is_ready() if node.name.startswith("gateway") else service.service.is_ready
