"""`blockyard serve`: the services in the foreground, in one terminal."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from blockyard.async_client import AsyncClient
from blockyard.configuration import SystemConfiguration
from blockyard.local_system import LocalSystem
from blockyard.settings import load
from blockyard.supervisor import Supervisor
from blockyard.telemetry import EventLogger, configure_logging

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.status import Status

    from blockyard.configuration import SecuritySettings

log = EventLogger(__name__)

HELP = "Serve a model: gateway, scheduler and workers together."
DESCRIPTION = "Serves a model with a gateway, a scheduler and workers. Without --model: the demo model."


def register(app: typer.Typer) -> None:
    """Adds the command. Its flags are settings, so it reads them itself, `--help` too."""
    passed_on = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(help=HELP, context_settings=passed_on)(serve)


def serve(context: typer.Context) -> None:
    """Serves until SIGINT or SIGTERM; whatever dies meanwhile is started again."""
    configuration = load(SystemConfiguration, "blockyard serve", DESCRIPTION, context.args)
    configure_logging("serve", level=configuration.log.log_level, log_format=configuration.log.log_format)
    code = asyncio.run(_serve(configuration))
    if code:
        raise typer.Exit(code)


async def _serve(configuration: SystemConfiguration) -> int:
    system = LocalSystem(configuration)
    console = Console(stderr=True)
    status = console.status("starting") if console.is_terminal else None
    supervisor = Supervisor(
        system.services(),
        lambda: _is_ready(system, status),
        write_line=_writer(console),
        environment=system.environment(),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, supervisor)
    try:
        progress: AbstractContextManager[object] = status or nullcontext()
        with progress:
            started = await supervisor.start()
        if started:
            typer.echo(await _greeting(system))
        return await supervisor.wait()
    finally:
        await supervisor.stop()
        await system.close()


def _stop(supervisor: Supervisor) -> None:
    log.info("stopping when the answers under way have ended; once more to stop at once")
    supervisor.request_stop()


async def _is_ready(system: LocalSystem, status: Status | None) -> bool:
    ready = await system.is_ready()
    if status is not None and not ready and (missing := await system.missing()):
        status.update(f"starting: {missing}")
    return ready


def _writer(console: Console) -> Callable[[str], None]:
    """Makes what writes the services' lines: above the spinner on a terminal, plainly anywhere else."""
    if not console.is_terminal:
        return lambda line: print(line, file=sys.stderr, flush=True)  # noqa: T201
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


async def _greeting(system: LocalSystem) -> str:
    endpoints, security = system.endpoints, system.configuration.security
    async with AsyncClient(endpoints.local) as client:
        (model, *_) = await client.list_models()
    url = f"{'https' if security.tls_certificate else 'http'}://{endpoints.http}/v1"
    ready = [
        "",
        f"ready: {model.name}, up to {model.max_model_len} tokens",
        f"  gRPC   {endpoints.grpc}",
        f"  HTTP   {url}",
    ]
    if needed := _needed(security):
        return "\n".join([*ready, "", f"  callers need {needed}: see docs/guides/security.md", ""])
    body = json.dumps({"model": model.name, "prompt": "Once upon a time", "max_tokens": 32})
    call = f'blockyard.Client("{endpoints.grpc}").generate("Once upon a time", max_tokens=32)'
    python = f"import blockyard; print({call}.text)"
    return "\n".join(
        [
            *ready,
            "",
            f"  curl {url}/completions -H 'Content-Type: application/json' -d '{body}'",
            f"  python -c '{python}'",
            f"  blockyard generate 'Once upon a time' --target {endpoints.grpc}",
            "",
        ]
    )


def _needed(security: SecuritySettings) -> str:
    asked = {
        "a key": security.api_keys_file,
        "TLS": security.tls_certificate,
        "a certificate": security.tls_client_authority,
    }
    return " and ".join(name for name, setting in asked.items() if setting)
