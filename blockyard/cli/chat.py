"""`blockyard chat`: a conversation on a terminal."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from blockyard.cli.connection import connection
from blockyard.cli.conversation import CHANGEABLE, Conversation
from blockyard.cli.generate import Target  # noqa: TC001 - typer reads it
from blockyard.cli.line_reader import FENCE, LineReader
from blockyard.client.chat import ChatOptions
from blockyard.client.targets import DEFAULT_TARGET
from blockyard.contract.events import Loading
from blockyard.errors import BlockyardError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from blockyard.contract.events import Delta

HELP = f"""\
/clear            forget the conversation
/system TEXT      begin a new one with this message of the system
/model NAME       go on with another model of the server; without a name: list them
/set NAME VALUE   change {", ".join(CHANGEABLE)}; without a value: the model's default
/quit             end; so does Ctrl-D
Ctrl-C            stop an answer
{FENCE}               begin a message of several lines; {FENCE} ends it
\\                 at the end of a line: the message goes on in the next
The arrow keys edit the line and bring earlier ones back."""

System = Annotated[str, typer.Option(help="a message of the system before the conversation")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="tokens of an answer at most")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy")]
Seed = Annotated[int | None, typer.Option(min=0, help="key of the random draws")]


def chat(
    target: Target = DEFAULT_TARGET,
    model: Annotated[str, typer.Option(help="the model's name; default: the first")] = "",
    system: System = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
) -> None:
    """Talk to a model. On a terminal with history and editing; /help lists what can be typed."""
    with connection().make_client(target) as client:
        # A gateway without a scheduler lists no models; its answer to the first question says why.
        name = model or next((each.name for each in client.list_models()), "")
        options = make_options(name, {"max_tokens": max_tokens, "temperature": temperature, "seed": seed})
        greet(name or "no model yet")
        talk(Conversation(client, options, system))


def make_options(model: str, chosen: Mapping[str, Any]) -> ChatOptions:
    """Makes a request's options of those that are not None."""
    options = ChatOptions(model=model)
    options.update({name: value for name, value in chosen.items() if value is not None})  # type: ignore[typeddict-item]
    return options


def greet(title: str) -> None:
    Console(stderr=True).print(
        f"[bold]{title}[/]: /help lists what can be typed, Ctrl-C stops an answer", highlight=False
    )


def talk(conversation: Conversation) -> None:
    """Answers messages from standard input until it ends. From a pipe, the first error ends it; it is raised."""
    reader = LineReader()
    try:
        while (text := reader.read()) is not None:
            word, _, rest = text.partition(" ")
            match word:
                case "":
                    continue
                case "/quit" | "/exit" | "/bye":
                    break
                case _ if text.startswith("/") and "\n" not in text:
                    _obey(conversation, word, rest.strip())
                case _:
                    _answer(conversation, text, is_terminal=reader.is_terminal)
    finally:
        reader.close()


def _obey(conversation: Conversation, command: str, rest: str) -> None:
    match command:
        case "/help" | "/?":
            typer.echo(HELP, err=True)
        case "/clear":
            conversation.clear()
        case "/system":
            conversation.begin(rest)
        case "/model":
            _obey_safely(lambda: _choose_model(conversation, rest))
        case "/set":
            name, _, value = rest.partition(" ")
            _obey_safely(lambda: conversation.set_option(name, value.strip()))
        case _:
            typer.echo(f"error: there is no {command}: /help lists what there is", err=True)


def _obey_safely(act: Callable[[], None]) -> None:
    """Runs a command, and writes what is wrong with it."""
    try:
        act()
    except (ValueError, BlockyardError) as error:
        typer.echo(f"error: {error}", err=True)


def _choose_model(conversation: Conversation, name: str) -> None:
    """Goes on with a model; without a name, lists all of them and marks the present one."""
    if name:
        conversation.choose_model(name)
        typer.echo(f"{name} {'answers' if conversation.is_chat else 'continues texts'} from now on", err=True)
        return
    for each in conversation.list_models():
        typer.echo(f"{'*' if each == conversation.options.get('model') else ' '} {each}", err=True)


def _answer(conversation: Conversation, text: str, *, is_terminal: bool) -> None:
    try:
        write_answer(conversation, text, is_terminal=is_terminal)
    except KeyboardInterrupt:
        typer.echo(" (stopped)")
    except BlockyardError as error:
        typer.echo()
        typer.echo(f"error: {error}", err=True)
        if not sys.stdin.isatty():
            raise


def write_answer(conversation: Conversation, text: str, *, is_terminal: bool) -> None:
    """Writes an answer as it comes; its reasoning, dimmed, and the loading of the model on a terminal alone."""
    is_reasoning = False
    loading = Console(stderr=True).status("")
    with closing(conversation.ask(text)) as deltas, ExitStack() as stack:
        stack.callback(loading.stop)
        for delta in deltas:
            if isinstance(delta, Loading):
                loading.update(delta.message)
                loading.start()
                continue
            loading.stop()
            if is_terminal and delta.reasoning_text:
                typer.secho(delta.reasoning_text, nl=False, dim=True)
                is_reasoning = True
            if delta.text:
                typer.echo(_after_reasoning(delta) if is_reasoning else delta.text, nl=False)
                is_reasoning = False
    typer.echo()


def _after_reasoning(delta: Delta) -> str:
    return "\n\n" + delta.text.lstrip("\n")
