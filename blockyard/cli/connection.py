"""How the commands get in at a server: the options before a command's name, the same for all."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated

import typer

from blockyard.async_client import AsyncClient
from blockyard.client import Client
from blockyard.client_access import ClientAccess, ClientTls


@dataclass(frozen=True, slots=True)
class Connection:
    """What the options say."""

    api_key: str = ""
    tls: ClientTls | bool = False

    def client(self, target: str) -> Client:
        """Makes a client."""
        return Client(target, api_key=self.api_key, tls=self.tls)

    def async_client(self, target: str, tenant: str = "") -> AsyncClient:
        """Makes a client for asyncio."""
        return AsyncClient(target, tenant=tenant, api_key=self.api_key, tls=self.tls)

    def access(self) -> ClientAccess:
        """Makes what opens channels, to the admin API for one."""
        return ClientAccess(api_key=self.api_key, tls=self.tls)


_connection: ContextVar[Connection] = ContextVar("connection", default=Connection())  # noqa: B039 - it is frozen


def connection() -> Connection:
    """What the options before the command say."""
    return _connection.get()


def read_options(
    api_key: Annotated[
        str, typer.Option(help="the key to call with", envvar="BLOCKYARD_API_KEY", show_default=False)
    ] = "",
    tls: Annotated[bool, typer.Option("--tls", help="speak TLS", envvar="BLOCKYARD_TLS")] = False,
    tls_authority: Annotated[
        str,
        typer.Option(
            help="PEM file of whose signature the server's certificate has; implies --tls",
            envvar="BLOCKYARD_TLS_AUTHORITY",
        ),
    ] = "",
    tls_server_name: Annotated[
        str,
        typer.Option(
            help="the name in the server's certificate, where it is not the host's; implies --tls",
            envvar="BLOCKYARD_TLS_SERVER_NAME",
        ),
    ] = "",
    client_certificate: Annotated[
        str,
        typer.Option(help="PEM file of a certificate to show; implies --tls", envvar="BLOCKYARD_CLIENT_CERTIFICATE"),
    ] = "",
    client_key: Annotated[
        str, typer.Option(help="PEM file of the certificate's key", envvar="BLOCKYARD_CLIENT_KEY")
    ] = "",
) -> None:
    """Serves large language models over gRPC and HTTP, and talks to them."""
    told = ClientTls(tls_authority, client_certificate, client_key, tls_server_name)
    _connection.set(Connection(api_key, told if told != ClientTls() else tls))
