"""Groups over TCP, by gloo: for processors.

gloo's sockets know no passwords, and the builds of torch on PyPI have its TLS left out: who may reach them is up to the
network.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch._C import _distributed_c10d as c10d

from worker_service.collectives.group import connect_group
from worker_service.collectives.process_group import ProcessGroupCollectives

if TYPE_CHECKING:
    from blockyard.contract.parallel import Parallel
    from worker_service.collectives.group import GroupLifetime, RankGroup


def join_gloo(store: c10d.Store, parallel: Parallel, lifetime: GroupLifetime, host: str, seconds: float) -> RankGroup:
    """Connects this rank to every other one; raises RuntimeError where that fails or takes longer than `seconds`.

    Args:
        store: where the ranks meet.
        parallel: who this is.
        lifetime: what the group is to belong to.
        host: the address, or its name, at which the other ranks reach this one; nothing listens at any other.
        seconds: for each of two connections: to all ranks, and to those of this stage.
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
