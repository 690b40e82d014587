"""`blockyard run`: starts what a model needs, talks to it or answers one prompt, and stops it again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockyard.cli.chat import MaxTokens, Seed, System, Temperature, greet, make_options, talk, write_answer
from blockyard.cli.conversation import Conversation
from blockyard.cli.private_system import find_model, started
from blockyard.cli.system_settings import ConfigFile, Model, given_settings, resolve_systems, with_system_settings
from blockyard.client.sync import Client
from blockyard.contract.models import Task
from blockyard.errors import BlockyardError, Reason
from blockyard.local.registry import find_serving, normalize
from blockyard.local.running_system import PATIENT, PRIVATE

if TYPE_CHECKING:
    from blockyard.contract.models import Model as ServedModel


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
    given = [model_or_folder] if model_or_folder else []
    configurations = resolve_systems(given, config, {**PRIVATE, **given_settings(settings)})
    text = _read_prompt(prompt or [])
    named = configurations[0].model
    is_plain = not config and not set(given_settings(settings)) - {"model", "revision"}
    running = find_serving(named.model, named.revision) if is_plain else None
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    if running is not None:
        with Client(running.local) as client:
            _converse(client, running.find_name(normalize(named.model), named.revision) or "", text, system, options)
        return
    with started("run", *configurations) as entry, Client(entry.local, retry=PATIENT) as client:
        _converse(client, "", text, system, options)


def _read_prompt(words: list[str]) -> str:
    """Joins the prompt's words and what a pipe brings; empty: a chat is wanted. Raises typer.BadParameter."""
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    text = "\n\n".join(part for part in (" ".join(words), piped.strip()) if part)
    if not text and not sys.stdin.isatty():
        raise typer.BadParameter("there is no prompt: give one, or pipe a text in", param_hint="PROMPT")
    return text


def _converse(client: Client, name: str, text: str, system: str, options: dict[str, Any]) -> None:
    """Talks to a model of a system, by its name; empty: to the first one."""
    model = find_model(client, name)
    _check_task(model)
    conversation = Conversation(client, make_options(model.name, options), system, is_chat=model.has_chat_template)
    if text:
        write_answer(conversation, text, is_terminal=sys.stdout.isatty())
        return
    # The length of a model that has not been loaded is not known.
    length = f", up to {model.max_model_len} tokens" if model.max_model_len else ""
    greet(f"{model.name}{length}" if conversation.is_chat else f"{model.name} continues texts")
    talk(conversation)


def _check_task(model: ServedModel) -> None:
    if model.task not in (Task.UNSPECIFIED, Task.GENERATE):
        raise BlockyardError(
            Reason.FEATURE_DISABLED,
            f"{model.name} does not generate text, it is to {model.task.value}: serve it with `blockyard serve`,"
            f" and see `blockyard {model.task.value} --help`",
        )
