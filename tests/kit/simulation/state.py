"""The state of the protocol that `spec.py` is about: what each process knows, and what is on its way."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Ids = tuple[int, ...]
Message = tuple[Any, ...]  # ("kind", handle, …)
Queues = tuple[tuple[Message, ...], ...]
Step = tuple[Message | None, ...]  # for each request: ("begin", sequence_id, ids), ("go", sequence_id), or nothing
Sampled = tuple[tuple[int, int] | None, ...]  # for each request: the sequence's id and its token, or nothing

GATEWAYS = (0, 1)
WRONG = -1
# A client has not called yet, has called, was accepted, has the whole answer, has cancelled.
NEW, CALLED, ACCEPTED, DONE, LEFT = range(5)


class Client(NamedTuple):
    """`gateway`: of its open call. `cancels_at`: the gateway that passes its cancel on to the scheduler."""

    phase: int = NEW
    ids: Ids = ()
    gateway: int | None = None
    cancels_at: int | None = None
    is_told: bool = False  # the scheduler has answered that the request is cancelled


class Record(NamedTuple):
    """What a gateway has of a request, while it runs and for a while afterwards."""

    ids: Ids = ()
    has_ended: bool = False
    is_accepted: bool = False
    handle: int | None = None  # its name on the stream to the scheduler, if it was sent on it
    num_repeats: int = 0  # tokens that will come again


class Lookup(NamedTuple):
    """A gateway's question for a request that another gateway has."""

    handle: int | None


class Entry(NamedTuple):
    """What the scheduler has of a request, while it runs and for a while afterwards.

    `readers`: the handle by which each gateway reads it. `is_known`: the worker has its tokens, in the epoch that runs.
    """

    ids: Ids
    has_ended: bool
    readers: tuple[int | None, ...]
    sequence_id: int = 0
    num_in_flight: int = 0
    is_known: bool = False


class Request(NamedTuple):
    """All that the processes have of one request, and the messages about it between gateways and scheduler."""

    client: Client = Client()
    records: tuple[Record | Lookup | None, ...] = (None, None)
    up: Queues = ((), ())  # of each gateway
    down: Queues = ((), ())
    entry: Entry | None = None
    is_cancelled: bool = False  # the scheduler remembers that it was cancelled
    row: tuple[int, Ids] | None = None  # the worker's: the sequence's id and tokens


class Stream(NamedTuple):
    """The steps of one epoch, on their way to the worker, and its answers on their way back."""

    epoch: int
    steps: tuple[Step, ...] = ()
    answers: tuple[Sampled | None, ...] = ()  # None: the step was refused
    is_current: bool = True  # the scheduler has not given it up
    is_running: bool = False  # the worker computes it


class State(NamedTuple):
    requests: tuple[Request, ...]
    is_attached: tuple[bool, ...] = (True, True)
    is_reattaching: bool = False  # the scheduler is so new that gateways may still bring requests
    streams: tuple[Stream, ...] = (Stream(1),)  # the current one is the last
    worker_epoch: int = 0  # the highest that the worker has seen
    num_faults: int = 0  # that may still come
    num_cancels: int = 0


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    return (*items[:index], item, *items[index + 1 :])


def send(queues: Queues, g: int, *message: object) -> Queues:
    return put(queues, g, (*queues[g], message))


def compute_token(ids: Ids) -> int:
    """The model: returns the token after these."""
    return len(ids) if ids == tuple(range(len(ids))) else WRONG


def change(state: State, r: int, request: Request) -> State:
    return state._replace(requests=put(state.requests, r, request))


def has_epoch(state: State) -> bool:
    return bool(state.streams) and state.streams[-1].is_current


def has_reader(readers: tuple[int | None, ...]) -> bool:
    return any(handle is not None for handle in readers)


def find_sequence_id(stream: Stream, r: int, request: Request) -> int:
    """Returns an id for a sequence that no step, answer or row has."""
    used = {request.row[0]} if request.row else set[int]()
    used |= {work[1] for step in stream.steps if (work := step[r])}
    used |= {token[0] for sampled in stream.answers if sampled and (token := sampled[r])}
    return min(set(range(4)) - used)


