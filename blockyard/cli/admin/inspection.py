"""`blockyard admin inspect` and `call`: describe workers' networks, and call workers' operations."""

from __future__ import annotations

import base64
import json as json_module
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.admin.link import DEFAULT_ADMIN_ADDRESS, AdminAddress, AsJson, admin_api
from blockyard.cli.connection import with_connection
from blockyard.contract.codec.messages import encode_seconds
from blockyard.contract.diagnostics import (
    DEFAULT_SECONDS,
    DIAGNOSTICS,
    MAX_SECONDS,
    OPERATIONS,
    find_operation,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.cli.admin.link import AdminApi

# The call's deadline exceeds the workers' own timeout by this much.
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
        answers = _call(api, (DIAGNOSTICS, "describe_model", replica), b"", INSPECT_SECONDS)
    if json:
        typer.echo(_to_json(answers))
        return
    for answer in answers:
        if len(answers) > 1:
            typer.echo(f"rank {answer.rank} ({answer.address})")
        typer.echo(json_module.loads(answer.result)["text"])


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
    timeout: Annotated[
        float, typer.Option(min=0.001, max=MAX_SECONDS, help="seconds that workers may take")
    ] = DEFAULT_SECONDS,
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    json: AsJson = False,
) -> None:
    """Run an operation on each worker of a replica, between its steps, and write the answers."""
    try:
        extension, name = find_operation(operation)
        json_module.loads(arguments)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    has_json = extension == DIAGNOSTICS
    given = arguments.encode() if has_json else _read_payload(payload)
    with admin_api(address) as api:
        answers = _call(api, (extension, name, replica), given, timeout)
    if has_json or json:
        typer.echo(_to_json(answers))
        return
    for answer in answers:
        if len(answers) > 1:
            typer.echo(f"rank {answer.rank} ({answer.address})")
        sys.stdout.flush()
        sys.stdout.buffer.write(answer.result + (b"" if answer.result.endswith(b"\n") else b"\n"))


def _read_payload(payload: str) -> bytes:
    if not payload.startswith("@"):
        return payload.encode()
    try:
        return Path(payload[1:]).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{payload[1:]}: {error.strerror}", param_hint="--payload") from None


def _call(api: AdminApi, names: tuple[str, str, str], payload: bytes, timeout: float) -> Sequence[Any]:
    """Returns each worker's answer, ordered by rank. `names`: extension, operation, replica."""
    extension, operation, replica = names
    request = admin_pb2.CallExtensionRequest(
        replica=replica, extension=extension, operation=operation, payload=payload, timeout=encode_seconds(timeout)
    )
    return api.ask(api.stub.CallExtension, request, timeout + GRACE_SECONDS).results


def _to_json(answers: Sequence[Any]) -> str:
    """Formats answers as JSON; a result that is not JSON becomes a base64 text, as in protobuf's JSON."""
    return json_module.dumps(
        [{"rank": each.rank, "address": each.address, "result": _read_result(each.result)} for each in answers],
        indent=2,
    )


def _read_result(result: bytes) -> Any:
    try:
        return json_module.loads(result)
    except ValueError:
        return base64.b64encode(result).decode()
