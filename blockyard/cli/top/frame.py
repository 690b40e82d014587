"""Lays out one frame of `blockyard top`: status and rates since the last frame, 80 columns wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.top.readings import (
    find_rates,
    find_replica_rates,
    message_source,
    model_state,
    replica_state,
    seconds,
    used_share,
    worker_state,
)
from blockyard.cli.units import bar, milliseconds, rate, span

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from blockyard.cli.top.readings import Rates
    from blockyard.common.v1 import status_pb2

UNKNOWN = "–"
STYLES = {
    **dict.fromkeys(("ready", "loaded"), "green"),
    **dict.fromkeys(("draining", "drained", "loading"), "yellow"),
    **dict.fromkeys(("not ready", "left aside", "cannot be loaded"), "red"),
    "not loaded": "dim",
}
_BAR_WIDTH = 6
_MAX_RECOVERIES = 5


def make_frame(
    address: str, now: admin_pb2.GetStatusResponse, before: admin_pb2.GetStatusResponse | None
) -> RenderableType:
    """Lays a reading out, with the rates since the previous reading."""
    parts: list[RenderableType] = [_head(address, now.gateway)]
    if len(now.models) > 1:
        parts += [Text(), _models(now)]
    if not now.HasField("scheduler"):
        return Group(*parts)
    parts += [Text(), _facts(now, find_rates(before, now)), Text(), _replicas(now, before)]
    if now.scheduler.recoveries:
        parts += [Text(), Text("recoveries", style="bold")]
        parts += [_recovery(each) for each in now.scheduler.recoveries[:_MAX_RECOVERIES]]
    return Group(*parts)


def gateway_state(gateway: admin_pb2.GatewayStatus) -> str:
    if gateway.draining:
        return "drained"
    return "ready" if gateway.ready else "not ready"


def _head(address: str, gateway: admin_pb2.GatewayStatus) -> RenderableType:
    state = gateway_state(gateway)
    line = Text.assemble(
        (f"blockyard {gateway.version}", "bold"),
        f"  {address}  ",
        (state, STYLES[state]),
        f"  up {span(seconds(gateway.uptime))}",
    )
    return Group(line, Text(gateway.message, style="yellow")) if gateway.message else line


def _models(now: admin_pb2.GetStatusResponse) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("model", "state"):
        table.add_column(name)
    for name in ("requests", "waiting"):
        table.add_column(name, justify="right")
    for model in now.models:
        state = model_state(model)
        counts = f"{model.num_requests:,}", f"{model.num_waiting_requests:,}"
        table.add_row(model.name, Text(state, style=STYLES[state]), *counts)
    troubled = [
        model
        for model in now.models
        if model.message and (model.num_waiting_requests or model.state == admin_pb2.MODEL_STATE_FAILED)
    ]
    return Group(table, *(Text(f"{model.name}: {model.message}", style="yellow") for model in troubled))


def _known(value: float | None, write: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else write(value)


def _facts(now: admin_pb2.GetStatusResponse, rates: Rates) -> Table:
    scheduler, gateway = now.scheduler, now.gateway
    table = Table.grid(padding=(0, 2))
    cached = _known(rates.cached_share, lambda share: f", {share:.0%} of them cached").replace(UNKNOWN, "")
    rows = {
        "requests": f"{scheduler.num_requests:,} live, {scheduler.num_waiting_requests:,} waiting"
        f" ({scheduler.num_waiting_tokens:,} tokens), {gateway.num_readers:,} read here",
        "tokens": f"{_known(rates.completion_tokens, rate)} out a second,"
        f" {_known(rates.prompt_tokens, rate)} in{cached}",
        **({"drafts": _drafts(rates)} if rates.right_share is not None else {}),
        "latency": f"first token {_known(rates.time_to_first_token, milliseconds)},"
        f" between tokens {_known(rates.inter_token_latency, milliseconds)},"
        f" request {_known(rates.request_latency, milliseconds)}",
        "since start": f"{scheduler.num_completion_tokens:,} tokens out, {scheduler.num_preemptions:,} preemptions,"
        f" {scheduler.num_recoveries:,} recoveries",
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), value)
    return table


def _drafts(rates: Rates) -> str:
    right = _known(rates.right_share, "{:.0%}".format)
    tokens = _known(rates.tokens_per_step, "{:.1f}".format)
    return f"{_known(rates.draft_tokens, rate)} a second, {right} right; {tokens} tokens of a sequence in a step"


def _replicas(now: admin_pb2.GetStatusResponse, before: admin_pb2.GetStatusResponse | None) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("replica")
    table.add_column("state")
    for name in ("run", "wait", "swap", "tok/s", "steps/s", "busy"):
        table.add_column(name, justify="right")
    table.add_column("device blocks")
    table.add_column("host blocks")
    for replica in now.scheduler.replicas:
        rates, state = find_replica_rates(before, now, replica.replica_id), replica_state(replica)
        table.add_row(
            str(replica.replica_id),
            Text(state, style=STYLES[state]),
            f"{replica.num_running_sequences:,}",
            f"{replica.num_waiting_sequences:,}",
            f"{replica.num_swapped_sequences:,}",
            _known(rates.tokens, rate),
            _known(rates.steps, rate),
            _known(rates.busy_share, "{:.0%}".format),
            _pool(replica.device_blocks),
            _pool(replica.host_blocks),
        )
    troubles = [_trouble(replica, worker) for replica in now.scheduler.replicas for worker in replica.workers]
    return Group(table, *(trouble for trouble in troubles if trouble))


def _pool(pool: status_pb2.BlockPoolStatus) -> str:
    share = used_share(pool)
    return f"{bar(share, _BAR_WIDTH)} {share:>4.0%}" if pool.num_blocks else UNKNOWN


def _trouble(replica: status_pb2.ReplicaStatus, worker: status_pb2.WorkerStatus) -> Text | None:
    if not worker.message or replica.drain_state:
        return None
    return Text(f"{message_source(replica, worker)}: {worker.message} ({worker_state(worker)})", style="yellow")


def _recovery(recovery: status_pb2.RecoveryStatus) -> Text:
    return Text(
        f"{span(seconds(recovery.age))} ago, replica {recovery.replica_id}: {recovery.cause};"
        f" {recovery.num_requests:,} requests, {recovery.num_replayed_tokens:,} tokens again"
    )
