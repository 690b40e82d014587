"""Goes through the states of the protocol in `spec.py`: all of them, breadth first, or those of one run."""

from __future__ import annotations

import argparse
import sys
import time
from array import array
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from tests.kit.simulation.spec import Action, Broken, Protocol
from tests.kit.simulation.state import Request, State, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Steps = list[tuple[Action, State]]


class Found(NamedTuple):
    num_states: int
    num_actions: int
    depth: int
    seconds: float


class Violation(Exception):
    """The shortest way to a broken promise: the actions, and what the last one broke."""

    def __init__(self, actions: Sequence[Action], cause: str) -> None:
        lines = [f"{cause}:", *(f"  {name} {', '.join(map(str, args))}" for name, args in actions)]
        super().__init__("\n".join(lines))
        self.actions, self.cause = actions, cause


@cache
def _swap_gateways(request: Request) -> Request:
    gateway, cancels_at = (None if g is None else 1 - g for g in (request.client.gateway, request.client.cancels_at))
    entry = request.entry and request.entry._replace(readers=request.entry.readers[::-1])
    client = request.client._replace(gateway=gateway, cancels_at=cancels_at)
    records, up, down = request.records[::-1], request.up[::-1], request.down[::-1]
    return request._replace(client=client, records=records, up=up, down=down, entry=entry)


def _reorder(stream: Stream, order: Sequence[int]) -> Stream:
    steps = tuple(tuple(step[r] for r in order) for step in stream.steps)
    answers = tuple(sampled and tuple(sampled[r] for r in order) for sampled in stream.answers)
    return stream._replace(steps=steps, answers=answers)


def normalize(state: State) -> State:
    """Returns one state for all that differ only in which gateway and request is which, and in where epochs begin."""
    if state.worker_epoch:
        streams = tuple(each._replace(epoch=max(each.epoch - state.worker_epoch, 0)) for each in state.streams)
        state = state._replace(worker_epoch=0, streams=streams)
    swapped = state._replace(requests=tuple(map(_swap_gateways, state.requests)), is_attached=state.is_attached[::-1])
    return min(_sort_requests(state), _sort_requests(swapped), key=hash)


def _sort_requests(state: State) -> State:
    order = sorted(range(len(state.requests)), key=lambda r: hash(state.requests[r]))
    if order == list(range(len(order))):
        return state
    streams = tuple(_reorder(stream, order) for stream in state.streams)
    return state._replace(requests=tuple(state.requests[r] for r in order), streams=streams)


