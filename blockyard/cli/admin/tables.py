"""Tables of `blockyard admin`: the gateway, the scheduler, replicas and workers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from blockyard.cli.top.frame import STYLES, UNKNOWN, gateway_state
from blockyard.cli.top.readings import find_replica_rates, message_source, replica_state, seconds, worker_state
from blockyard.cli.units import rate, size, span
from blockyard.common.v1 import administration_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.admin.v1 import admin_pb2
    from blockyard.common.v1 import status_pb2

_PLAIN_WIDTH = 200


def make_console() -> Console:
    """Returns a console for tables: as wide as the terminal; without one, wide enough that no name breaks."""
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)


def make_table(*headings: str, numbers: Iterable[str] = ()) -> Table:
    """Creates a table without lines; the columns named in `numbers` are right-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    right = set(numbers)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table


def gateway_table(gateway: admin_pb2.GatewayStatus) -> Table:
    table = make_table("gateway", "state", "requests", "readers", "up", "version", numbers=("requests", "readers"))
    table.add_row(
        gateway.gateway_id,
        _state(gateway_state(gateway)),
        f"{gateway.num_requests:,}",
        f"{gateway.num_readers:,}",
        span(seconds(gateway.uptime)),
        gateway.version,
    )
    return table


def scheduler_table(scheduler: status_pb2.SchedulerStatus) -> Table:
    headings = ("scheduler", "requests", "waiting", "gateways", "preemptions", "recoveries", "up")
    table = make_table(*headings, numbers=headings[1:-1])
    table.add_row(
        scheduler.version,
        f"{scheduler.num_requests:,}",
        f"{scheduler.num_waiting_requests:,}",
        f"{scheduler.num_gateways:,}",
        f"{scheduler.num_preemptions:,}",
        f"{scheduler.num_recoveries:,}",
        span(seconds(scheduler.uptime)),
    )
    return table


def replicas_table(now: admin_pb2.GetStatusResponse, before: admin_pb2.GetStatusResponse | None) -> Table:
    """Shows the replicas, with rates since the previous reading."""
    headings = ("replica", "state", "epoch", "run", "wait", "swap", "tok/s", "steps/s", "device blocks", "host blocks")
    table = make_table(*headings, numbers=headings[2:])
    for replica in now.scheduler.replicas:
        rates = find_replica_rates(before, now, replica.replica_id)
        table.add_row(
            str(replica.replica_id),
            _state(replica_state(replica)),
            str(replica.epoch),
            f"{replica.num_running_sequences:,}",
            f"{replica.num_waiting_sequences:,}",
            f"{replica.num_swapped_sequences:,}",
            UNKNOWN if rates.tokens is None else rate(rates.tokens),
            UNKNOWN if rates.steps is None else rate(rates.steps),
            _used(replica.device_blocks),
            _used(replica.host_blocks),
        )
    return table


def workers_table(scheduler: status_pb2.SchedulerStatus) -> Table:
    table = make_table("replica", "worker", "state", "incarnation", "weights", "blocks", "device")
    for replica in scheduler.replicas:
        for worker in replica.workers:
            table.add_row(
                f"{replica.replica_id}, rank {worker.rank}" if worker.world_size > 1 else str(replica.replica_id),
                worker.address,
                worker_state(worker),
                worker.incarnation,
                size(worker.weights_bytes),
                f"{size(worker.device_cache_bytes)} + {size(worker.host_cache_bytes)}",
                worker.device,
            )
    return table


def messages(status: admin_pb2.GetStatusResponse) -> list[str]:
    """Lists the problems that the gateway and the workers report, one line each."""
    lines = [f"gateway: {status.gateway.message}"] if status.gateway.message else []
    for replica in status.scheduler.replicas:
        lines += [
            f"{message_source(replica, worker)}: {worker.message}" for worker in replica.workers if worker.message
        ]
    return lines


def resets_table(resets: Iterable[admin_pb2.PrefixCacheReset]) -> Table:
    """Shows how many blocks each prefix cache dropped and kept."""
    headings = ("replica", "forgotten", "on the host", "kept", "on the host ")
    table = make_table(*headings, numbers=headings[1:])
    for reset in resets:
        table.add_row(
            str(reset.replica_id),
            f"{reset.num_forgotten_device_blocks:,}",
            f"{reset.num_forgotten_host_blocks:,}",
            f"{reset.num_kept_device_blocks:,}",
            f"{reset.num_kept_host_blocks:,}",
        )
    return table


def levels_table(processes: Iterable[admin_pb2.ProcessLogLevel], level: str) -> Table:
    """Shows the previous and the new log level of each process."""
    table = make_table("process", "was", "is")
    for process in processes:
        before = administration_pb2.LogLevel.Name(process.previous_level).removeprefix("LOG_LEVEL_").lower()
        if process.message:
            table.add_row(process.process, "", Text(process.message, style="red"))
        else:
            table.add_row(process.process, before, level)
    return table


def _state(state: str) -> Text:
    return Text(state, style=STYLES[state])


def _used(pool: status_pb2.BlockPoolStatus) -> str:
    return f"{pool.num_blocks - pool.num_free_blocks:,} of {pool.num_blocks:,}" if pool.num_blocks else UNKNOWN
