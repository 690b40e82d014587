"""`blockyard ps`, `stop`, `up`, `down` and `logs`: this user's systems on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc
import psutil
import typer
from rich.console import Console

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.cli.admin.tables import make_table
from blockyard.cli.progress import INTERRUPTED, StartBars, download
from blockyard.cli.system_settings import (
    ConfigFile,
    Models,
    SystemName,
    given_settings,
    resolve_systems,
    with_system_settings,
)
from blockyard.cli.units import span
from blockyard.client.access import ClientAccess
from blockyard.extras import require_services
from blockyard.local.local_system import check_model
from blockyard.local.registry import Entry, RegistryError, find_process, find_system, free_name, list_systems
from blockyard.local.supervisor import StartError, child_environment
from blockyard.local.user_folders import logs_folder
from blockyard.model_files import served_name
from blockyard.settings import to_flag

if TYPE_CHECKING:
    from collections.abc import Callable

_STATUS_SECONDS = 1.0
_POLL_SECONDS = 0.1
_NUM_LAST_LINES = 15
# The width of a table that is written to a file or a pipe.
_PLAIN_WIDTH = 200

Name = Annotated[str, typer.Argument(help="a name or process id of `blockyard ps`; default: the only one")]
All = Annotated[bool, typer.Option("--all", help="all of them")]
Now = Annotated[bool, typer.Option("--now", help="do not wait for answers under way")]


def ask_status(entry: Entry) -> admin_pb2.GetStatusResponse | None:
    """Asks a system for its status, over its private socket; None: it does not answer."""
    with ClientAccess().make_channel(entry.local) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        with suppress(grpc.RpcError):
            return stub.GetStatus(admin_pb2.GetStatusRequest(), timeout=_STATUS_SECONDS)
    return None


def ps(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """List this user's systems on this machine."""
    systems = list_systems()
    states = [_find_state(entry) for entry in systems]
    if as_json:
        rows = [{**asdict(entry), "state": state} for entry, state in zip(systems, states, strict=True)]
        typer.echo(json.dumps(rows, indent=2))
        return
    if not systems:
        typer.echo("no system runs here: `blockyard up` starts one", err=True)
        return
    table = make_table("name", "model", "state", "http", "pid", "up", "by", numbers=("pid",))
    for entry, state in zip(systems, states, strict=True):
        model = ", ".join(name for name, *_ in entry.models) or entry.model or "demo"
        row = (entry.name, model, state, entry.url, str(entry.pid), span(entry.age_seconds))
        table.add_row(*row, entry.command)
    (Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)).print(table)


def _find_state(entry: Entry) -> str:
    status = ask_status(entry)
    if status is None:
        return "starting"
    if entry.models and status.gateway.ready:
        loaded = [model.name for model in status.models if model.ready]
        return f"ready, {', '.join(loaded) or 'none'} loaded"
    return "ready" if status.gateway.ready else "not ready"


def stop(name: Name = "", all_systems: All = False, now: Now = False) -> None:
    """Stop a system of `blockyard ps`. It ends its answers first."""
    _stop_all(_choose(name, list_systems(), all_systems=all_systems), now=now)


def down(name: Name = "", all_systems: All = False, now: Now = False) -> None:
    """Stop a system that runs in the background. It ends its answers first."""
    _stop_all(_choose(name, _in_background(), all_systems=all_systems), now=now)


def _in_background() -> list[Entry]:
    return [entry for entry in list_systems() if entry.command == "up"]


def _choose(name: str, systems: list[Entry], *, all_systems: bool = False) -> list[Entry]:
    """Returns the systems that are meant. Raises RegistryError if it is not clear which."""
    if all_systems:
        return systems
    if name:
        entry = find_system(name)
        if entry not in systems:
            raise RegistryError(f"{entry.name} was started by `blockyard {entry.command}`: see `blockyard stop`")
        return [entry]
    if not systems:
        raise RegistryError("no such system runs here: see `blockyard ps`")
    if len(systems) > 1:
        raise RegistryError(f"several run here, say which: {', '.join(entry.name for entry in systems)}")
    return systems


