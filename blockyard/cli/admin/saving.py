"""`blockyard admin save`: has a replica write its weights into a new folder."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.progress import Progress, TaskID

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.admin.link import DEFAULT_ADMIN_ADDRESS, AdminAddress, AsJson, Replica, admin_api, as_json
from blockyard.cli.admin.memory import OPERATION_SECONDS, LeaveMode, Mode, encode_mode
from blockyard.cli.connection import with_connection
from blockyard.cli.units import size
from blockyard.common.v1 import administration_pb2


class Format(StrEnum):
    SHARDED = "sharded"
    PACKED = "packed"


@with_connection
def save(
    folder: Annotated[str, typer.Argument(help="a new folder below the workers' --worker-save-root")],
    replica: Replica = "",
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    save_format: Annotated[
        Format,
        typer.Option("--format", help="sharded: safetensors of each rank's parts; packed: as they lie in memory"),
    ] = Format.SHARDED,
    max_file_bytes: Annotated[int, typer.Option(min=0, help="bytes of a sharded file at most; 0: 5 GB")] = 0,
    mode: LeaveMode = Mode.KEEP,
    json: AsJson = False,
) -> None:
    """Have a replica save its weights, to be loaded by --load-format."""
    request = admin_pb2.SaveStateRequest(
        replica=replica,
        format=administration_pb2.StateFormat.Value(f"STATE_FORMAT_{save_format.upper()}"),
        folder=folder,
        max_file_bytes=max_file_bytes,
        mode=encode_mode(mode),
    )
    last = admin_pb2.SaveStateResponse()
    with admin_api(address) as api, Progress(transient=True, disable=json) as bar:
        tasks: dict[int, TaskID] = {}
        for last in api.ask(api.stub.SaveState, request, OPERATION_SECONDS):
            if last.HasField("progress"):
                rank = last.progress.rank
                if rank not in tasks:
                    tasks[rank] = bar.add_task(f"rank {rank}")
                bar.update(tasks[rank], completed=last.progress.done_bytes, total=last.progress.total_bytes)
    if json:
        typer.echo(as_json(last))
        return
    for worker in last.workers:
        typer.echo(f"{worker.folder}: {size(worker.num_bytes)} in {', '.join(worker.files)}")
