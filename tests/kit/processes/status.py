"""How a running system is: through the admin API, as an operator asks, and what the kernel says of a process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from blockyard.common.v1 import status_pb2
    from tests.kit.processes.system import System


def scheduler_status(system: System) -> status_pb2.SchedulerStatus:
    """Asks the gateway's admin port how the scheduler is."""
    with grpc.insecure_channel(f"127.0.0.1:{system.port('admin')}") as channel:
        return admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest(), timeout=10).scheduler


def state_of(pid: int) -> str:
    """One letter, as the kernel has it: T for a process that was stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
