"""Starts services as child processes, merges their logs, restarts the ones that die, and stops them in order.

Handles processes only: its caller defines them and says when they are ready.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

log = EventLogger(__name__)

NUM_LAST_LINES = 15
MAX_LINE_BYTES = 64 * 1024
ROOT = Path(__file__).resolve().parents[2]


class StartError(Exception):
    """A service ended before all were ready; the message has the service's last lines."""


@dataclass(frozen=True, slots=True)
class Service:
    """One child process: `python -m module flags`. It is killed if it takes longer than `grace_seconds` to stop.

    `model`: the model that it works for, which its log lines then name; empty: they do not.
    """

    name: str
    module: str
    flags: tuple[str, ...] = ()
    grace_seconds: float = 10.0
    model: str = ""


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delay before a restart: doubled with each restart, and reset after a long life.

    The first restart comes almost at once, since clients wait for it; only repeated deaths are delayed.
    """

    first_seconds: float = 0.05
    max_seconds: float = 10.0
    long_life_seconds: float = 10.0


async def start_process(service: Service, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Starts a service's process, with its standard output and error in one pipe."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "blockyard.local.child", str(os.getpid()), service.module, *service.flags),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment,
    )


class Child:
    """The process of a service. Its output is passed to `write_line`, line by line."""

    def __init__(
        self, service: Service, write_line: Callable[[str], None], environment: Mapping[str, str] | None = None
    ) -> None:
        self.service = service
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._write_line = write_line
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id, also after its end; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts the process. It gets no signals from the terminal, and ends if this process dies."""
        self.last_lines.clear()
        process = await start_process(self.service, child_environment(self._environment))
        assert process.stdout is not None
        self._process = process
        self._reading = asyncio.create_task(self._read(process.stdout))

    async def _read(self, output: asyncio.StreamReader) -> None:
        rest = b""
        while data := await output.read(MAX_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._on_line(line)
            if len(rest) > MAX_LINE_BYTES:
                self._on_line(rest)
                rest = b""
        if rest:
            self._on_line(rest)

    def _on_line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\r")
        self.last_lines.append(text)
        # Keep reading if the log's reader is gone: the service would block on a full pipe.
        with suppress(OSError, ValueError):
            self._write_line(_with_model(text, self.service.model))

    async def wait(self) -> int:
        """Waits until the process has ended and its output is read. Returns its exit code, -15 after SIGTERM."""
        assert self._process is not None
        assert self._reading is not None
        code = await self._process.wait()
        # A grandchild may hold the pipe open for ever: wait a second at most.
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reading), 1.0)
        self._reading.cancel()
        return code

    async def stop(self, hurry: asyncio.Event) -> None:
        """Sends SIGTERM, a second one if `hurry` is set, and SIGKILL to the process group after the grace time."""
        if not self.is_running:
            return
        ended = asyncio.create_task(self.wait())
        hurried = asyncio.create_task(hurry.wait())
        self._signal(signal.SIGTERM)
        await asyncio.wait({ended, hurried}, timeout=self.service.grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not ended.done() and hurry.is_set():
            self._signal(signal.SIGTERM)
            await asyncio.wait({ended}, timeout=min(2.0, self.service.grace_seconds))
        if not ended.done():
            log.warning("killing a service that does not stop", service=self.service.name)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await ended

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(number)


def _with_model(line: str, model: str) -> str:
    """Adds the model's name to a line of a log, as text or JSON."""
    if not model:
        return line
    return f'{{"model": {json.dumps(model)}, {line[1:]}' if line.startswith('{"') else f"{model}: {line}"


def child_environment(environment: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a child's environment, in which it imports this same package from any folder."""
    inherited = dict(os.environ if environment is None else environment)
    if "site-packages" not in ROOT.parts:
        paths = [str(ROOT), *filter(None, inherited.get("PYTHONPATH", "").split(os.pathsep))]
        inherited["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return inherited


class Supervisor:
    """Runs services together: `start`, then `wait` for a request to end, then `stop`.

    A service that dies after all were ready is restarted. If a service cannot be started again, all are stopped.
    Further services may be added and removed while the first ones run.
    """

    def __init__(
        self,
        services: Sequence[Service],
        is_ready: Callable[[], Awaitable[bool]],
        *,
        write_line: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
        backoff: Backoff | None = None,
        environment: Mapping[str, str] | None = None,
        poll_seconds: float = 0.1,
    ) -> None:
        """Takes the services in the order of their start.

        Args:
            services: started in this order, stopped in the reverse.
            is_ready: asked every `poll_seconds` whether all of them together can be used.
            write_line: called on the event loop with every line that the services write.
            backoff: the delays of restarts.
            environment: of the services, instead of this process's.
            poll_seconds: see `is_ready`.
        """
        self._write_line = write_line
        self._environment = environment
        self.children = [self._make_child(service) for service in services]
        self._is_ready = is_ready
        self._backoff = backoff or Backoff()
        self._poll_seconds = poll_seconds
        self._watchers: dict[Child, asyncio.Task[None]] = {}
        self._stop_requested = asyncio.Event()
        self._hurry = asyncio.Event()
        self._exit_code = 0

    def _make_child(self, service: Service) -> Child:
        return Child(service, self._write_line, self._environment)

    def request_stop(self) -> None:
        """Makes `start` and `wait` return; a second call makes `stop` hurry. For signal handlers, on the loop."""
        if self._stop_requested.is_set():
            self._hurry.set()
        self._stop_requested.set()

    async def start(self) -> bool:
        """Starts all services and waits until they are ready. Returns False if a stop was requested before.

        Raises StartError if a service ends before all are ready; the others are stopped.
        """
        starting = asyncio.create_task(self._start_all())
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            starting.cancel()
            # Wait for the cancelled task to end, so that no child is half started when all are stopped.
            await asyncio.gather(stopping, starting, return_exceptions=True)
        if starting.cancelled():
            return False
        if (error := starting.exception()) is not None:
            await self.stop()
            raise error
        for child in self.children:
            self._watchers[child] = asyncio.create_task(self._watch(child))
        return True

    def add(self, services: Sequence[Service]) -> list[Child]:
        """Starts further services, in this order, and restarts them when they die; `stop` stops them last.

        Must be called after `start`.
        """
        children = [self._make_child(service) for service in services]
        self.children[:0] = children
        for child in children:
            self._watchers[child] = asyncio.create_task(self._watch(child, is_new=True))
        return children

    async def remove(self, children: Sequence[Child]) -> None:
        """Stops services that were added, as `stop` does, and forgets them."""
        await self._stop(children)
        self.children = [child for child in self.children if child not in children]

    async def _start_all(self) -> None:
        for child in self.children:
            await child.start()
        ends = {asyncio.create_task(child.wait()): child for child in self.children}
        polling = asyncio.create_task(self._poll())
        try:
            await asyncio.wait({*ends, polling}, return_when=asyncio.FIRST_COMPLETED)
            for end, child in ends.items():
                if end.done():
                    raise StartError(_describe_exit(child, end.result()))
            polling.result()
        finally:
            for task in (*ends, polling):
                task.cancel()

    async def _poll(self) -> None:
        while not await self._is_ready():  # noqa: ASYNC110 - it is another process that gets ready
            await asyncio.sleep(self._poll_seconds)

    async def _watch(self, child: Child, *, is_new: bool = False) -> None:
        """Starts a new child, and any child again whenever it ends; requests a stop of all if that fails."""
        delay_seconds = self._backoff.first_seconds
        try:
            if is_new:
                await child.start()
            while True:
                delay_seconds = await self._restart(child, delay_seconds)
        except OSError as error:
            log.error("a service cannot be started: stopping", service=child.service.name, error=error)
        except Exception:  # otherwise the service would stay down unnoticed
            log.exception("a service is not watched any more: stopping", service=child.service.name)
        self._exit_code = 1
        self._stop_requested.set()

    async def _restart(self, child: Child, delay_seconds: float) -> float:
        """Waits for the end of a child and starts it again, after a delay that grows with short lives.

        Returns the delay of the next restart.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        code = await child.wait()
        if loop.time() - started >= self._backoff.long_life_seconds:
            delay_seconds = self._backoff.first_seconds
        log.warning(
            "a service ended: starting it again",
            service=child.service.name,
            exit_code=code,
            delay_seconds=delay_seconds,
        )
        await asyncio.sleep(delay_seconds)
        await child.start()
        return min(2 * delay_seconds, self._backoff.max_seconds)

    async def wait(self) -> int:
        """Waits until a stop is requested (0), or a service cannot be started any more (1)."""
        await self._stop_requested.wait()
        return self._exit_code

    async def stop(self) -> None:
        """Stops all services, the last started first; services of one module are stopped together."""
        self._stop_requested.set()
        await self._stop(self.children)

    async def _stop(self, children: Sequence[Child]) -> None:
        watchers = [self._watchers.pop(child) for child in children if child in self._watchers]
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        for _, alike in itertools.groupby(reversed(children), lambda child: child.service.module):
            await asyncio.gather(*(child.stop(self._hurry) for child in alike))


def _describe_exit(child: Child, exit_code: int) -> str:
    lines = "".join(f"\n    {line}" for line in child.last_lines)
    return f"the {child.service.name} ended with {exit_code} before it was ready{':' if lines else ''}{lines}"
