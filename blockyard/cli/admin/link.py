"""Calls a gateway's admin API for the commands of `blockyard admin`."""

from __future__ import annotations

import json
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import grpc
import typer
from google.protobuf.json_format import MessageToDict

from blockyard.admin.v1 import admin_pb2_grpc
from blockyard.cli.connection import connection
from blockyard.errors import from_rpc_error
from blockyard.headers import MODEL_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from google.protobuf.message import Message

    from blockyard.client.targets import Metadata

DEFAULT_ADMIN_ADDRESS = "127.0.0.1:50052"
# The deadline of calls that set nothing up and move no data.
CALL_SECONDS = 10.0

AdminAddress = Annotated[
    str,
    typer.Option("--admin-address", help="the gateway's admin address, host:port", envvar="BLOCKYARD_ADMIN_ADDRESS"),
]
Replica = Annotated[
    str, typer.Argument(help="a replica's number, or its worker's address, name or incarnation; default: the only one")
]
AsJson = Annotated[bool, typer.Option("--json", help="write JSON, as protobuf maps the answer")]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class AdminApi:
    stub: admin_pb2_grpc.AdminServiceStub
    metadata: Metadata

    def ask(self, call: Callable[..., T], request: Any, seconds: float = CALL_SECONDS) -> T:
        """Calls a method of the stub with the caller's credentials. Raises grpc.RpcError."""
        return call(request, timeout=seconds, metadata=self.metadata)


_model: ContextVar[str] = ContextVar("model", default="")


def read_model(
    model: Annotated[str, typer.Option(help="a model of a gateway with several; default: its first")] = "",
) -> None:
    """Reads the options that stand before the name of a command which operates on a model."""
    _model.set(model)


@contextmanager
def admin_api(address: str, model: str = "") -> Generator[AdminApi]:
    """Opens a channel to the admin API. A call's RPC error is raised as BlockyardError.

    `model`: the model that the calls are for, of a gateway with several; empty: the one before the command's name, or
    the gateway's first.
    """
    model = model or _model.get()
    access = connection().make_access()
    with access.make_channel(address) as channel:
        try:
            metadata = (*access.metadata, *(((MODEL_KEY, model),) if model else ()))
            yield AdminApi(admin_pb2_grpc.AdminServiceStub(channel), metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


def as_json(message: Message) -> str:
    """Formats a message as JSON with all its fields, those with default values included."""
    fields = MessageToDict(message, always_print_fields_with_no_presence=True)
    return json.dumps(cast("object", fields), indent=2)
