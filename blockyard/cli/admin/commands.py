"""The commands of `blockyard admin`; most make one call of the admin API."""

from __future__ import annotations

import gzip
import time
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.admin import memory, misses, saving, tables
from blockyard.cli.admin.link import (
    DEFAULT_ADMIN_ADDRESS,
    AdminAddress,
    AsJson,
    Replica,
    admin_api,
    as_json,
    read_model,
)
from blockyard.cli.connection import with_connection
from blockyard.cli.help import App
from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

app = App(help="Operate a running system: over a gateway's admin port.")
app.set_options(read_model)

for command in (memory.sleep, memory.wake, memory.update, saving.save, misses.misses):
    app.command()(command)

GATEWAY = "gateway"
POLL_SECONDS = 0.1
# Time between the two readings that rates are computed from.
RATE_SECONDS = 0.5
# Time for a worker to set a profile up, or to write its file.
PROFILE_SECONDS = 150.0

Target = Annotated[str, typer.Argument(help=f"`{GATEWAY}` (the one that is asked), or a replica as `status` names it")]


class Level(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Detail(StrEnum):
    """The detail that a profile records."""

    AUTO = "auto"
    STEPS = "steps"
    OPERATIONS = "operations"


_DETAILS = {
    Detail.AUTO: administration_pb2.PROFILE_DETAIL_UNSPECIFIED,
    Detail.STEPS: administration_pb2.PROFILE_DETAIL_STEPS,
    Detail.OPERATIONS: administration_pb2.PROFILE_DETAIL_OPERATIONS,
}


def _get_status(address: str) -> admin_pb2.GetStatusResponse:
    with admin_api(address) as api:
        return api.ask(api.stub.GetStatus, admin_pb2.GetStatusRequest())


@app.command()
@with_connection
def status(address: AdminAddress = DEFAULT_ADMIN_ADDRESS, json: AsJson = False) -> None:
    """List the gateway, the scheduler, replicas and workers."""
    reading = _get_status(address)
    if json:
        typer.echo(as_json(reading))
        return
    before = reading
    if reading.HasField("scheduler"):
        time.sleep(RATE_SECONDS)
        reading = _get_status(address)
    console = tables.make_console()
    parts = [tables.gateway_table(reading.gateway)]
    if reading.HasField("scheduler"):
        parts += [tables.scheduler_table(reading.scheduler), tables.replicas_table(reading, before)]
        parts += [tables.workers_table(reading.scheduler)]
    for part in parts:
        console.print(part)
        console.print()
    for message in tables.messages(reading):
        console.print(message, style="yellow", markup=False, highlight=False)


@app.command()
@with_connection
def drain(
    target: Target,
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    wait: Annotated[bool, typer.Option(help="wait until it has nothing left")] = True,
    timeout: Annotated[float, typer.Option(min=0, help="seconds to wait at most; then it goes on draining")] = 600.0,
    json: AsJson = False,
) -> None:
    """Drain a replica or the gateway: it takes no more requests.

    A replica's requests go on at other replicas; a single replica finishes them. A drained gateway reports that it is
    not ready. Both stay drained until `undrain`.
    """
    with admin_api(address) as api:
        if target == GATEWAY:
            answer: Any = api.ask(api.stub.DrainGateway, admin_pb2.DrainGatewayRequest())
            is_done, result = _gateway_is_idle, "the gateway is drained"
        else:
            answer = api.ask(api.stub.DrainReplica, admin_pb2.DrainReplicaRequest(replica=target))
            is_done, result = _is_drained(answer.replica.replica_id), f"replica {answer.replica.replica_id} is drained"
    if not json:
        typer.echo(_what_it_does(answer), err=True)
    if wait:
        _wait_until(address, is_done, timeout)
    if json:
        typer.echo(as_json(answer))
    elif wait:
        typer.echo(result)


def _what_it_does(answer: admin_pb2.DrainGatewayResponse | admin_pb2.DrainReplicaResponse) -> str:
    if isinstance(answer, admin_pb2.DrainGatewayResponse):
        return f"draining: {answer.gateway.num_readers} answers are read here"
    if answer.hands_over:
        return "draining: what it has goes on at other replicas"
    return "draining: no other replica takes requests, so it finishes what it has, and new ones wait"


def _gateway_is_idle(reading: admin_pb2.GetStatusResponse) -> bool:
    return reading.gateway.num_readers == 0


def _is_drained(replica_id: int) -> Callable[[admin_pb2.GetStatusResponse], bool]:
    def is_drained(reading: admin_pb2.GetStatusResponse) -> bool:
        # A replica that is no longer listed is gone, which counts as drained.
        states = [each.drain_state for each in reading.scheduler.replicas if each.replica_id == replica_id]
        if status_pb2.DRAIN_STATE_UNSPECIFIED in states:
            problem = f"replica {replica_id} was taken back meanwhile, or the scheduler was restarted"
            raise BlockyardError(Reason.WRONG_STATE, problem)
        return reading.HasField("scheduler") and all(state == status_pb2.DRAIN_STATE_DRAINED for state in states)

    return is_drained


def _wait_until(address: str, is_done: Callable[[admin_pb2.GetStatusResponse], bool], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not is_done(_get_status(address)):
        if time.monotonic() >= deadline:
            raise BlockyardError(Reason.WRONG_STATE, f"not drained after {timeout:g} s; it goes on draining")
        time.sleep(POLL_SECONDS)


@app.command()
@with_connection
def undrain(target: Target, address: AdminAddress = DEFAULT_ADMIN_ADDRESS, json: AsJson = False) -> None:
    """Let a drained replica or the gateway take requests again."""
    with admin_api(address) as api:
        if target == GATEWAY:
            answer: Any = api.ask(api.stub.UndrainGateway, admin_pb2.UndrainGatewayRequest())
            result = "the gateway is drained no more"
        else:
            answer = api.ask(api.stub.UndrainReplica, admin_pb2.UndrainReplicaRequest(replica=target))
            result = f"replica {answer.replica.replica_id} is drained no more"
    typer.echo(as_json(answer) if json else result)


@app.command("reset-cache")
@with_connection
def reset_cache(
    replica: Annotated[str, typer.Argument(help="a replica as `status` names it; default: all")] = "",
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    json: AsJson = False,
) -> None:
    """Empty the prefix caches; blocks in use are kept, and counted."""
    with admin_api(address) as api:
        answer = api.ask(api.stub.ResetPrefixCache, admin_pb2.ResetPrefixCacheRequest(replica=replica))
    if json:
        typer.echo(as_json(answer))
        return
    console = tables.make_console()
    console.print(tables.resets_table(answer.replicas))
    if any(reset.num_kept_device_blocks + reset.num_kept_host_blocks for reset in answer.replicas):
        console.print("Blocks that are kept are in use: reset again later, or drain the replica first.")


@app.command("log-level")
@with_connection
def log_level(
    level: Annotated[Level, typer.Argument(help="the least important events to write")],
    process: Annotated[
        str, typer.Argument(help=f"`{GATEWAY}`, `scheduler`, or a replica (its worker); default: all of them")
    ] = "",
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    json: AsJson = False,
) -> None:
    """Change the log level of processes, until they end."""
    wanted = administration_pb2.LogLevel.Value(f"LOG_LEVEL_{level.upper()}")
    with admin_api(address) as api:
        request = admin_pb2.SetLogLevelRequest(level=wanted, process=process)
        answer = api.ask(api.stub.SetLogLevel, request)
    if json:
        typer.echo(as_json(answer))
    else:
        tables.make_console().print(tables.levels_table(answer.processes, level))
    if any(each.message for each in answer.processes):
        raise typer.Exit(1)


@app.command()
@with_connection
def profile(
    replica: Replica = "",
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    seconds: Annotated[float, typer.Option(min=0, help="how long to record; Ctrl-C ends it sooner")] = 5.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the file; one that ends in .json is not compressed")
    ] = None,
    detail: Annotated[Detail, typer.Option(help="phases of steps, or operations and kernels too")] = Detail.AUTO,
    max_steps: Annotated[int, typer.Option(min=0, help="steps to record at most; 0: as many as allowed")] = 0,
    fetch: Annotated[bool, typer.Option("--fetch", help="begin none: end the one that runs, and fetch it")] = False,
    json: AsJson = False,
) -> None:
    """Record a profile of a worker's steps, as a file for Perfetto (ui.perfetto.dev)."""
    path = output or Path(f"blockyard-profile-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json.gz")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}", param_hint="--output")
    with admin_api(address) as api:
        if not fetch:
            options = administration_pb2.ProfileOptions(detail=_DETAILS[detail], max_steps=max_steps)
            request = admin_pb2.StartProfileRequest(replica=replica, options=options)
            api.ask(api.stub.StartProfile, request, PROFILE_SECONDS)
            with suppress(KeyboardInterrupt):
                time.sleep(seconds)
        pieces = iter(api.ask(api.stub.StopProfile, admin_pb2.StopProfileRequest(replica=replica), PROFILE_SECONDS))
        summary = next(pieces).summary
        _write_profile(path, (piece.data for piece in pieces))
    if json:
        typer.echo(as_json(summary))
    else:
        typer.echo(f"{path}: {summary.num_steps:,} steps of {summary.worker}")


def _write_profile(path: Path, pieces: Iterator[bytes]) -> None:
    data = b"".join(pieces)
    path.write_bytes(gzip.decompress(data) if path.suffix == ".json" else data)


@app.command()
@with_connection
def dump(
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    max_requests: Annotated[int, typer.Option(min=1, help="requests to list at most")] = 1000,
) -> None:
    """Write the scheduler's state as JSON: requests, sequences, blocks; no text and no token ids."""
    with admin_api(address) as api:
        answer = api.ask(api.stub.DumpState, admin_pb2.DumpStateRequest(max_requests=max_requests))
    typer.echo(as_json(answer.state))