def _stop_all(systems: list[Entry], *, now: bool) -> None:
    for entry in systems:
        _signal(entry)
        if now:
            _signal(entry)
    for entry in systems:
        while entry.is_alive:
            time.sleep(_POLL_SECONDS)
        typer.echo(f"stopped {entry.name}")


def _signal(entry: Entry) -> None:
    process = find_process(entry)
    with suppress(psutil.NoSuchProcess):
        if process is not None:
            process.send_signal(signal.SIGTERM)


@with_system_settings
def up(models: Models = None, config: ConfigFile = "", name: SystemName = "", **settings: Any) -> None:
    """Serve models in the background, as `blockyard serve` would; returns once the system is ready.

    It ends with `blockyard down`, or with this machine.
    """
    configurations = resolve_systems(models or [], config, settings)
    require_services("blockyard up")
    for configuration in configurations:
        check_model(configuration)
    first = configurations[0]
    name = name or free_name(served_name(first.model.model, first.text.served_model_name))
    log = logs_folder() / f"{name}.log"
    arguments = [*(models or []), *(["--config", str(Path(config).resolve())] if config else [])]
    arguments += [*starmap(to_flag, given_settings(settings).items()), "--name", name, "--background-log", str(log)]
    with StartBars() as bars:
        download(configurations, bars)
        process = _start(arguments, log)
        try:
            entry = _wait_until_ready(process, log, bars)
        except BaseException:
            process.terminate()
            raise
    typer.echo(f"ready: {entry.name} at {entry.url}/v1, gRPC at {entry.grpc}")
    typer.echo(f"  blockyard logs {entry.name}\n  blockyard down {entry.name}")


def _start(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Starts `blockyard serve` in a session of its own, which outlives this terminal."""
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "blockyard", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env=child_environment(None),
        )


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, bars: StartBars) -> Entry:
    """Waits for the system that a process starts. Raises StartError, with the log's last lines, if it ends before."""
    while process.poll() is None:
        entry = next((each for each in list_systems() if each.pid == process.pid), None)
        status = None if entry is None else ask_status(entry)
        if entry is not None and status is not None and status.gateway.ready:
            return entry
        bars.show_status(status)
        time.sleep(_POLL_SECONDS)
    lines = _read_last_lines(log, _NUM_LAST_LINES)
    raise StartError(f"the system ended with {process.returncode} before it was ready:\n{lines}".rstrip())


def logs(
    name: Name = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on as it grows, until Ctrl-C")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="how many of the last lines")] = 100,
) -> None:
    """Show the log of a system that runs in the background, or of one that has ended."""
    path = logs_folder() / f"{name}.log" if name else Path(_choose("", _in_background())[0].log)
    if name and (Path(name).name != name or not path.is_file()):
        there = ", ".join(sorted(file.stem for file in logs_folder().glob("*.log"))) or "none"
        raise RegistryError(f"there is no log of {name}; there are: {there}")
    typer.echo(_read_last_lines(path, lines), nl=False)
    if follow:
        _follow(path, lambda: any(entry.log == str(path) for entry in list_systems()))


def _read_last_lines(path: Path, num_lines: int) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    return "".join(text.splitlines(keepends=True)[-num_lines:] if num_lines else [])


def _follow(path: Path, goes_on: Callable[[], bool]) -> None:
    with path.open(encoding="utf-8", errors="replace") as file, suppress(KeyboardInterrupt):
        file.seek(0, os.SEEK_END)
        while True:
            is_running = goes_on()
            if text := file.read():
                typer.echo(text, nl=False)
            elif not is_running:
                return
            else:
                time.sleep(_POLL_SECONDS)
    raise typer.Exit(INTERRUPTED)
