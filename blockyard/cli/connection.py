"""Connection options of all commands; they may stand before or after the command's name."""

from __future__ import annotations

import copy
import functools
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

import blockyard
from blockyard.cli.parameters import named_parameters, with_parameters
from blockyard.client.access import ClientAccess, ClientTls
from blockyard.client.asynchronous import AsyncClient
from blockyard.client.sync import Client

if TYPE_CHECKING:
    import inspect
    from collections.abc import Callable

# The section of help that shows these options.
PANEL = "Connection"


@dataclass(frozen=True, slots=True)
class Connection:
    """The values of the connection options; `read_options` has their help."""

    api_key: str = ""
    tls: bool = False
    tls_authority: str = ""
    tls_server_name: str = ""
    client_certificate: str = ""
    client_key: str = ""

    def _client_tls(self) -> ClientTls | bool:
        special = ClientTls(self.tls_authority, self.client_certificate, self.client_key, self.tls_server_name)
        return special if special != ClientTls() else self.tls

    def make_client(self, target: str) -> Client:
        """Creates a client. `target`: a gateway's address, or several with commas between."""
        return Client(target, api_key=self.api_key, tls=self._client_tls())

    def make_async_client(self, target: str, tenant: str = "") -> AsyncClient:
        """Creates a client for asyncio. `target`: as for `make_client`."""
        return AsyncClient(target, tenant=tenant, api_key=self.api_key, tls=self._client_tls())

    def make_access(self) -> ClientAccess:
        """Creates the credentials with which channels to the admin API are opened."""
        return ClientAccess(api_key=self.api_key, tls=self._client_tls())


_connection: ContextVar[Connection] = ContextVar("connection", default=Connection())  # noqa: B039 - it is frozen


def connection() -> Connection:
    """Returns the connection options of this run."""
    return _connection.get()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(blockyard.__version__)
        raise typer.Exit


def read_options(
    api_key: Annotated[
        str,
        typer.Option(
            help="the key to call with",
            envvar="BLOCKYARD_API_KEY",
            show_default=False,
            rich_help_panel=PANEL,
        ),
    ] = "",
    tls: Annotated[
        bool, typer.Option("--tls", help="speak TLS", envvar="BLOCKYARD_TLS", rich_help_panel=PANEL)
    ] = False,
    tls_authority: Annotated[
        str,
        typer.Option(
            help="PEM file of whose signature the server's certificate has; implies --tls",
            envvar="BLOCKYARD_TLS_AUTHORITY",
            rich_help_panel=PANEL,
        ),
    ] = "",
    tls_server_name: Annotated[
        str,
        typer.Option(
            help="the name in the server's certificate, where it is not the host's; implies --tls",
            envvar="BLOCKYARD_TLS_SERVER_NAME",
            rich_help_panel=PANEL,
        ),
    ] = "",
    client_certificate: Annotated[
        str,
        typer.Option(
            help="PEM file of a certificate to show; implies --tls",
            envvar="BLOCKYARD_CLIENT_CERTIFICATE",
            rich_help_panel=PANEL,
        ),
    ] = "",
    client_key: Annotated[
        str,
        typer.Option(help="PEM file of the certificate's key", envvar="BLOCKYARD_CLIENT_KEY", rich_help_panel=PANEL),
    ] = "",
    version: Annotated[
        bool, typer.Option("--version", help="print the version and exit", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Serves large language models over gRPC and HTTP, and talks to them."""
    _connection.set(Connection(api_key, tls, tls_authority, tls_server_name, client_certificate, client_key))


def with_connection(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the connection options to a command. An option after the command's name overrides one before it."""
    options = [each for each in named_parameters(read_options) if each.name != "version"]

    @functools.wraps(command)
    def called(**given: Any) -> None:
        behind = {option.name: value for option in options if (value := given.pop(option.name))}
        _connection.set(replace(_connection.get(), **behind))
        command(**given)

    return with_parameters(called, map(_behind_the_name, options))


def _behind_the_name(option: inspect.Parameter) -> inspect.Parameter:
    """Returns the option for use after a command's name. The options before the name have read the environment."""
    kind, shown = get_args(option.annotation)
    shown = copy.copy(shown)
    shown.envvar, shown.show_default = None, False
    return option.replace(annotation=Annotated[kind, shown])