def find_handle(request: Request, g: int) -> int:
    """Returns a handle that no message and no reader has."""
    used = {message[1] for message in request.up[g] + request.down[g]}
    return min(set(range(4)) - used - set(request.entry.readers if request.entry else ()))


def send_up(request: Request, g: int, record: Record | Lookup, kind: str, *values: object) -> Request:
    """A gateway keeps a record, and sends it to the scheduler if it is attached."""
    handle = record.handle
    up = request.up if handle is None else send(request.up, g, kind, handle, *values)
    return request._replace(records=put(request.records, g, record), up=up)


def drop_record(request: Request, g: int) -> Request:
    """A gateway ends a request that runs, and tells the scheduler that it reads it no more."""
    record = request.records[g]
    if not isinstance(record, Record) or record.has_ended:
        return request
    up = send(request.up, g, "abort", record.handle) if record.handle is not None else request.up
    return request._replace(records=put(request.records, g, None), up=up)


def close(state: State, place: int) -> State:
    """A stream closes, and the worker forgets what it had of it."""
    stream = state.streams[place]
    state = state._replace(streams=state.streams[:place] + state.streams[place + 1 :])
    return forget_rows(state) if stream.is_running else state


def forget_rows(state: State) -> State:
    return state._replace(requests=tuple(request._replace(row=None) for request in state.requests))


def end_epoch(state: State) -> State:
    """The scheduler gives its epoch up: requests go on from their tokens. The steps may still reach the worker."""
    requests = list(state.requests)
    for r, request in enumerate(requests):
        if request.entry is not None:
            entry = request.entry._replace(sequence_id=0, num_in_flight=0, is_known=False)
            requests[r] = request._replace(entry=entry)
    state = state._replace(requests=tuple(requests))
    if not has_epoch(state):
        return state
    stream = state.streams[-1]._replace(answers=(), is_current=False)
    state = state._replace(streams=(*state.streams[:-1], stream))
    return state if stream.steps else close(state, len(state.streams) - 1)


def lose_worker(state: State) -> State:
    """The worker dies, and all streams with it. Its successor has seen no epoch."""
    return forget_rows(end_epoch(state)._replace(streams=(), worker_epoch=0))


def lose_scheduler(state: State) -> State:
    """A successor knows nothing, and every stream of a gateway breaks. What is on its way to the worker may arrive."""
    for g in GATEWAYS:
        state = detach(state, g)
    requests = list(state.requests)
    for r, request in enumerate(requests):
        client = request.client._replace(cancels_at=None, is_told=False)
        requests[r] = request._replace(client=client, entry=None, is_cancelled=False)
    return end_epoch(state._replace(requests=tuple(requests), is_reattaching=True))


def lose_steps(state: State) -> State:
    """The connections to the worker break."""
    return forget_rows(end_epoch(state)._replace(streams=()))


def lose_gateway(state: State, g: int) -> State:
    """A gateway dies, and with it what it had and the calls to it."""
    state = detach(state, g)
    requests = list(state.requests)
    for r, request in enumerate(requests):
        client = request.client
        gateway = None if client.gateway == g else client.gateway
        cancels_at = None if client.cancels_at == g else client.cancels_at
        client = client._replace(gateway=gateway, cancels_at=cancels_at)
        requests[r] = request._replace(client=client, records=put(request.records, g, None))
    return state._replace(requests=tuple(requests))


def detach(state: State, g: int) -> State:
    """The stream between a gateway and the scheduler breaks, and what is on its way is lost."""
    requests = list(state.requests)
    for r, request in enumerate(requests):
        record, entry = request.records[g], request.entry
        if record is not None:
            record = record._replace(handle=None)
        if entry is not None:
            entry = entry._replace(readers=put(entry.readers, g, None))
        request = request._replace(up=put(request.up, g, ()), down=put(request.down, g, ()))
        requests[r] = request._replace(records=put(request.records, g, record), entry=entry)
    return state._replace(requests=tuple(requests), is_attached=put(state.is_attached, g, False))
