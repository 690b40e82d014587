"""`blockyard chat`: a conversation on a terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from blockyard.cli.connection import connection
from blockyard.cli.generate import Target  # noqa: TC001 - typer reads it
from blockyard.client.chat import ChatOptions
from blockyard.client.targets import DEFAULT_TARGET
from blockyard.contract.chat import Message, Role
from blockyard.errors import BlockyardError

if TYPE_CHECKING:
    from collections.abc import Generator

    from blockyard.client.sync import Client

HINT = "/quit ends, /clear forgets the conversation, Ctrl-C stops an answer"


class Conversation:
    """The messages so far, and the client that continues them."""

    def __init__(self, client: Client, options: ChatOptions, system: str = "") -> None:
        self._client = client
        self._options = options
        self._system = [Message(Role.SYSTEM, system)] if system else []
        self.messages: list[Message] = list(self._system)

    def clear(self) -> None:
        self.messages = list(self._system)

    def ask(self, text: str) -> Generator[str]:
        """Sends a message and yields the answer piece by piece. Keeps the text of an interrupted answer too."""
        self.messages.append(Message(Role.USER, text))
        said: list[str] = []
        try:
            with self._client.stream_chat(self.messages, **self._options) as stream:
                for piece in stream.text_deltas():
                    said.append(piece)
                    yield piece
        finally:
            if said:
                self.messages.append(Message(Role.ASSISTANT, "".join(said)))
            else:
                # Drop the unanswered question: the next would make two user messages in a row.
                self.messages.pop()


def chat(
    target: Target = DEFAULT_TARGET,
    model: Annotated[str, typer.Option(help="the model's name; default: the first")] = "",
    system: Annotated[str, typer.Option(help="a message of the system before the conversation")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="tokens of an answer at most")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="key of the random draws")] = None,
) -> None:
    """Talk to a model."""
    with connection().make_client(target) as client:
        # A gateway without a scheduler lists no models; its answer to the first question says why.
        name = model or next((each.name for each in client.list_models()), "")
        options = ChatOptions(model=name)
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        if temperature is not None:
            options["temperature"] = temperature
        if seed is not None:
            options["seed"] = seed
        Console(stderr=True).print(f"[bold]{name or 'no model yet'}[/]: {HINT}", highlight=False)
        _talk(Conversation(client, options, system))


def _talk(conversation: Conversation) -> None:
    while (text := _read()) is not None:
        match text:
            case "":
                continue
            case "/quit" | "/exit":
                break
            case "/clear":
                conversation.clear()
            case _:
                _answer(conversation, text)


def _read() -> str | None:
    """Reads a line from the user; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        typer.echo(err=True)
        return None


def _answer(conversation: Conversation, text: str) -> None:
    try:
        with closing(conversation.ask(text)) as pieces:
            for piece in pieces:
                typer.echo(piece, nl=False)
        typer.echo()
    except KeyboardInterrupt:
        typer.echo(" (stopped)")
    except BlockyardError as error:
        typer.echo()
        typer.echo(f"error: {error}", err=True)
        if not sys.stdin.isatty():
            raise
