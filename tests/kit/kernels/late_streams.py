"""Streams of a device that are as late as events allow, and as early: whatever no event orders happens in any order.

They stand for a GPU's. Work is done when the device is told to go on, one piece at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockyard_kernels.cuda.swap import Streams

if TYPE_CHECKING:
    import random
    from collections.abc import Callable


@dataclass(eq=False)
class LateEvent:
    """See `blockyard_kernels.cuda.swap.Event`."""

    stream: LateStream
    is_done: bool = False

    def query(self) -> bool:
        return self.is_done


@dataclass(eq=False)
class LateStream:
    """See `blockyard_kernels.cuda.swap.Stream`."""

    name: str
    queue: deque[Callable[[], None] | LateEvent] = field(default_factory=deque)
    """What it has to do, and events that it waits for or is to tell of."""
    waits: list[str] = field(default_factory=list)
    """The streams that it was made to wait for, in order."""
    deaf_to: str = ""
    """A stream that it does not wait for: then results are wrong."""

    def wait_event(self, event: LateEvent) -> None:
        self.waits.append(event.stream.name)
        if event.stream.name != self.deaf_to:
            self.queue.append(event)

    def record_event(self) -> LateEvent:
        event = LateEvent(self)
        self.queue.append(event)
        return event

    def synchronize(self) -> None:
        while self.queue:
            self.go_on()

    @property
    def is_stuck(self) -> bool:
        """Whether it has nothing to do before another stream has gone on."""
        first = self.queue[0] if self.queue else None
        return first is None or (isinstance(first, LateEvent) and first.stream is not self and not first.is_done)

    def go_on(self) -> None:
        """Does one thing, and before it what it waits for of other streams, and nothing else."""
        first = self.queue[0]
        if isinstance(first, LateEvent):
            while not first.is_done and first.stream is not self:
                first.stream.go_on()
            first.is_done = True
        else:
            first()
        self.queue.popleft()


class LateDevice:
    """The three streams of a device."""

    def __init__(self) -> None:
        self.compute, self.out, self.into = (LateStream(name) for name in ("compute", "out", "into"))
        self.all = (self.compute, self.out, self.into)

    def streams(self) -> Streams:
        return Streams(self.compute, self.out, self.into, lambda stream, work: stream.queue.append(work))

    def go_on(self, chooser: random.Random, most: int) -> None:
        """Does up to so many things; which streams are slow changes from call to call."""
        favourites = chooser.sample(self.all, len(self.all))
        for _ in range(chooser.randint(0, most)):
            able = [stream for stream in favourites if not stream.is_stuck]
            if not able:
                return
            able[0 if chooser.random() < 0.8 else -1].go_on()

    def finish(self) -> None:
        for stream in self.all:
            stream.synchronize()


class EagerCompute(LateStream):
    """Of a host that computes by itself, at once; swaps beside it are done when it waits for them."""

    def wait_event(self, event: LateEvent) -> None:
        super().wait_event(event)
        self.synchronize()

    def record_event(self) -> LateEvent:
        event = super().record_event()
        self.synchronize()
        return event


def lazy_swaps() -> Streams:
    """Streams beside a host that computes: swaps are done when something waits for them, and not before."""
    compute = EagerCompute("compute")

    def enqueue(stream: LateStream, work: Callable[[], None]) -> None:
        stream.queue.append(work)
        if stream is compute:
            compute.synchronize()

    return Streams(compute, LateStream("out"), LateStream("into"), enqueue)
