"""`blockyard chat`: a conversation on a terminal, over the OpenAI API."""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from blockyard.errors import BlockyardError
from blockyard.http_stream import get_json, post_events

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

DEFAULT_URL = "http://127.0.0.1:8000"
HINT = "/quit ends, /clear forgets the conversation, Ctrl-C stops an answer"


class Conversation:
    """What was said so far, and the way to go on."""

    def __init__(self, url: str, options: dict[str, Any], system: str = "") -> None:
        self._url = f"{url.rstrip('/')}/v1/chat/completions"
        self._options = options
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._system)

    def clear(self) -> None:
        """Forgets what was said."""
        self.messages = list(self._system)

    async def ask(self, text: str) -> AsyncGenerator[str]:
        """Says something and yields the answer, piece by piece. What came is remembered, even of a broken answer."""
        self.messages.append({"role": "user", "content": text})
        body = {**self._options, "messages": self.messages, "stream": True}
        said: list[str] = []
        try:
            async with aclosing(post_events(self._url, body)) as events:
                async for event in events:
                    for choice in event["choices"]:
                        if piece := choice["delta"].get("content"):
                            said.append(piece)
                            yield piece
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": "".join(said)})
            else:
                # A question without an answer would make two of the user's in a row.
                self.messages.pop()


def chat(
    url: Annotated[str, typer.Option(help="the gateway's HTTP address", envvar="BLOCKYARD_URL")] = DEFAULT_URL,
    model: Annotated[str, typer.Option(help="the model's name; default: the first")] = "",
    system: Annotated[str, typer.Option(help="a message of the system before the conversation")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="tokens of an answer at most")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="key of the random draws")] = None,
) -> None:
    """Talk to a model."""
    name = model or asyncio.run(get_json(f"{url.rstrip('/')}/v1/models"))["data"][0]["id"]
    chosen = {"model": name, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    conversation = Conversation(url, {key: value for key, value in chosen.items() if value is not None}, system)
    Console(stderr=True).print(f"[bold]{name}[/]: {HINT}", highlight=False)
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
    """Reads what the user says; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        typer.echo(err=True)
        return None


def _answer(conversation: Conversation, text: str) -> None:
    async def write() -> None:
        async with aclosing(conversation.ask(text)) as pieces:
            async for piece in pieces:
                typer.echo(piece, nl=False)

    try:
        asyncio.run(write())
        typer.echo()
    except KeyboardInterrupt:
        typer.echo(" (stopped)")
    except BlockyardError as error:
        typer.echo()
        typer.echo(f"error: {error}", err=True)
        if not sys.stdin.isatty():
            raise
