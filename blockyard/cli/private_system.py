"""A system that a command starts for itself and stops at its end: of `blockyard run` and `blockyard launch`."""

from __future__ import annotations

import asyncio
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from blockyard.cli.progress import StartBars, download
from blockyard.errors import BlockyardError, Reason
from blockyard.extras import require_services
from blockyard.local.local_system import LocalSystem
from blockyard.local.registry import registered
from blockyard.local.running_system import PRIVATE, RunningSystem
from blockyard.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Generator
    from types import FrameType

    from blockyard.client.sync import Client
    from blockyard.configuration import SystemConfiguration
    from blockyard.contract.models import Model
    from blockyard.local.registry import Command, Entry


@contextmanager
def started(command: Command, configuration: SystemConfiguration, *others: SystemConfiguration) -> Generator[Entry]:
    """Runs a system inside the block, with a bar while it starts, and lists it as running."""
    require_services(f"blockyard {command}")
    configure_logging(command, level=configuration.log.log_level, log_format=configuration.log.log_format)
    local, bars = LocalSystem(configuration, *others), StartBars()
    # An error at the start quotes the services' last lines, so they need not be shown as they come.
    is_quiet = configuration.log.log_level == PRIVATE["log_level"]
    system = RunningSystem(local, lambda line: None if is_quiet and bars.is_open else bars.write_line(line))

    async def show_status() -> None:
        bars.show_status(await local.ask_status())

    # Turn these signals into an exit, so that the services are stopped and their folder is removed.
    handlers = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with registered(local, command) as entry:
            with bars:
                download([configuration, *others], bars)
                system.start(on_wait=show_status)
            yield entry
    finally:
        system.stop()
        # Removes the sockets' folder also if nothing was started.
        asyncio.run(local.close())
        for number, handler in handlers.items():
            signal.signal(number, handler)


def find_model(client: Client, name: str = "") -> Model:
    """Returns the model of a name, or the first one. Raises BlockyardError if the system is not ready yet."""
    models = [model for model in client.list_models() if name in ("", model.name)]
    if not models:
        raise BlockyardError(
            Reason.NO_READY_WORKER, "the system is still starting: `blockyard ps` says when it is ready"
        )
    return models[0]


def _exit(number: int, _frame: FrameType | None) -> None:
    raise typer.Exit(128 + number)
