"""Groups over TCP, by gloo: for processors.

gloo's sockets have no authentication, and torch's builds on PyPI lack gloo's TLS: the network must restrict access to
them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch._C import _distributed_c10d as c10d

from worker_service.collectives.group import GroupLifetime, RankGroup, connect_group
from worker_service.collectives.process_group import ProcessGroupCollectives

if TYPE_CHECKING:
    from blockyard.contract.parallel import Parallel


def join_gloo(store: c10d.Store, parallel: Parallel, lifetime: GroupLifetime, host: str, seconds: float) -> RankGroup:
    """Connects this rank to every other one; raises RuntimeError where that fails or takes longer than `seconds`.

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
