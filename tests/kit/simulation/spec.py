"""The protocol as a small program: a client, two gateways, a scheduler and a worker, and all that can happen to them.

A state is a tuple. The methods of `Protocol` yield each action that a state allows, with the state that it leads to. A
search (`search.py`) visits every state that some requests and some faults can lead to, and checks three promises:

- each position of an answer reaches the client exactly once, in order, and with the right token;
- only one epoch counts: what a worker computes for another epoch is never used;
- what is accepted ends: from every state the client can get the rest of its answer without a further fault.

    python -m tests.kit.simulation.spec --requests 2 --tokens 3 --faults 2
    python -m tests.kit.simulation.spec --requests 1 --tokens 3 --faults 2 --cancels 1

What is left out, and why it may be: The right token at position p is p, and WRONG if anything but the right tokens was
before it. A process that dies is replaced at once by one that knows nothing; one that stays away for a while differs
only by doing nothing. A call between client and gateway has no messages in flight: a lost one is as if the call had
broken before. What is in flight between two processes arrives together: less of it is as if the rest was sent later.
Time does not pass: what a time limit does may happen at any moment, and counts as a fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.kit.simulation.state import (
    ACCEPTED,
    CALLED,
    DONE,
    GATEWAYS,
    LEFT,
    NEW,
    Client,
    Entry,
    Ids,
    Lookup,
    Record,
    Request,
    Sampled,
    State,
    Stream,
    change,
    close,
    compute_token,
    detach,
    drop_record,
    end_epoch,
    find_handle,
    find_sequence_id,
    forget_rows,
    has_epoch,
    has_reader,
    lose_gateway,
    lose_scheduler,
    lose_steps,
    lose_worker,
    put,
    send,
    send_up,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

Action = tuple[str, tuple[int, ...]]

MAX_STEPS_IN_FLIGHT = 2


class Broken(Exception):
    """A promise does not hold."""


class Protocol:
    """The actions, by who acts. Tests replace single methods by wrong ones, each of which the search must find."""

    def __init__(self, num_requests: int = 2, num_tokens: int = 3, num_faults: int = 2, num_cancels: int = 1) -> None:
        self.num_tokens = num_tokens
        self.start = State((Request(),) * num_requests, num_faults=num_faults, num_cancels=num_cancels)

    def actions(self, state: State) -> Iterator[tuple[Action, State]]:
        """Yields what happens sooner or later, unless something else happens before."""
        yield from self.prompt_actions(state)
        yield from self.client_actions(state)
        for g in GATEWAYS:
            if not state.is_attached[g]:
                yield ("attach", (g,)), self.attach(state, g)
            if any(request.down[g] for request in state.requests):
                after = [self.hear_scheduler(each, g, is_attached=state.is_attached[g]) for each in state.requests]
                yield ("hear_scheduler", (g,)), state._replace(requests=tuple(after))
        if state.is_reattaching and all(state.is_attached) and not any(any(each.up) for each in state.requests):
            yield ("trust", ()), state._replace(is_reattaching=False)
        if not has_epoch(state):
            stream = Stream(state.worker_epoch + 1)
            yield ("open_epoch", (stream.epoch,)), state._replace(streams=(*state.streams, stream))
        for place, stream in enumerate(state.streams):
            if stream.steps:
                yield ("compute", (stream.epoch,)), self.compute(state, place)

    def prompt_actions(self, state: State) -> Iterator[tuple[Action, State]]:
        """Yields what a search may do at once, before anything else: what is lost by waiting here can be lost before it
        came here, too. Only a request that is on its way when another gateway cancels it needs `--every-order`."""
        for r, request in enumerate(state.requests):
            if request.client.gateway is not None and (after := self.read(request, request.client.gateway)):
                yield ("read", (r, len(after.client.ids))), change(state, r, after)
        for g in GATEWAYS:
            if any(request.up[g] for request in state.requests):
                after = tuple(self.hear_gateway(each, g) for each in state.requests)
                yield ("hear_gateway", (g,)), state._replace(requests=after)
        for place, stream in enumerate(state.streams):
            if stream.answers and self.is_read(stream):
                yield ("hear_worker", (stream.epoch,)), self.hear_worker(state, place)
        if has_epoch(state) and (after := self.schedule(state)):
            yield ("schedule", (state.streams[-1].epoch,)), after

    # The client: blockyard/client/resumption.py.

    def client_actions(self, state: State) -> Iterator[tuple[Action, State]]:
        for r, request in enumerate(state.requests):
            client = request.client
            if client.phase in (NEW, CALLED, ACCEPTED) and client.gateway is None:
                for g in GATEWAYS:
                    yield ("call", (r, g)), change(state, r, self.call(request, g, is_attached=state.is_attached[g]))
            elif client.gateway is not None and self.may_finish(request, client.gateway):
                client = client._replace(phase=DONE, gateway=None)
                yield ("finish", (r,)), change(state, r, request._replace(client=client))
            if client.cancels_at is not None:
                yield ("hear_cancel", (r,)), change(state, r, self.hear_cancel(request, state))

    def call(self, request: Request, g: int, *, is_attached: bool) -> Request:
        """The client starts its request at any gateway, or resumes it. A gateway that has it lets the client read."""
        client, handle = request.client, find_handle(request, g) if is_attached else None
        request = request._replace(client=client._replace(phase=max(client.phase, CALLED), gateway=g))
        if request.records[g] is not None:
            return request
        if client.phase == ACCEPTED:
            return send_up(request, g, Lookup(handle), "resume")
        return send_up(request, g, Record(handle=handle), "add", (), False, False)

    def read(self, request: Request, g: int) -> Request | None:
        """The client reads what its gateway has behind its position."""
        client, record = request.client, request.records[g]
        if not isinstance(record, Record) or not record.is_accepted:
            return None
        rest = record.ids[self.find_position(client) :]
        if client.phase == ACCEPTED and not rest:
            return None
        return request._replace(client=client._replace(phase=ACCEPTED, ids=client.ids + rest))

    def find_position(self, client: Client) -> int:
        return len(client.ids)

    def may_finish(self, request: Request, g: int) -> bool:
        record = request.records[g]
        return isinstance(record, Record) and record.has_ended and record.ids == request.client.ids

    def cancel(self, request: Request, g: int) -> Request:
        """The client ends its call and cancels at any gateway, which drops the request and tells the scheduler."""
        client = request.client._replace(phase=LEFT, gateway=None, cancels_at=g)
        return drop_record(request._replace(client=client), g)

    # The scheduler and its gateways: scheduler_service/requests.

    def hear_gateway(self, request: Request, g: int) -> Request:
        messages, request = request.up[g], request._replace(up=put(request.up, g, ()))
        for message in messages:
            entry, handle = request.entry, message[1]
            match message:
                case ("add", _, ids, has_ended, is_again):
                    request = self.add(request, g, handle, ids, has_ended=has_ended, is_again=is_again)
                case ("resume", _) if entry is None:
                    request = request._replace(down=send(request.down, g, "unknown", handle))
                case ("resume", _):
                    request = self.send_all(request, g, handle, entry)
                case ("abort", _) if entry is not None and entry.readers[g] == handle:
                    readers = put(entry.readers, g, None)
                    request = request._replace(entry=entry._replace(readers=readers) if has_reader(readers) else None)
        return request

    def add(self, request: Request, g: int, handle: int, ids: Ids, *, has_ended: bool, is_again: bool) -> Request:
        """Takes a request, or lets the gateway read the one that is there. `is_again`: it was sent before."""
        if request.entry is not None:
            return self.send_all(request, g, handle, request.entry)
        if is_again and request.is_cancelled and not has_ended:
            return request._replace(down=send(request.down, g, "cancelled", handle))
        entry = Entry(ids, has_ended, (None, None) if has_ended else put((None, None), g, handle))
        return request._replace(entry=entry, down=send(request.down, g, "accepted", handle))

    def send_all(self, request: Request, g: int, handle: int, entry: Entry) -> Request:
        down = send(request.down, g, "resumed", handle, entry.ids, entry.has_ended)
        readers = entry.readers if entry.has_ended else put(entry.readers, g, handle)
        return request._replace(entry=entry._replace(readers=readers), down=down)

    def hear_cancel(self, request: Request, state: State) -> Request:
        """Ends a request for all its readers, or keeps the cancel until a gateway brings the request."""
        client, entry, down = request.client._replace(cancels_at=None), request.entry, request.down
        if (entry is None and not state.is_reattaching) or (entry is not None and entry.has_ended):
            return request._replace(client=client)
        for g, handle in enumerate(entry.readers if entry else ()):
            down = down if handle is None else send(down, g, "cancelled", handle)
        return request._replace(client=client._replace(is_told=True), entry=None, down=down, is_cancelled=True)

    # A gateway and its scheduler: gateway/live.

    def hear_scheduler(self, request: Request, g: int, *, is_attached: bool) -> Request:
        messages, request = request.down[g], request._replace(down=put(request.down, g, ()))
        for message in messages:
            record = request.records[g]
            if record is None or record.handle != message[1]:
                continue
            match message:
                case ("accepted", _) if isinstance(record, Record) and not record.has_ended:
                    record = record._replace(is_accepted=True)
                case ("resumed", _, ids, has_ended):
                    record = self.continue_from(record, ids, has_ended=has_ended)
                case ("tokens", _, ids, has_ended) if isinstance(record, Record) and not record.has_ended:
                    num_repeats = max(record.num_repeats - len(ids), 0)
                    ids = record.ids + ids[record.num_repeats :]
                    record = record._replace(ids=ids, has_ended=has_ended, num_repeats=num_repeats)
                case ("cancelled", _):
                    record = None
                case ("unknown", _):
                    request = self.begin(request, g, find_handle(request, g) if is_attached else None)
                    record = request.records[g]
            request = request._replace(records=put(request.records, g, record))
        return request

    def continue_from(self, record: Record | Lookup, ids: Ids, *, has_ended: bool) -> Record:
        """Goes on from what the scheduler has, which may be more or fewer tokens than are here."""
        if isinstance(record, Lookup):
            record = Record(handle=record.handle)
        if record.has_ended:
            return record
        num_repeats = max(len(record.ids) - len(ids), 0)
        return Record(record.ids + ids[len(record.ids) :], has_ended, True, record.handle, num_repeats)

    def begin(self, request: Request, g: int, handle: int | None) -> Request:
        """Nobody has the request: it goes on from the tokens that its client has, if the client still waits."""
        client = request.client
        if client.gateway != g:
            return request._replace(records=put(request.records, g, None))
        record = Record(client.ids, len(client.ids) == self.num_tokens, bool(client.ids), handle)
        return send_up(request, g, record, "add", client.ids, record.has_ended, False)

    def attach(self, state: State, g: int) -> State:
        """A gateway attaches, and sends all that it has to a scheduler that may know it or not."""
        requests = list(state.requests)
        for r, request in enumerate(requests):
            record, handle = request.records[g], find_handle(request, g)
            if isinstance(record, Lookup):
                requests[r] = send_up(request, g, Lookup(handle), "resume")
            elif record is not None:
                record = record._replace(handle=handle)
                requests[r] = send_up(request, g, record, "add", record.ids, record.has_ended, True)
        return state._replace(requests=tuple(requests), is_attached=put(state.is_attached, g, True))

    # Steps: scheduler_service/replicas and worker_service/steps.

    def schedule(self, state: State) -> State | None:
        """Sends a step with all that can run. The step before may still be on its way."""
        stream, step, requests = state.streams[-1], [], list(state.requests)
        if len(stream.steps) + len(stream.answers) >= MAX_STEPS_IN_FLIGHT:
            return None
        for r, request in enumerate(requests):
            entry, work = request.entry, None
            if entry is not None and not entry.has_ended and len(entry.ids) + entry.num_in_flight < self.num_tokens:
                work = ("go", entry.sequence_id)
                if not entry.is_known:
                    entry = entry._replace(sequence_id=find_sequence_id(stream, r, request), is_known=True)
                    work = ("begin", entry.sequence_id, entry.ids)
                requests[r] = request._replace(entry=entry._replace(num_in_flight=entry.num_in_flight + 1))
            step.append(work)
        stream = stream._replace(steps=(*stream.steps, tuple(step)))
        return state._replace(requests=tuple(requests), streams=(*state.streams[:-1], stream)) if any(step) else None

    def compute(self, state: State, place: int) -> State:
        """The worker computes the steps of a stream. A newer epoch ends the one before, an older one is refused."""
        stream = state.streams[place]
        if not stream.is_running and not self.may_run(stream, state):
            return self.answer(state, place, None)
        if not stream.is_running:
            streams = tuple(each._replace(is_running=i == place) for i, each in enumerate(state.streams))
            state = forget_rows(state._replace(streams=streams, worker_epoch=max(stream.epoch, state.worker_epoch)))
        rows, answers = [request.row for request in state.requests], list[Sampled]()
        for step in stream.steps:
            sampled: list[tuple[int, int] | None] = [None] * len(rows)
            for r, work in enumerate(step):
                match work:
                    case ("begin", int() as sequence_id, tuple() as ids):
                        rows[r] = (sequence_id, ids)
                if work is not None and (row := rows[r]) is not None:
                    sampled[r] = (row[0], compute_token(row[1]))
                    rows[r] = (row[0], (*row[1], compute_token(row[1])))
            answers.append(tuple(sampled))
        requests = tuple(each._replace(row=row) for each, row in zip(state.requests, rows, strict=True))
        return self.answer(state._replace(requests=requests), place, *answers)

    def may_run(self, stream: Stream, state: State) -> bool:
        return stream.epoch > state.worker_epoch

    def answer(self, state: State, place: int, *answers: Sampled | None) -> State:
        """The worker answers all steps of a stream. One that the scheduler has given up closes."""
        stream = state.streams[place]
        if not self.is_read(stream):
            return close(state, place)
        stream = stream._replace(steps=(), answers=(*stream.answers, *answers))
        return state._replace(streams=put(state.streams, place, stream))

    def is_read(self, stream: Stream) -> bool:
        """Whether the scheduler reads the answers."""
        return stream.is_current

    def hear_worker(self, state: State, place: int) -> State:
        """The scheduler appends each sampled token to its sequence, and sends it to those who read it."""
        stream = state.streams[place]
        state = state._replace(streams=put(state.streams, place, stream._replace(answers=())))
        for sampled in stream.answers:
            if sampled is None:
                return end_epoch(state)
            requests = tuple(self.append(*each) for each in zip(state.requests, sampled, strict=True))
            state = state._replace(requests=requests)
        return state

    def append(self, request: Request, sampled: tuple[int, int] | None) -> Request:
        entry, down = request.entry, request.down
        if sampled is None or entry is None or not entry.is_known or entry.sequence_id != sampled[0]:
            return request
        ids, has_ended = (*entry.ids, sampled[1]), len(entry.ids) + 1 == self.num_tokens
        for g, handle in enumerate(entry.readers):
            down = down if handle is None else send(down, g, "tokens", handle, sampled[1:], has_ended)
        readers = (None, None) if has_ended else entry.readers
        entry = Entry(ids, has_ended, readers, entry.sequence_id, entry.num_in_flight - 1, is_known=not has_ended)
        return request._replace(entry=entry, down=down)

    # What may happen and need not.

    def choices(self, state: State) -> Iterator[tuple[Action, State]]:
        """Yields cancels, and faults: deaths, broken connections, limits of time."""
        spent = state._replace(num_cancels=state.num_cancels - 1)
        for r, request in enumerate(state.requests):
            if state.num_cancels and request.client.phase in (CALLED, ACCEPTED):
                yield from ((("cancel", (r, g)), change(spent, r, self.cancel(request, g))) for g in GATEWAYS)
        if not state.num_faults:
            return
        state = state._replace(num_faults=state.num_faults - 1)
        for r, request in enumerate(state.requests):
            yield from ((action, change(state, r, after)) for action, after in self.request_faults(r, request))
        for g in GATEWAYS:
            yield ("gateway_dies", (g,)), lose_gateway(state, g)
            if state.is_attached[g]:
                yield ("attachment_breaks", (g,)), detach(state, g)
        if has_epoch(state):
            yield ("give_epoch_up", ()), end_epoch(state)
        yield ("worker_dies", ()), lose_worker(state)
        yield ("scheduler_dies", ()), lose_scheduler(lose_steps(state))
        yield ("scheduler_hands_over", ()), lose_scheduler(state)

    def request_faults(self, r: int, request: Request) -> Iterator[tuple[Action, Request]]:
        client, entry = request.client, request.entry
        if client.gateway is not None:
            yield ("call_breaks", (r,)), request._replace(client=client._replace(gateway=None))
        for g in GATEWAYS:
            record = request.records[g]
            if isinstance(record, Record) and client.gateway != g:
                forgotten = request._replace(records=put(request.records, g, None))
                yield ("gateway_forgets", (r, g)), forgotten if record.has_ended else drop_record(request, g)
        if entry is not None and not has_reader(entry.readers):
            yield ("scheduler_forgets", (r,)), request._replace(entry=None)

    # The promises.

    def check(self, before: State, action: Action, after: State) -> None:
        """Raises Broken if an action has broken a promise."""
        name, args = action
        if name == "hear_worker" and not (has_epoch(before) and args == (before.streams[-1].epoch,)):
            raise Broken("an answer of another epoch was used")
        if sum(stream.is_running for stream in after.streams) > 1:
            raise Broken("two epochs run")
        for former, request in zip(before.requests, after.requests, strict=True):
            if request is not former:
                self.check_request(request)
            if name == "hear_gateway" and former.client.is_told and not former.entry:
                was_sent_before = any(message[0] == "add" and message[4] for message in former.up[args[0]])
                if was_sent_before and request.entry and not request.entry.has_ended:
                    raise Broken("a cancelled request runs again")

    def check_request(self, request: Request) -> None:
        whole, client = tuple(range(self.num_tokens)), request.client
        for each in (client, request.entry, *request.records):
            if isinstance(each, Client | Entry | Record) and each.ids != whole[: len(each.ids)]:
                raise Broken("a position has the wrong token")
        if client.phase == DONE and client.ids != whole:
            raise Broken("an answer ended before its last token")

    def has_ended(self, state: State) -> bool:
        """Whether every client has its answer, or has cancelled."""
        return all(request.client.phase in (DONE, LEFT) for request in state.requests)


if __name__ == "__main__":
    from tests.kit.simulation.search import main

    main()
