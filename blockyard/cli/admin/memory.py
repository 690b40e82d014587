"""`blockyard admin sleep`, `wake` and `update`: a replica's memory and weights."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.admin.link import DEFAULT_ADMIN_ADDRESS, AdminAddress, AsJson, Replica, admin_api, as_json
from blockyard.cli.connection import with_connection
from blockyard.cli.units import size
from blockyard.common.v1 import administration_pb2

# The operation may wait for requests to finish, or load weights.
OPERATION_SECONDS = 3600.0


class Mode(StrEnum):
    """What to do with the requests of a replica that stops serving."""

    KEEP = "keep"
    WAIT = "wait"
    ABORT = "abort"


class Tag(StrEnum):
    """Memory of a worker that can be freed."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


LeaveMode = Annotated[
    Mode,
    typer.Option(
        help="its requests go on elsewhere or afterwards (keep), are finished first (wait), or fail (abort)",
    ),
]


def encode_mode(mode: Mode) -> admin_pb2.LeaveMode.ValueType:
    return admin_pb2.LeaveMode.Value(f"LEAVE_MODE_{mode.upper()}")


@with_connection
def sleep(
    replica: Replica = "",
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    level: Annotated[
        int, typer.Option(min=1, max=2, help="1: keep the weights in the host's memory; 2: keep nothing")
    ] = 1,
    mode: LeaveMode = Mode.KEEP,
    json: AsJson = False,
) -> None:
    """Free a replica's memory, until `wake`."""
    request = admin_pb2.SleepReplicaRequest(replica=replica, level=level, mode=encode_mode(mode))
    with admin_api(address) as api:
        answer = api.ask(api.stub.SleepReplica, request, OPERATION_SECONDS)
    if json:
        typer.echo(as_json(answer))
        return
    freed, used = size(answer.freed_bytes), size(answer.used_bytes)
    typer.echo(f"replica {answer.replica.replica_id} is asleep: it gave up {freed}, and holds {used} still")


@with_connection
def wake(
    replica: Replica = "",
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    tag: Annotated[list[Tag] | None, typer.Option(help="what to take; default: all that is asleep")] = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="load weights anew that were given up, or that a broken update left")
    ] = False,
    json: AsJson = False,
) -> None:
    """Allocate a replica's memory again, and let it take requests."""
    tags = [administration_pb2.MemoryTag.Value(f"MEMORY_TAG_{each.upper()}") for each in tag or ()]
    request = admin_pb2.WakeReplicaRequest(replica=replica, tags=tags, reload=reload)
    with admin_api(address) as api:
        answer = api.ask(api.stub.WakeReplica, request, OPERATION_SECONDS)
    if json:
        typer.echo(as_json(answer))
        return
    name = f"replica {answer.replica.replica_id}"
    names = [administration_pb2.MemoryTag.Name(each).removeprefix("MEMORY_TAG_").lower() for each in answer.asleep_tags]
    if names:
        typer.echo(f"{name} is asleep still: {', '.join(names)}")
    elif answer.weights_are_stale:
        typer.echo(f"{name} is awake, and takes no requests until its weights are loaded anew: wake --reload")
    else:
        typer.echo(f"{name} is awake")


@with_connection
def update(
    version: Annotated[str, typer.Argument(help="the name that the weights get")],
    model: Annotated[
        str,
        typer.Argument(help="a folder on the workers' machines, or a hub id; default: the model's own, read once more"),
    ] = "",
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    replica: Annotated[list[str] | None, typer.Option(help="a replica as `status` names it; default: all")] = None,
    revision: Annotated[str, typer.Option(help="for a hub id: a branch, tag or commit")] = "",
    together: Annotated[bool, typer.Option("--together", help="all replicas at once, not one after another")] = False,
    mode: LeaveMode = Mode.KEEP,
    json: AsJson = False,
) -> None:
    """Update the weights of replicas, one after another; the tensors' sizes must stay the same."""
    request = admin_pb2.UpdateWeightsRequest(
        replicas=replica or (),
        version=version,
        model=model,
        revision=revision,
        together=together,
        mode=encode_mode(mode),
    )
    with admin_api(address) as api:
        for event in api.ask(api.stub.UpdateWeights, request, OPERATION_SECONDS):
            told = f"replica {event.replica_id} computes with {version or 'other weights'}"
            typer.echo(as_json(event) if json else told)
