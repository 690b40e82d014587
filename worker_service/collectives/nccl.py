"""Groups of GPUs, by NCCL. An operation is queued on the device's stream and waits nowhere on the host.

An aborted operation returns without an error and leaves incomplete data. Therefore callers check `is_broken` after each
wait for the device, before they use a result.
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

from worker_service.collectives.group import GroupLifetime, RankGroup, connect_group
from worker_service.collectives.process_group import MAX_SECONDS, ProcessGroupCollectives

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from blockyard.contract.parallel import Parallel

# Asks Linux for the IPv4 address of an interface.
SIOCGIFADDR = 0x8915
ENVIRONMENT = {
    # By default a failed operation ends the process; here only the epoch must end.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # A thread that would kill the process during a long abort.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
}


def abort_nccl(groups: list[Any]) -> None:
    """Ends the operations of process groups, from any thread. Threads that wait return, with incomplete data."""
    for group in groups:
        # A process group that is already broken has no running operation.
        with suppress(RuntimeError):
            group.abort()


def make_process_group(store: c10d.Store, rank: int, size: int) -> Any:
    """Makes a process group of NCCL. torch's builds without CUDA lack it."""
    options = c10d.ProcessGroupNCCL.Options()
    # The step's deadline applies; the lifetime aborts operations that miss it.
    options._timeout = timedelta(seconds=MAX_SECONDS)
    return c10d.ProcessGroupNCCL(store, rank, size, options)


def join_nccl(
    store: c10d.Store,
    parallel: Parallel,
    lifetime: GroupLifetime,
    device: torch.device,
    make: Callable[[c10d.Store, int, int], Any] = make_process_group,
) -> RankGroup:
    """Connects this rank's GPU to the GPUs of all other ranks; raises RuntimeError if that fails.

    NCCL connects at the first operation of each kind, which may fail if memory is short. Therefore the caller first
    runs one operation of each kind.

    Args:
        store: the store through which the ranks meet.
        parallel: this rank's place.
        lifetime: the lifetime that owns the process groups; made with `abort_nccl`.
        device: this rank's GPU.
        make: makes a process group.
    """

    def connect(prefix: str, rank: int, size: int) -> ProcessGroupCollectives:
        return ProcessGroupCollectives(lifetime, make(c10d.PrefixStore(prefix, store), rank, size), device)

    return connect_group(connect, parallel, lifetime)


def set_environment(host: str) -> None:
    """Sets the environment variables that torch and NCCL read for the first group, unless they are set already."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if interface := find_interface(host):
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def find_interface(host: str) -> str:
    """Returns the name of the network interface with an IPv4 address; empty if no interface has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # This interface has no address of this kind.
            with suppress(OSError):
                told = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(told[20:24]) == host:
                    return name
    return ""
