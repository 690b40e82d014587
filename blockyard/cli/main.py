"""The program `blockyard`: assembles its commands and prints their errors."""

from __future__ import annotations

import sys

import typer

import blockyard
from blockyard.cli import (
    bench,
    chat,
    connection,
    generate,
    keys,
    launch,
    lora,
    models,
    numbers,
    plan,
    run,
    serve,
    systems,
)
from blockyard.cli.admin import commands as admin
from blockyard.cli.admin import inspection
from blockyard.cli.doctor import command as doctor
from blockyard.cli.help import App
from blockyard.cli.top import command as top
from blockyard.errors import TRANSPORT_ORIGIN, BlockyardError
from blockyard.local.registry import RegistryError
from blockyard.local.supervisor import StartError
from blockyard.security.keys import KeyFileError
from blockyard.security.tls import CertificateError
from blockyard.service import grpc_environment
from blockyard.service.servers import PortTaken
from blockyard.settings import SettingsError

# The sections of the help, in its order.
HERE, MODELS, CALLS, OPERATIONS = ("Systems on this machine", "Models", "Calls of a running system", "Operation")


EXPECTED = (BlockyardError, CertificateError, KeyFileError, PortTaken, RegistryError, SettingsError, StartError)


def version() -> None:
    """Print the version."""
    typer.echo(blockyard.__version__)


def make_app() -> App:
    """Assembles all commands."""
    app = App(help="Serves large language models over gRPC and HTTP, and talks to them.")
    app.set_options(connection.read_options)
    for command in (run.run, serve.serve, systems.up, systems.down, systems.logs, systems.ps, systems.stop):
        app.add(command, section=HERE)
    app.add(connection.with_connection(launch.launch), section=HERE)
    for command in (models.pull, models.ls, models.show, models.rm):
        app.add(command, section=MODELS)
    for command in (plan.plan, doctor.make_command()):
        app.add(command, section=MODELS)
    for command in (chat.chat, generate.generate, numbers.embed, numbers.score, numbers.classify, bench.bench):
        app.add(connection.with_connection(command), section=CALLS)
    for command in (inspection.inspect, inspection.call):
        admin.app.add(command)
    app.add(connection.with_connection(top.top), section=OPERATIONS)
    app.add_typer(admin.app, name="admin", rich_help_panel=OPERATIONS)
    app.add_typer(keys.app, name="keys", rich_help_panel=OPERATIONS)
    app.add_typer(lora.app, name="lora", rich_help_panel=OPERATIONS)
    app.add(version, section=OPERATIONS)
    return app


app = make_app()


def describe_error(error: Exception) -> str:
    """Describes an error in one line; adds advice if no server answers."""
    if not isinstance(error, BlockyardError):
        return str(error)
    if error.metadata == TRANSPORT_ORIGIN and error.http_status == 503:
        return (
            f"no server answers ({error.message}): start one with `blockyard serve`, or name another"
            " (--target, --url, --admin-address)"
        )
    return " ".join(str(error).split())


def main(arguments: list[str] | None = None) -> None:
    """Runs the program. Exits with 0, with 1 after an error, with 2 after a bad command line."""
    # This process is Blockyard's own, unlike one that uses the client library: set gRPC's environment.
    grpc_environment.prepare()
    try:
        app(arguments, prog_name="blockyard")
    except EXPECTED as error:
        typer.echo(f"error: {describe_error(error)}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
