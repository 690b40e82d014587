"""The program `blockyard`: assembles its commands and prints their errors."""

from __future__ import annotations

import sys

import typer

import blockyard
from blockyard.cli import bench, chat, connection, generate, keys, lora, numbers, plan, serve
from blockyard.cli.admin import commands as admin
from blockyard.cli.admin import inspection
from blockyard.cli.doctor import command as doctor
from blockyard.cli.top import command as top
from blockyard.errors import TRANSPORT_ORIGIN, BlockyardError
from blockyard.local.supervisor import StartError
from blockyard.security.keys import KeyFileError
from blockyard.security.tls import CertificateError
from blockyard.service import grpc_environment
from blockyard.service.servers import PortTaken
from blockyard.settings import SettingsError

app = typer.Typer(
    help="Serves large language models over gRPC and HTTP, and talks to them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(connection.read_options)
serve.register(app)
plan.register(app)
doctor.register(app)
for command in (generate.generate, chat.chat, numbers.embed, numbers.score, numbers.classify, bench.bench, top.top):
    app.command()(connection.with_connection(command))
for command in (inspection.inspect, inspection.call):
    admin.app.command()(command)
app.add_typer(admin.app, name="admin")
app.add_typer(keys.app, name="keys")
app.add_typer(lora.app, name="lora")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(blockyard.__version__)


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
    except (BlockyardError, CertificateError, KeyFileError, PortTaken, SettingsError, StartError) as error:
        typer.echo(f"error: {describe_error(error)}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
