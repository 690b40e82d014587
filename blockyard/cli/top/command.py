"""`blockyard top`: a live view of replicas, queues, blocks and tokens a second."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from blockyard.admin.v1 import admin_pb2
from blockyard.cli.admin.link import DEFAULT_ADMIN_ADDRESS, AdminAddress, admin_api
from blockyard.cli.top.frame import make_frame
from blockyard.cli.top.terminal_keys import terminal_keys
from blockyard.errors import BlockyardError

if TYPE_CHECKING:
    from rich.console import RenderableType

# The width of a frame that is written to a file or a pipe.
_PLAIN_WIDTH = 80


class View:
    """The view of one gateway's system; keeps its last two readings.

    `model`: the model whose scheduler is shown; empty: the gateway's first.
    """

    def __init__(self, address: str, model: str = "") -> None:
        self._address = address
        self._model = model
        self._before: admin_pb2.GetStatusResponse | None = None
        self._now: admin_pb2.GetStatusResponse | None = None

    def read(self) -> None:
        """Reads the system's status. Raises BlockyardError."""
        with admin_api(self._address, self._model) as api:
            self._before, self._now = self._now, api.ask(api.stub.GetStatus, admin_pb2.GetStatusRequest())

    def frame(self) -> RenderableType:
        assert self._now is not None
        return make_frame(self._address, self._now, self._before)

    def next_frame(self) -> RenderableType:
        """Reads the status and lays it out; if the gateway does not answer, the frame says so."""
        try:
            self.read()
        except BlockyardError as error:
            trouble = Text(f"{self._address} does not answer: {' '.join(error.message.split())}", style="red")
            return Group(trouble, Text(), self.frame()) if self._now else trouble
        return self.frame()


def top(
    address: AdminAddress = DEFAULT_ADMIN_ADDRESS,
    model: Annotated[str, typer.Option(help="which model's scheduler to show, of several; default: the first's")] = "",
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="seconds between frames")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="write one frame, of two readings, and end")] = False,
) -> None:
    """Watch a running system; q or Ctrl-C ends."""
    console, view = Console(), View(address, model)
    # A gateway that never answered is an error, not a view.
    view.read()
    if once or not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH) if not console.is_terminal else console
        time.sleep(interval)
        view.read()
        console.print(view.frame())
        return
    live = Live(console=console, screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), terminal_keys() as keys, live:
        live.update(view.frame(), refresh=True)
        while "q" not in keys.wait(interval).lower():
            live.update(view.next_frame(), refresh=True)
