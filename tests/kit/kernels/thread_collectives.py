"""Collectives between threads of one process, for tests: N ranks as N threads."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

import torch

from blockyard.errors import BlockyardError, Reason
from worker_service.collectives.gathering import GatheringCollectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class ThreadMeeting:
    """The shared state of a group's threads: a place for each thread's rows, and a queue for each ordered pair."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)
        self.queues: dict[tuple[int, int], queue.SimpleQueue[Tensor | None]] = {
            (source, destination): queue.SimpleQueue() for source in range(size) for destination in range(size)
        }
        self.problem = ""

    def make_collectives(self) -> Sequence[ThreadCollectives]:
        return [ThreadCollectives(self, rank) for rank in range(self.size)]

    def abort(self, reason: str) -> None:
        """Frees all waiting threads."""
        self.problem = self.problem or reason
        self.barrier.abort()
        for each in self.queues.values():
            each.put(None)


class ThreadCollectives(GatheringCollectives):
    """One rank of a meeting."""

    def __init__(self, meeting: ThreadMeeting, rank: int) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    @property
    def is_broken(self) -> bool:
        return bool(self._meeting.problem)

    def abort(self, reason: str) -> None:
        self._meeting.abort(reason)

    def _all_gather(self, rows: Tensor) -> Tensor:
        self._meeting.rows[self.rank] = rows
        self._meet()
        gathered = torch.stack(self._meeting.rows)
        # No rank may write to its rows while another rank reads them.
        self._meet()
        return gathered

    def _broadcast(self, rows: Tensor, root: int) -> None:
        rows.copy_(self._all_gather(rows)[root])

    def send(self, rows: Tensor, rank: int) -> None:
        self._require_whole()
        self._meeting.queues[self.rank, rank].put(rows.clone())

    def receive(self, rows: Tensor, rank: int) -> None:
        self._require_whole()
        received = self._meeting.queues[rank, self.rank].get()
        if received is None:
            self._require_whole()
        else:
            rows.copy_(received)

    def _meet(self) -> None:
        try:
            self._meeting.barrier.wait()
        except threading.BrokenBarrierError:
            self._require_whole()

    def _require_whole(self) -> None:
        if self._meeting.problem:
            raise BlockyardError(Reason.GROUP_BROKEN, self._meeting.problem, metadata={"rank": str(self.rank)})
