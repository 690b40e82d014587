"""Groups of GPUs, by NCCL. An operation is queued on the device's stream and waits nowhere on the host.

An operation that was aborted returns without raising and leaves part of its data: after each wait for the device,
`is_broken` is read before a result is believed.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C import _distributed_c10d as c10d

from worker_service.collectives.group import connect_group
from worker_service.collectives.process_group import MAX_SECONDS, ProcessGroupCollectives

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from blockyard.contract.parallel import Parallel
    from worker_service.collectives.group import GroupLifetime, RankGroup

# Asks Linux for the IPv4 address of an interface.
SIOCGIFADDR = 0x8915
ENVIRONMENT = {
    # The default takes the process down where an operation fails; the epoch ends instead.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # A thread that would kill the process during a long abort.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
}


def abort_nccl(groups: list[Any]) -> None:
    """Ends the operations of process groups, from any thread; whoever waits for one is free, with part of its data."""
    for group in groups:
        # One that is already broken has nothing left to end.
        with suppress(RuntimeError):
            group.abort()


def make_process_group(store: c10d.Store, rank: int, size: int) -> Any:
    """Makes NCCL's process group, which builds of torch without CUDA lack."""
    options = c10d.ProcessGroupNCCL.Options()
    # The deadline of the step rules, and what misses it is aborted.
    options._timeout = timedelta(seconds=MAX_SECONDS)
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def join_nccl(
    store: c10d.Store,
    parallel: Parallel,
    lifetime: GroupLifetime,
    device: torch.device,
    make: Callable[[c10d.Store, int, int], Any] = make_process_group,
) -> RankGroup:
    """Connects this rank's GPU to every other one's; raises RuntimeError where that fails.

    NCCL connects at the first operation of each kind, which may fail where memory is short: the caller begins with one
    of each.

    Args:
        store: where the ranks meet.
        parallel: who this is.
        lifetime: what the group is to belong to; made with `abort_nccl`.
        device: this rank's GPU.
        make: makes a process group.
    """

    def connect(prefix: str, rank: int, size: int) -> ProcessGroupCollectives:
        return ProcessGroupCollectives(lifetime, make(c10d.PrefixStore(prefix, store), rank, size), device)

    return connect_group(connect, parallel, lifetime)


def set_environment(host: str) -> None:
    """Sets what torch and NCCL read when the first group is made; what is set already stays."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if interface := find_interface(host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def find_interface(host: str) -> str:
    """Finds the network interface that has an IPv4 address; empty where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # This interface has no address of this kind.
            with suppress(OSError):
                told = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(told[20:24]) == host:
                    return name
    return ""
