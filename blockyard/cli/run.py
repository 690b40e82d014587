"""`blockyard run`: starts what a model needs, talks to it or answers one prompt, and stops it again."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockyard.cli.chat import MaxTokens, Seed, System, Temperature, greet, make_options, talk, write_answer
from blockyard.cli.conversation import Conversation
from blockyard.cli.progress import StartBars, download
from blockyard.cli.system_settings import ConfigFile, Model, given_settings, resolve_system, with_system_settings
from blockyard.client.sync import Client
from blockyard.contract.models import Task
from blockyard.errors import BlockyardError, Reason
from blockyard.extras import require_services
from blockyard.local.local_system import LocalSystem
from blockyard.local.registry import find_serving, registered
from blockyard.local.running_system import PATIENT, PRIVATE, RunningSystem
from blockyard.telemetry import configure_logging

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from blockyard.configuration import SystemConfiguration
    from blockyard.contract.models import Model as ServedModel
    from blockyard.local.registry import Command, Entry


@with_system_settings
def run(
    model_or_folder: Model = "",
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="what to answer; default: standard input, or a chat")
    ] = None,
    system: System = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    config: ConfigFile = "",
    **settings: Any,
) -> None:
    """Talk to a model: start what is needed, chat or answer a prompt, and stop.

    With a prompt, or text on standard input, only the answer goes to standard output. A system of `blockyard serve` or
    `blockyard up` that has this model is used if no settings are given.
    """
    configuration = resolve_system(model_or_folder, config, {**PRIVATE, **given_settings(settings)})
    text = _read_prompt(prompt or [])
    named = configuration.model
    is_plain = not config and not set(given_settings(settings)) - {"model", "revision"}
    running = find_serving(named.model, named.revision) if is_plain else None
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    if running is not None:
        with Client(running.local) as client:
            _converse(client, text, system, options)
        return
    with started(configuration, "run") as entry, Client(entry.local, retry=PATIENT) as client:
        _converse(client, text, system, options)


@contextmanager
def started(configuration: SystemConfiguration, command: Command) -> Iterator[Entry]:
    """Runs a system inside the block, with a bar while it starts, and lists it as running."""
    require_services(f"blockyard {command}")
    configure_logging(command, level=configuration.log.log_level, log_format=configuration.log.log_format)
    local, bars = LocalSystem(configuration), StartBars()
    # An error of the start has the services' last lines.
    is_quiet = configuration.log.log_level == PRIVATE["log_level"]
    system = RunningSystem(local, lambda line: None if is_quiet and bars.is_open else bars.write_line(line))

    async def show_status() -> None:
        bars.show_status(await local.ask_status())

    # Turn these signals into an exit, so that the services are stopped and their folder is removed.
    handlers = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with registered(local, command) as entry:
            with bars:
                download(configuration, bars)
                system.start(on_wait=show_status)
            yield entry
    finally:
        system.stop()
        # Removes the sockets' folder also if nothing was started.
        asyncio.run(local.close())
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _read_prompt(words: list[str]) -> str:
    """Joins the prompt's words and what a pipe brings; empty: a chat is wanted. Raises typer.BadParameter."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    text = "\n\n".join(part for part in (" ".join(words), piped.strip()) if part)
    if not text and not sys.stdin.isatty():
        raise typer.BadParameter("there is no prompt: give one, or pipe a text in", param_hint="PROMPT")
    return text


def _converse(client: Client, text: str, system: str, options: dict[str, Any]) -> None:
    model = client.list_models()[0]
    _check_task(model)
    conversation = Conversation(client, make_options(model.name, options), system, is_chat=model.has_chat_template)
    if text:
        write_answer(conversation, text, is_terminal=sys.stdout.isatty())
        return
    greet(
        f"{model.name}, up to {model.max_model_len} tokens" if conversation.is_chat else f"{model.name} continues texts"
    )
    talk(conversation)


def _check_task(model: ServedModel) -> None:
    if model.task not in (Task.UNSPECIFIED, Task.GENERATE):
        raise BlockyardError(
            Reason.FEATURE_DISABLED,
            f"{model.name} does not generate text, it is to {model.task.value}: serve it with `blockyard serve`,"
            f" and see `blockyard {model.task.value} --help`",
        )
