"""`blockyard admin inspect` and `call`: what workers hold, and what they do beside their steps."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.admin.link import DEFAULT_ADMIN_ADDRESS, AdminAddress, AsJson, admin_api, as_json
from blockyard.cli.connection import with_connection
from blockyard.local.operator import OPERATIONS, make_operation, make_timeout

if TYPE_CHECKING:
    from blockyard.cli.admin.link import AdminApi

# Beyond the time that workers have.
GRACE_SECONDS = 10.0
INSPECT_SECONDS = 40.0

ReplicaOption = Annotated[
    str,
    typer.Option("--replica", help="as `status` names it; a worker's name: that worker alone; default: the only one"),
]


@with_connection
def inspect(replica: ReplicaOption = "", address: AdminAddress = DEFAULT_ADMIN_ADDRESS, json: AsJson = False) -> None:
    """Describe the network as workers hold it: modules, shapes, layouts, cuts, bytes."""
    with admin_api(address) as api:
        answer = api.ask(api.stub.InspectModel, admin_pb2.InspectModelRequest(replica=replica), INSPECT_SECONDS)
    if json:
        typer.echo(as_json(answer))
        return
    for worker in answer.workers:
        if len(answer.workers) > 1:
            typer.echo(f"rank {worker.rank} ({worker.address})")
        typer.echo(worker.text)


@with_connection
def call(
    operation: Annotated[
        str, typer.Argument(help=f"{', '.join(OPERATIONS).replace('_', '-')}; or an extension's: extension.operation")
    ],
    arguments: Annotated[
        str, typer.Option(help='fields of the operation, as JSON: {"names": ["lm_head.weight"]}')
    ] = "{}",
    payload: Annotated[str, typer.Option(help="text for an extension's operation; @FILE: what the file holds")] = "",
    replica: ReplicaOption = "",
    timeout: Annotated[float, typer.Option(min=0.001, max=120, help="seconds that workers may take")] = 30.0,
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    json: AsJson = False,
) -> None:
    """Have each worker of a replica do something between its steps, and write what it answers."""
    extension, _, name = operation.rpartition(".")
    with admin_api(address) as api:
        if extension:
            _call_extension(api, (extension, name, replica), _read_payload(payload), timeout, json=json)
            return
        asked = _make_operation(operation, arguments)
        request = admin_pb2.CallOperationRequest(replica=replica, operation=asked, timeout=make_timeout(timeout))
        answer = api.ask(api.stub.CallOperation, request, timeout + GRACE_SECONDS)
    typer.echo(as_json(answer))


def _make_operation(name: str, arguments: str) -> Any:
    try:
        return make_operation(name, json_module.loads(arguments))
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None


def _read_payload(payload: str) -> bytes:
    if not payload.startswith("@"):
        return payload.encode()
    try:
        return Path(payload[1:]).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{payload[1:]}: {error.strerror}", param_hint="--payload") from None


def _call_extension(api: AdminApi, names: tuple[str, str, str], payload: bytes, timeout: float, *, json: bool) -> None:
    extension, operation, replica = names
    request = admin_pb2.CallExtensionRequest(
        replica=replica, extension=extension, operation=operation, payload=payload, timeout=make_timeout(timeout)
    )
    answer = api.ask(api.stub.CallExtension, request, timeout + GRACE_SECONDS)
    if json:
        typer.echo(as_json(answer))
        return
    for result in answer.results:
        if len(answer.results) > 1:
            typer.echo(f"rank {result.rank} ({result.address})")
        sys.stdout.flush()
        sys.stdout.buffer.write(result.result + (b"" if result.result.endswith(b"\n") else b"\n"))
