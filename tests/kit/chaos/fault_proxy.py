"""A byte proxy that breaks connections as a network does: late, frozen, cut or reset at a chosen byte, partitioned.

Between any two processes that talk over TCP or Unix sockets; it knows nothing of what they say. In a test, a class on
the test's event loop; as a program, the same behind commands on standard input:

    python -m tests.kit.chaos.fault_proxy --listen 127.0.0.1:7000 --target unix:/tmp/scheduler --seed 1
    listening on 127.0.0.1:7000
    > end-at down 1000 reset
    ok
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, TextIO

from tests.kit.chaos.faulty_connection import (
    Connection,
    Direction,
    EndAt,
    Ending,
    Rule,
    Stats,
    parse_address,
    random_rules,
)
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class FaultProxy:
    """Listens at one address and connects to another: `async with FaultProxy(target) as proxy`.

    Attributes:
        address: where it listens, `host:port` or `unix:/path`.
        target: where new connections go; may be changed.
        rule_of: gives each connection, by its number from 0, its rule; may be changed.
        connections: those that are open.
    """

    def __init__(
        self, target: str, listen: str = "127.0.0.1:0", rule_of: Callable[[int], Rule] = lambda _: Rule()
    ) -> None:
        self.address = listen
        self.target = target
        self.rule_of = rule_of
        self.stats = Stats()
        self.connections: set[Connection] = set()
        self._refuses = False
        self._whole = asyncio.Event()
        self._whole.set()
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        family, address = parse_address(self.address)
        self._listener = listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
        if family == socket.AF_INET:
            self.address = "{}:{}".format(*listener.getsockname())
        self._spawn(self._accept(listener))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._listener is not None
        self._listener.close()
        if self.address.startswith("unix:"):
            os.unlink(self.address.removeprefix("unix:"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            client = await _accept_one(listener)
            if self._refuses:
                self.stats.num_refused += 1
                client.close()
                continue
            number = self.stats.num_connections
            self.stats.num_connections += 1
            connection = Connection(number, client, self.rule_of(number), self._whole, self.stats)
            self.connections.add(connection)
            self._spawn(connection.run(self.target)).add_done_callback(
                lambda _, connection=connection: self._forget(connection)
            )

    def _forget(self, connection: Connection) -> None:
        self.connections.discard(connection)
        # Its task may have been cancelled before it began, or while it ended.
        connection.close()

    async def until_busy(self, num_bytes: int = 5_000) -> None:
        """Waits until so many more bytes have come through: between services, those of some dozens of steps."""
        before = sum(self.stats.num_bytes.values())
        await until(lambda: sum(self.stats.num_bytes.values()) > before + num_bytes)

    def freeze(self) -> None:
        """Freezes every open connection; new ones go through."""
        for connection in self.connections:
            connection.freeze()

    def thaw(self) -> None:
        """Lets them go on."""
        for connection in self.connections:
            connection.thaw()

    def end(self, ending: Ending = Ending.CUT) -> None:
        """Ends every open connection; new ones go through."""
        for connection in tuple(self.connections):
            connection.end(ending)

    def partition(self, *, refuses: bool = False) -> None:
        """Lets nothing through any more. New connections hear nothing, like in a hole, or are refused."""
        self._whole.clear()
        self._refuses = refuses

    def heal(self) -> None:
        """Lets everything through again, what was held back too: a network that is whole again sends it anew."""
        self._refuses = False
        self._whole.set()


async def _accept_one(listener: socket.socket) -> socket.socket:
    """The next connection; one that comes in the moment of a cancellation is closed, not lost."""
    accepting = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listener))
    try:
        return (await asyncio.shield(accepting))[0]
    except asyncio.CancelledError:
        accepting.cancel()
        with suppress(asyncio.CancelledError):
            (await accepting)[0].close()
        raise


class Console:
    """The commands of the program, one a line; each is answered by a line."""

    def __init__(self, proxy: FaultProxy, seed: int) -> None:
        self._proxy = proxy
        self._seed = seed
        self._rule = Rule()
        self.quitting = asyncio.Event()

    def obey(self, line: str) -> str:
        """Does what a line says, and tells what became of it."""
        name, *arguments = line.split() or [""]
        command = self.COMMANDS.get(name)
        if command is None:
            return f"error: the commands are {', '.join(self.COMMANDS)}"
        try:
            return command(self, *arguments) or "ok"
        except (TypeError, ValueError, StopIteration) as error:
            return f"error: {name}: {error}"

    def _chosen(self, number: str | None) -> list[Connection]:
        """One connection by its number, or all that are open."""
        chosen = [one for one in self._proxy.connections if number is None or one.number == int(number)]
        if number is not None and not chosen:
            raise ValueError(f"connection {number} is not open")
        return chosen

    def _freeze(self, number: str | None = None) -> None:
        for connection in self._chosen(number):
            connection.freeze()

    def _thaw(self, number: str | None = None) -> None:
        for connection in self._chosen(number):
            connection.thaw()

    def _cut(self, number: str | None = None) -> None:
        for connection in self._chosen(number):
            connection.end(Ending.CUT)

    def _reset(self, number: str | None = None) -> None:
        for connection in self._chosen(number):
            connection.end(Ending.RESET)

    def _partition(self, kind: str = "hole") -> None:
        if kind not in ("hole", "refuse"):
            raise ValueError(f"{kind!r} is neither hole nor refuse")
        self._proxy.partition(refuses=kind == "refuse")

    def _heal(self) -> None:
        self._proxy.heal()

    def _delay(self, seconds: str) -> None:
        self._set_rule(replace(self._rule, delay_seconds=float(seconds)))

    def _end_at(self, direction: str, num_bytes: str, ending: str = Ending.CUT) -> None:
        end_at = EndAt(Direction(direction), int(num_bytes), Ending(ending))
        self._set_rule(replace(self._rule, end_at=end_at))

    def _set_rule(self, rule: Rule) -> None:
        """Of connections to come; the delay of open ones too."""
        self._rule = rule
        self._proxy.rule_of = lambda _: rule
        for connection in self._proxy.connections:
            connection.rule = replace(connection.rule, delay_seconds=rule.delay_seconds)

    def _random(self, max_up_bytes: str, max_down_bytes: str) -> None:
        delay_seconds = self._rule.delay_seconds
        self._proxy.rule_of = random_rules(self._seed, int(max_up_bytes), int(max_down_bytes), delay_seconds)

    def _clear(self) -> None:
        self._set_rule(Rule())

    def _stats(self) -> str:
        return f"open={len(self._proxy.connections)} {self._proxy.stats}"

    def _quit(self) -> None:
        self.quitting.set()

    COMMANDS: ClassVar[dict[str, Callable[..., str | None]]] = {
        "freeze": _freeze,  # [connection]
        "thaw": _thaw,  # [connection]
        "cut": _cut,  # [connection]
        "reset": _reset,  # [connection]
        "partition": _partition,  # [hole|refuse]
        "heal": _heal,
        "delay": _delay,  # SECONDS
        "end-at": _end_at,  # up|down BYTES [cut|reset]: each connection to come
        "random": _random,  # MAX_UP_BYTES MAX_DOWN_BYTES: each connection to come ends at a random byte before that
        "clear": _clear,  # delay, end-at and random
        "stats": _stats,
        "quit": _quit,
    }


async def run_console(proxy: FaultProxy, seed: int, lines: TextIO, write: Callable[[str], object]) -> None:
    """Obeys lines until `quit` or a signal; where the lines end, what was said last goes on."""
    console = Console(proxy, seed)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, console.quitting.set)

    def read() -> None:
        for line in lines:
            if not console.quitting.is_set():
                loop.call_soon_threadsafe(lambda line=line: write(console.obey(line)))

    # A daemon: nothing wakes a thread that waits for a line.
    threading.Thread(target=read, name="commands", daemon=True).start()
    await console.quitting.wait()


async def serve(listen: str, target: str, seed: int) -> None:
    """Runs a proxy until it is told to end."""
    async with FaultProxy(target, listen) as proxy:
        write = partial(print, flush=True)
        write(f"listening on {proxy.address}")
        await run_console(proxy, seed, sys.stdin, write)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser("fault_proxy", description="Breaks connections as a network does.")
    parser.add_argument("--listen", required=True, help="host:port (0: a free one) or unix:/path")
    parser.add_argument("--target", required=True, help="host:port or unix:/path")
    parser.add_argument("--seed", type=int, default=0, help="of `random`")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.listen, arguments.target, arguments.seed))


if __name__ == "__main__":
    main()
