"""The protocol as a small program keeps its promises in every state of small sizes. Planted mistakes are found."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.kit.simulation.search import Search, Violation, check_run
from tests.kit.simulation.spec import Action, Broken, Protocol
from tests.kit.simulation.state import Entry, Lookup, Record, put, send

if TYPE_CHECKING:
    from tests.kit.simulation.state import Client, Ids, Request, State, Stream

ROOT = Path(__file__).parents[3]
WRONG_TOKEN, TOO_SHORT, NO_END = "wrong token", "before its last token", "can never end"
OTHER_EPOCH, RUNS_AGAIN = "another epoch", "runs again"


# A search of the size that the documentation names takes minutes: python -m tests.kit.simulation.spec.
@pytest.mark.parametrize(
    ("num_requests", "num_tokens", "num_faults", "num_cancels", "is_prompt"),
    [(2, 2, 1, 0, True), (2, 3, 0, 1, True), (1, 3, 2, 0, True), (1, 3, 1, 1, True), (1, 2, 1, 1, False)],
)
def test_every_state_keeps_the_promises(
    num_requests: int, num_tokens: int, num_faults: int, num_cancels: int, is_prompt: bool
) -> None:
    protocol = Protocol(num_requests, num_tokens, num_faults, num_cancels)
    assert Search(protocol, is_prompt=is_prompt).run().num_states > 1000


def test_the_command_prints_it() -> None:
    command = [sys.executable, "-m", "tests.kit.simulation.spec", "--requests", "1", "--tokens", "2", "--faults", "1"]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT).stdout
    assert re.fullmatch(r"\d+ states, [\d,]+ actions .*, depth \d+, \d+\.\d s: .*", told.splitlines()[-1])


class _WorkerRunsOldEpochs(Protocol):
    def may_run(self, stream: Stream, state: State) -> bool:
        return True


class _SchedulerReadsOldEpochs(Protocol):
    def is_read(self, stream: Stream) -> bool:
        return True


class _ResumesOneTokenEarly(Protocol):
    def find_position(self, client: Client) -> int:
        return max(len(client.ids) - 1, 0)


class _ResumesOneTokenLate(Protocol):
    def find_position(self, client: Client) -> int:
        return len(client.ids) + 1


class _CountsNoRepeats(Protocol):
    def continue_from(self, record: Record | Lookup, ids: Ids, *, has_ended: bool) -> Record:
        return super().continue_from(record, ids, has_ended=has_ended)._replace(num_repeats=0)


class _AcceptsTwice(Protocol):
    """A request that comes again is computed again, for all that read it."""

    def add(self, request: Request, g: int, handle: int, ids: Ids, *, has_ended: bool, is_again: bool) -> Request:
        former = request.entry
        request = super().add(request._replace(entry=None), g, handle, ids, has_ended=has_ended, is_again=is_again)
        if former is None or request.entry is None:
            return request
        readers = put(former.readers, g, handle)
        return request._replace(entry=request.entry._replace(readers=readers))


class _LosesCancelsOnReattachment(Protocol):
    def add(self, request: Request, g: int, handle: int, ids: Ids, *, has_ended: bool, is_again: bool) -> Request:
        return super().add(request, g, handle, ids, has_ended=has_ended, is_again=False)


class _KeepsCancelsOfUnknownRequestsAlone(Protocol):
    def hear_cancel(self, request: Request, state: State) -> Request:
        return super().hear_cancel(request, state)._replace(is_cancelled=request.entry is None)


class _OneReaderLeavesForAll(Protocol):
    def hear_gateway(self, request: Request, g: int) -> Request:
        messages = request.up[g]
        request = super().hear_gateway(request, g)
        return request._replace(entry=None) if any(message[0] == "abort" for message in messages) else request


class _EndsAShorterRecord(Protocol):
    """A gateway that has the whole answer ends the request at the scheduler, which has less of it."""

    def hear_scheduler(self, request: Request, g: int, *, is_attached: bool) -> Request:
        messages, record = request.down[g], request.records[g]
        request = super().hear_scheduler(request, g, is_attached=is_attached)
        has_all = isinstance(record, Record) and record.has_ended
        if has_all and any(message[0] == "resumed" and not message[3] for message in messages):
            return request._replace(up=send(request.up, g, "stop", record.handle))
        return request

    def hear_gateway(self, request: Request, g: int) -> Request:
        if not any(message[0] == "stop" for message in request.up[g]) or not isinstance(request.entry, Entry):
            return super().hear_gateway(request, g)
        down, entry = request.down, request.entry
        for other, handle in enumerate(entry.readers):
            down = down if handle is None else send(down, other, "tokens", handle, (), True)
        ended = Entry(entry.ids, True, (None, None))
        return request._replace(up=put(request.up, g, ()), down=down, entry=ended)


class _ForgetsLookups(Protocol):
    def attach(self, state: State, g: int) -> State:
        after = super().attach(state, g)
        requests = list(after.requests)
        for r, request in enumerate(requests):
            if isinstance(request.records[g], Lookup):
                requests[r] = request._replace(up=put(request.up, g, ()))
        return after._replace(requests=tuple(requests))


class _ForgetsThatAnEpochEnded(Protocol):
    """Sequences go on in a new epoch as if the worker had their tokens."""

    def schedule(self, state: State) -> State | None:
        requests = [
            request._replace(entry=request.entry._replace(is_known=True))
            if request.entry is not None and request.entry.ids
            else request
            for request in state.requests
        ]
        return super().schedule(state._replace(requests=tuple(requests)))


MISTAKES: list[tuple[type[Protocol], int, int, str]] = [
    # The mistake, the faults and the cancels that it takes to show, and what it breaks.
    (_WorkerRunsOldEpochs, 1, 0, NO_END),
    (_SchedulerReadsOldEpochs, 1, 0, OTHER_EPOCH),
    (_ResumesOneTokenEarly, 0, 0, WRONG_TOKEN),
    (_ResumesOneTokenLate, 0, 0, WRONG_TOKEN),
    (_CountsNoRepeats, 2, 0, WRONG_TOKEN),
    (_AcceptsTwice, 2, 0, WRONG_TOKEN),
    (_LosesCancelsOnReattachment, 1, 1, RUNS_AGAIN),
    (_KeepsCancelsOfUnknownRequestsAlone, 1, 1, RUNS_AGAIN),
    (_OneReaderLeavesForAll, 2, 0, NO_END),
    (_EndsAShorterRecord, 2, 0, TOO_SHORT),
    (_ForgetsLookups, 2, 0, NO_END),
    (_ForgetsThatAnEpochEnded, 1, 0, NO_END),
]


@pytest.mark.parametrize(("mistake", "num_faults", "num_cancels", "broken"), MISTAKES)
def test_a_planted_mistake_is_found(mistake: type[Protocol], num_faults: int, num_cancels: int, broken: str) -> None:
    protocol = mistake(num_requests=1, num_tokens=3, num_faults=num_faults, num_cancels=num_cancels)
    with pytest.raises(Violation, match=broken):
        Search(protocol, is_prompt=True).run()


def test_a_violation_shows_the_shortest_way_to_it() -> None:
    protocol = _ResumesOneTokenEarly(num_requests=1, num_tokens=2, num_faults=0, num_cancels=0)
    with pytest.raises(Violation) as found:
        Search(protocol, is_prompt=True).run()
    names = [name for name, _ in found.value.actions]
    assert names[0] == "call" and names[-1] == "read" and names.count("call") == 1
    assert str(found.value).splitlines()[1].startswith("  call 0, ")


def _draw_run(protocol: Protocol, chance: random.Random) -> list[Action]:
    state, events = protocol.start, list[Action]()
    while steps := list(protocol.actions(state)):
        choices = list(protocol.choices(state)) if chance.random() < 0.2 else []
        action, state = chance.choice(choices or steps)
        events.append(action)
    assert protocol.has_ended(state)
    return events


SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_runs_are_told_from_what_is_none(seed: int) -> None:
    chance, protocol = random.Random(seed), Protocol()
    events = _draw_run(protocol, chance)
    check_run(events, protocol)
    place = chance.randrange(len(events))
    # An answer of an epoch that never was, a token that was not read, the end of an answer that has not begun.
    wrong = chance.choice([("hear_worker", (99,)), ("read", (0, 4)), ("finish", (2,)), ("compute", (0,))])
    with pytest.raises(Broken, match=f"event {place} "):
        check_run([*events[:place], wrong, *events[place:]], protocol)


def test_an_event_that_is_missing_or_told_twice_is_noticed() -> None:
    protocol = Protocol(num_requests=1, num_tokens=2, num_faults=0, num_cancels=0)
    steps: list[Action] = [("schedule", (1,)), ("schedule", (1,)), ("compute", (1,)), ("hear_worker", (1,))]
    start: list[Action] = [("call", (0, 0)), ("hear_gateway", (0,))]
    events = [*start, *steps, ("hear_scheduler", (0,)), ("read", (0, 2)), ("finish", (0,))]
    check_run(events, protocol)
    for place, event in enumerate(events):
        with pytest.raises(Broken, match="is not possible"):
            check_run([*events[:place], event, *events[place:]], protocol)
    for place in range(len(events) - 1):
        with pytest.raises(Broken, match="is not possible"):
            check_run([*events[:place], *events[place + 1 :]], protocol)


def test_a_run_that_breaks_a_promise_is_refused() -> None:
    protocol = _SchedulerReadsOldEpochs(num_requests=1, num_tokens=2, num_faults=1, num_cancels=0)
    events: list[Action] = [("call", (0, 0)), ("hear_gateway", (0,)), ("schedule", (1,)), ("give_epoch_up", ())]
    late: list[Action] = [("compute", (1,)), ("hear_worker", (1,))]
    with pytest.raises(Broken, match="an answer of another epoch was used"):
        check_run([*events, *late], protocol)
    with pytest.raises(Broken, match="event 5 is not possible"):
        check_run([*events, *late], Protocol(1, 2, 1, 0))
