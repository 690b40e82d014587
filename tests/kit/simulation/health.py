"""Asks the services of a simulated cluster for their health, and compares it with what is true.

A service that takes requests must give tokens, and one that could give them must take requests, with a long step in
progress too. Neither can be so at once: a peer that is frozen or cut off is noticed after some seconds, and what is
back has to be found and set up. So an answer is wrong only if it is given for long while the opposite is true.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections import Counter

    from tests.kit.simulation.cluster import Cluster, Node

# None: it cannot be said.
Truth = bool | None
ASK_SECONDS = 0.5
# Keepalive asks after five seconds, and waits for as long.
NOTICE_SECONDS = 12.0
# The longest pauses between attempts to connect and to set up, and the loading of a model.
RECOVERY_SECONDS = 15.0


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
        # What is so with processes, in the lives that they have, and since when.
        self._since: dict[str, tuple[Truth, tuple[int, ...], float]] = {}

    def start(self) -> None:
        loop = self._cluster.loop
        if loop.time() < self._until:
            self._ask_all()
            loop.call_later(ASK_SECONDS, self.start)
        else:
            self.has_ended.set()

    def _ask_all(self) -> None:
        schedules = self._find_scheduling()
        for name, node in self._cluster.nodes.items():
            if name == "scheduler":
                self._judge(node, *schedules)
            elif name.startswith("gateway"):
                reaches = self._note(f"{name} reaches", self._can_reach(name, "scheduler"), name, "scheduler")
                self._judge(node, *_both(reaches, schedules))

    def _judge(self, node: Node, can_serve: Truth, since: float) -> None:
        role = node.name.partition("-")[0]
        is_ready, answered_since = self._note(f"{node.name} answers", _is_ready(node), node.name)
        seconds = self._cluster.loop.time() - max(since, answered_since)
        if not _is_usual(node) or can_serve is None:
            judgement = Judgement.OPEN
        elif is_ready is can_serve:
            judgement = Judgement.READY if is_ready else Judgement.NOT_READY
        elif seconds < (RECOVERY_SECONDS if can_serve else NOTICE_SECONDS):
            judgement = Judgement.LATE if can_serve else Judgement.EARLY
        else:
            judgement = Judgement.WRONG
            answer = "ready" if is_ready else "not ready"
            self.violations.append(f"{node.name} is {answer}, which has not been true for {seconds:.1f} s")
        self._judgements[role, judgement] += 1

    # What is true.

    def _note(self, what: str, truth: Truth, *names: str) -> tuple[Truth, float]:
        """Returns what is said of processes in the lives that they have, and since when it is so."""
        lives = tuple(self._cluster.nodes[name].num_lives for name in names)
        before = self._since.get(what)
        if before is None or before[:2] != (truth, lives):
            self._since[what] = truth, lives, self._cluster.loop.time()
        return truth, self._since[what][2]

    def _find_scheduling(self) -> tuple[Truth, float]:
        """Whether the scheduler and the workers of a replica can work together, and since when."""
        if any(not task.done() for task in self._cluster.operations):
            # What operators have taken away has to be set up again.
            self._since.clear()
            return None, 0.0
        sizes = self._cluster.sizes
        replicas = [names for names in sizes.replicas if len(names) == max(sizes.ranks)]
        truths = [self._note(str(names), self._can_serve(names), *names, "scheduler") for names in replicas]
        serving = [since for truth, since in truths if truth]
        if serving:
            return True, min(serving)
        return (None if any(truth is None for truth, _ in truths) else False), max(since for _, since in truths)

    def _can_serve(self, names: list[str]) -> Truth:
        nodes = [self._cluster.nodes[name] for name in names]
        if not all(node.process.owner.alive for node in nodes):
            return False
        reaches = [self._can_reach("scheduler", name) for name in names]
        reaches += [self._can_reach(one, other) for one in names for other in names if one < other]
        if False in reaches:
            return False
        # Only the deadline of a step tells a frozen worker from one that computes.
        return None if None in reaches or not all(map(_is_usual, nodes)) else True

    def _can_reach(self, one: str, other: str) -> Truth:
        """Whether two machines can talk, and processes run there."""
        nodes, network = [self._cluster.nodes[name] for name in (one, other)], self._cluster.network
        if network.is_blocked(one, other) or network.is_blocked(other, one):
            return False
        if not all(node.process.owner.alive for node in nodes):
            return False
        return None if network.is_delayed(one, other) or not all(map(_is_usual, nodes)) else True


def _both(one: tuple[Truth, float], other: tuple[Truth, float]) -> tuple[Truth, float]:
    """Returns whether two things are true, and since when."""
    false = [since for truth, since in (one, other) if truth is False]
    if false:
        return False, min(false)
    return (None if None in (one[0], other[0]) else True), max(one[1], other[1])


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
