"""`blockyard launch`: starts a coding agent on a model that is served here."""

from __future__ import annotations

import dataclasses
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from blockyard.cli.agents import INSTALL, Agent, make_launch
from blockyard.cli.connection import connection
from blockyard.cli.private_system import find_model, started
from blockyard.cli.system_settings import ConfigFile, given_settings, resolve_system, with_system_settings
from blockyard.client.sync import Client
from blockyard.errors import BlockyardError, Reason
from blockyard.local.registry import RegistryError, find_serving, find_system, list_systems, normalize
from blockyard.local.running_system import PRIVATE

if TYPE_CHECKING:
    from blockyard.cli.agents import Launch
    from blockyard.contract.models import Model
    from blockyard.local.registry import Entry

# The shortest length that leaves room for work: agents begin with some 20,000 tokens of their own.
ENOUGH_TOKENS = 32_768
# A key where none is asked for: agents refuse to start without.
_NO_KEY = "unused"
_AGENTS: tuple[Agent, ...] = get_args(Agent)


@with_system_settings
def launch(
    agent: Annotated[str, typer.Argument(metavar="|".join(_AGENTS), help="the agent", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="the agent's own arguments", show_default=False)
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="folder, hub id or demo; default: that of the system that runs")
    ] = "",
    system: Annotated[str, typer.Option(metavar="NAME", help="a running system, by its name in `blockyard ps`")] = "",
    show: Annotated[bool, typer.Option("--print", help="print what would be set and called; start nothing")] = False,
    config: ConfigFile = "",
    **settings: Any,
) -> None:
    """Start a coding agent on a model that is served here; its own files stay as they are.

    A running system that has the model is used. If there is none, one is started, and stopped at the agent's end.
    """
    known = _check_agent(agent, is_started=not show)
    entry = _find(system, model, settings if not config else {**settings, "config": config})
    if show and entry is None:
        raise RegistryError("no system runs that has the model: start one with `blockyard up`")
    if entry is not None:
        _run(known, entry, _find_name(entry, model, settings), arguments or [], is_shown=show)
        return
    configuration = resolve_system(model, config, {**PRIVATE, **given_settings(settings)})
    with started("launch", configuration) as own:
        _run(known, own, "", arguments or [], is_shown=False)


def _check_agent(agent: str, *, is_started: bool) -> Agent:
    if agent not in _AGENTS:
        raise typer.BadParameter(f"{agent} is none of {', '.join(_AGENTS)}", param_hint="AGENT")
    known = agent
    if is_started and shutil.which(known) is None:
        raise RegistryError(f"{known} is not installed: {INSTALL[known]}")
    return known


def _find(system: str, model: str, settings: dict[str, Any]) -> Entry | None:
    """Finds the running system that is meant; None: one has to be started. Raises RegistryError if it is not clear."""
    if system:
        return find_system(system)
    given = given_settings(settings)
    if model:
        named = resolve_system(model, "", {"revision": given.get("revision")}).model
        return None if set(given) - {"revision"} else find_serving(named.model, named.revision)
    shared = [entry for entry in list_systems() if entry.command in ("serve", "up")]
    if len(shared) > 1:
        raise RegistryError(f"several systems run here, say --system: {', '.join(entry.name for entry in shared)}")
    if not shared:
        raise RegistryError("no system runs here: name a --model to start, or start one with `blockyard up`")
    return shared[0]


def _find_name(entry: Entry, model: str, settings: dict[str, Any]) -> str:
    """Returns a model's name in requests, empty for the first one of the system."""
    if not model:
        return ""
    named = resolve_system(model, "", {"revision": settings.get("revision")}).model
    return entry.find_name(normalize(named.model), named.revision) or ""


def _run(agent: Agent, entry: Entry, name: str, arguments: list[str], *, is_shown: bool) -> None:
    key = connection().api_key
    if entry.needs_key and not key:
        raise BlockyardError(
            Reason.UNAUTHENTICATED, f"the system {entry.name} asks for a key: give --api-key or BLOCKYARD_API_KEY"
        )
    with Client(entry.local) as client:
        model = find_model(client, name)
    planned = make_launch(agent, entry.url, key or _NO_KEY, model)
    planned = dataclasses.replace(planned, command=[*planned.command, *arguments])
    _warn(model)
    if is_shown:
        typer.echo(planned.describe())
    elif code := _call(planned):
        raise typer.Exit(code)


def _warn(model: Model) -> None:
    if 0 < model.max_model_len < ENOUGH_TOKENS:
        typer.echo(
            f"warning: {model.name} takes {model.max_model_len} tokens at most, and agents need about {ENOUGH_TOKENS}",
            err=True,
        )
    if not model.dialect:
        typer.echo(f"warning: calls of tools are not known of {model.name}: its answers are text alone", err=True)


def _call(planned: Launch) -> int:
    """Runs the agent on this terminal, and returns its exit code."""
    # Ctrl-C is the agent's: this process goes on until it ends. A handler, unlike SIG_IGN, is not inherited.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.run(planned.command, env=planned.make_environment(), check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
