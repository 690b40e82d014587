"""Collectives over a ProcessGroup of torch.distributed, gloo's or NCCL's."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _distributed_c10d as c10d

from worker_service.collectives.gathering import GatheringCollectives
from worker_service.collectives.group import MIN_SECONDS, GroupLifetime, RankGroup, connect_group

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from blockyard.contract.parallel import Parallel


def join_gloo(store: c10d.Store, parallel: Parallel, lifetime: GroupLifetime, host: str, seconds: float) -> RankGroup:
    """Connects this rank to every other one over TCP; raises RuntimeError if that fails or takes over `seconds`.

    gloo's sockets have no authentication, and torch's builds on PyPI lack gloo's TLS: the network must restrict access
    to them.

    Args:
        store: where the ranks meet.
        parallel: this rank's place.
        lifetime: the lifetime that owns the process groups.
        host: the address or host name at which the other ranks reach this one; gloo listens at no other address.
        seconds: the time limit for each of two connections: to all ranks, and to the ranks of this stage.
    """

    def connect(prefix: str, rank: int, size: int) -> ProcessGroupCollectives:
        options = c10d.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
        options._timeout = timedelta(seconds=seconds)
        # One operation runs at a time.
        options._threads = 1
        return ProcessGroupCollectives(
            lifetime,
            c10d.ProcessGroupGloo(c10d.PrefixStore(prefix, store), rank, size, options),
            torch.device("cpu"),
        )

    return connect_group(connect, parallel, lifetime)


# The timeout of a process group's operations without a deadline: an hour.
MAX_SECONDS = 3600.0


class ProcessGroupCollectives(GatheringCollectives):
    """Collectives over one process group. Each operation may take the time that is left for the step."""

    def __init__(self, lifetime: GroupLifetime, group: Any, device: torch.device) -> None:
        """`group`: a ProcessGroup. The lifetime owns it from now on, and the caller must keep no reference to it."""
        super().__init__(group.rank(), group.size())
        self._lifetime = lifetime
        self._device = device
        self._place = lifetime.own(group)

    @property
    def is_broken(self) -> bool:
        return bool(self._lifetime.problem)

    def abort(self, reason: str) -> None:
        self._lifetime.abort(reason)

    def _to_device(self, array: npt.NDArray[np.int32]) -> Tensor:
        return super()._to_device(array).to(self._device)

    def _timeout(self) -> timedelta:
        return timedelta(seconds=min(MAX_SECONDS, max(MIN_SECONDS, self._lifetime.seconds_left)))

    def _all_gather(self, rows: Tensor) -> Tensor:
        gathered = rows.new_empty(self.size, *rows.shape)
        output, mine, options = _bytes(gathered), _bytes(rows.contiguous()), c10d.AllgatherOptions()
        options.timeout = self._timeout()
        self._run(lambda group: group._allgather_base(output, mine, options))
        return gathered

    def _gather(self, rows: Tensor, to: int) -> Tensor | None:
        gathered = rows.new_empty(self.size, *rows.shape) if self.rank == to else None
        outputs = [] if gathered is None else [list(map(_bytes, gathered))]
        mine, options = _bytes(rows.contiguous()), c10d.GatherOptions()
        options.rootRank, options.timeout = to, self._timeout()
        self._run(lambda group: group.gather(outputs, [mine], options))
        return gathered

    def _broadcast(self, rows: Tensor, root: int) -> None:
        told, options = _bytes(rows), c10d.BroadcastOptions()
        options.rootRank, options.timeout = root, self._timeout()
        self._run(lambda group: group.broadcast([told], options))

    def _run(self, begin: Callable[[Any], Any]) -> None:
        self._lifetime.run(self._place, lambda group: begin(group).wait())

    def send(self, rows: Tensor, rank: int) -> None:
        mine, timeout = _bytes(rows.clone(memory_format=torch.contiguous_format)), self._timeout()

        def begin(group: Any) -> None:
            oldest = self._lifetime.queue(group.send([mine], rank, 0), mine)
            if oldest is not None:
                oldest.wait(timeout)

        self._lifetime.run(self._place, begin)

    def receive(self, rows: Tensor, rank: int) -> None:
        """See Collectives. `rows` is contiguous."""
        theirs, timeout, begin = _bytes(rows), self._timeout(), time.perf_counter()
        self._lifetime.run(self._place, lambda group: group.recv([theirs], rank, 0).wait(timeout))
        self._lifetime.waited_seconds += time.perf_counter() - begin


def _bytes(rows: Tensor) -> Tensor:
    """Views contiguous rows as bytes, the only dtype that every transport supports."""
    return rows.view(-1).view(torch.uint8)