class Search:
    """Visits every state. `is_prompt`: in each state first does what may as well happen at once, in one order.

    States are known by their hashes of 64 bits.
    """

    def __init__(self, protocol: Protocol, *, is_prompt: bool) -> None:
        self._protocol = protocol
        self._is_prompt = is_prompt
        self._numbers: dict[int, int] = {}
        # The state before each, and which of its actions led on.
        self._parents, self._places = array("q"), array("H")
        # The actions that are no choices, from state to state.
        self._sources, self._targets = array("I"), array("I")
        self._ends: list[int] = []

    def run(self, report: Callable[[int, int], None] = lambda depth, num_states: None) -> Found:
        """Raises Violation for a broken promise, and for a state from which no end can be reached."""
        begin, depth = time.perf_counter(), 0
        start = normalize(self._protocol.start)
        frontier = [(self._number(start, -1, 0)[0], start)]
        while frontier:
            frontier = list(self._visit(frontier))
            depth += bool(frontier)
            report(depth, len(self._numbers))
        self._check_ends()
        return Found(len(self._numbers), len(self._sources), depth, time.perf_counter() - begin)

    def _number(self, state: State, parent: int, place: int) -> tuple[int, bool]:
        """Returns the number of a state, and whether it is new."""
        number = self._numbers.setdefault(hash(state), len(self._numbers))
        is_new = number == len(self._parents)
        if is_new:
            self._parents.append(parent)
            self._places.append(place)
        return number, is_new

    def _visit(self, frontier: list[tuple[int, State]]) -> Iterator[tuple[int, State]]:
        for number, state in frontier:
            if self._protocol.has_ended(state):
                self._ends.append(number)
            for place, (steps, is_choice) in enumerate(self._follow(state)):
                self._check(number, state, steps)
                after = normalize(steps[-1][1])
                follower, is_new = self._number(after, number, place)
                if not is_choice:
                    self._sources.append(number)
                    self._targets.append(follower)
                if is_new:
                    yield follower, after

    def _follow(self, state: State) -> Iterator[tuple[Steps, bool]]:
        """Yields the ways on from a state: an action and what follows at once, and whether it is a choice."""
        for action, after in self._protocol.actions(state):
            yield self._settle(action, after), False
        for action, after in self._protocol.choices(state):
            yield self._settle(action, after), True

    def _settle(self, action: Action, state: State) -> Steps:
        steps = [(action, state)]
        while self._is_prompt and (step := next(self._protocol.prompt_actions(steps[-1][1]), None)):
            steps.append(step)
        return steps

    def _check(self, number: int, state: State, steps: Steps) -> None:
        for place, (action, after) in enumerate(steps):
            try:
                self._protocol.check(state, action, after)
            except Broken as error:
                raise Violation([*self._trace(number), *(each for each, _ in steps[: place + 1])], str(error)) from None
            state = after

    def _trace(self, number: int) -> list[Action]:
        """Returns the actions that lead to a state, with the names that states have on the way."""
        places: list[int] = []
        while (parent := self._parents[number]) >= 0:
            places.append(self._places[number])
            number = parent
        state, actions = normalize(self._protocol.start), list[Action]()
        for place in reversed(places):
            steps = list(self._follow(state))[place][0]
            actions += [action for action, _ in steps]
            state = normalize(steps[-1][1])
        return actions

    def _check_ends(self) -> None:
        """Raises Violation for the first state from which no end is reached without a choice."""
        before: list[list[int]] = [[] for _ in self._parents]
        for source, target in zip(self._sources, self._targets, strict=True):
            before[target].append(source)
        reaches, todo = bytearray(len(before)), self._ends
        for number in todo:
            reaches[number] = True
        while todo:
            for number in before[todo.pop()]:
                if not reaches[number]:
                    reaches[number] = True
                    todo.append(number)
        if (number := reaches.find(0)) >= 0:
            raise Violation(self._trace(number), "an answer can never end")


def check_run(events: Iterable[Action], protocol: Protocol) -> None:
    """Raises Broken unless the events are a run: each is an action that a state before it allows, and breaks nothing.

    An action's name and arguments may fit several states after it, so all of them are followed.
    """
    states = {protocol.start}
    for place, event in enumerate(events):
        allowed = [(state, *each) for state in states for each in _list_actions(protocol, state)]
        followers = [(state, after) for state, action, after in allowed if action == event]
        if not followers:
            raise Broken(f"event {place} is not possible: {event[0]} {event[1]}")
        for state, after in followers:
            protocol.check(state, event, after)
        states = {after for _, after in followers}


def _list_actions(protocol: Protocol, state: State) -> Steps:
    return [*protocol.actions(state), *protocol.choices(state)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Visits every state of the protocol, and checks its promises.")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--faults", type=int, default=2)
    parser.add_argument("--cancels", type=int, default=0)
    parser.add_argument("--every-order", action="store_true", help="also delay what may as well happen at once")
    options = parser.parse_args()
    protocol = Protocol(options.requests, options.tokens, options.faults, options.cancels)
    try:
        found = Search(protocol, is_prompt=not options.every_order).run(_report)
    except Violation as error:
        sys.exit(str(error))
    numbers = f"{found.num_states:,} states, {found.num_actions:,} actions between them, depth {found.depth}"
    sys.stdout.write(f"{numbers}, {found.seconds:.1f} s: every promise holds\n")


def _report(depth: int, num_states: int) -> None:
    sys.stdout.write(f"depth {depth}: {num_states:,} states\n")
    sys.stdout.flush()
