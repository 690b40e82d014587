"""Processes of the services that need not import their libraries: forked from one that has.

Importing torch and gRPC takes longer than most of what a test has its processes do. `python -m
tests.kit.processes.nursery` imports what the services import and no more: no thread, no channel, nothing computed. For
each request over its standard input, a socket, it forks a child that becomes `python -m module flags` with an
environment, a folder, a session and a standard output of its own, and tells when it ended. It kills those that are left
when its parent goes away. `Child` is the parent's end, as `subprocess.Popen` is of others; `start_process` is for the
product's supervisor.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
from concurrent import futures
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blockyard.local.supervisor import Service

ROOT = Path(__file__).parents[3]
MAX_MESSAGE_BYTES = 1 << 18


class Child:
    """A process `python -m module flags`. Use from any thread; `exit_code` is a future of its exit code."""

    def __init__(self, module: str, flags: Sequence[str], environment: Mapping[str, str], output: int) -> None:
        """`output`: a file for standard output and error."""
        self.pid, self.exit_code = _nursery().start([module, *flags], environment, output)

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.exit_code.result() if self.exit_code.done() else None

    def poll(self) -> int | None:
        """Returns its exit code, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended; raises subprocess.TimeoutExpired."""
        try:
            return self.exit_code.result(timeout)
        except futures.TimeoutError:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None

    async def ended(self) -> int:
        """Waits in an event loop until it has ended."""
        return await asyncio.shield(asyncio.wrap_future(self.exit_code))

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if not self.exit_code.done():
            # It may have ended just now.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Process:
    """A child as `asyncio.subprocess.Process`, as far as a supervisor uses one."""

    def __init__(self, child: Child, stdout: asyncio.StreamReader) -> None:
        self._child = child
        self.pid = child.pid
        self.stdout = stdout
        self.send_signal = child.send_signal
        self.wait = child.ended

    @property
    def returncode(self) -> int | None:
        return self._child.returncode


async def start_process(service: Service, environment: Mapping[str, str]) -> Any:
    """Takes the place of `blockyard.local.supervisor.start_process`."""
    reading, writing = os.pipe()
    try:
        child = Child(service.module, service.flags, environment, writing)
    finally:
        os.close(writing)
    stdout = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(reading, "rb")
    )
    return _Process(child, stdout)


class _Nursery:
    """The process, as its parent sees it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        line = [sys.executable, "-P", "-m", "tests.kit.processes.nursery"]
        with theirs:
            self._process = subprocess.Popen(line, cwd=ROOT, stdin=theirs, env=environment)
        self._socket = ours
        self._lock = threading.Lock()
        self._started = futures.Future[tuple[int, futures.Future[int]]]()
        self._running: dict[int, futures.Future[int]] = {}
        self._listener = threading.Thread(target=self._listen, name="nursery", daemon=True)
        self._listener.start()
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._socket.close()
        self._process.wait()

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], output: int
    ) -> tuple[int, futures.Future[int]]:
        with self._lock:
            self._started = futures.Future[tuple[int, futures.Future[int]]]()
            told = {"argv": list(argv), "environment": dict(environment), "folder": os.getcwd()}
            request = json.dumps(told).encode()
            socket.send_fds(self._socket, [request], [output])
            return self._started.result()

    def _listen(self) -> None:
        while message := self._socket.recv(MAX_MESSAGE_BYTES):
            told: dict[str, int] = json.loads(message)
            if "exit_code" in told:
                self._running.pop(told["pid"]).set_result(told["exit_code"])
            else:
                self._running[told["pid"]] = exit_code = futures.Future[int]()
                self._started.set_result((told["pid"], exit_code))
        died = RuntimeError("the process that others are forked from has ended")
        for waiting in (self._started, *self._running.values()):
            if not waiting.done():
                waiting.set_exception(died)


@cache
def _nursery() -> _Nursery:
    return _Nursery()


def _import_all() -> None:
    """Imports what the services' programs do, with what these set before."""
    # numpy's products, of which no service makes any, have threads from the beginning.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import gateway.__main__
    import scheduler_service.__main__
    import worker_service.__main__

    # Its program imports it when it knows what it is asked for.
    import worker_service.server

    # What is imported is no garbage: a child that looked for some would have pages of its own of all of it.
    gc.freeze()
    # The worker's program turns it off until it has imported all.
    gc.enable()
    for service in (gateway, scheduler_service, worker_service):
        # It will run as a program.
        del sys.modules[f"{service.__name__}.__main__"]
    assert len(os.listdir("/proc/self/task")) == 1, "what was imported has begun a thread, which no child would have"


def _serve(parent: socket.socket) -> dict[str, Any]:
    """Forks a child for each request; returns it in the child. In the parent it never returns."""
    selector = selectors.DefaultSelector()
    selector.register(parent, selectors.EVENT_READ)
    running: dict[int, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is parent:
                request, received, _, _ = socket.recv_fds(parent, MAX_MESSAGE_BYTES, 1)
                if not request:
                    for pid in running.values():
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                    sys.exit()
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for descriptor in running:
                        os.close(descriptor)
                    return {**json.loads(request), "output": received[0]}
                os.close(received[0])
                descriptor = os.pidfd_open(pid)
                running[descriptor] = pid
                selector.register(descriptor, selectors.EVENT_READ)
                told = {"pid": pid}
            else:
                selector.unregister(key.fileobj)
                pid = running.pop(key.fd)
                os.close(key.fd)
                told = {"pid": pid, "exit_code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}
            parent.send(json.dumps(told).encode())


def _become(request: dict[str, Any]) -> None:
    """Makes this process as one is that was started by itself."""
    from blockyard.service import faults

    for descriptor in (1, 2):
        os.dup2(request["output"], descriptor)
    os.close(request["output"])
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    # Read when it was imported.
    faults.reach = faults._from_environment()


def _run(module: str) -> None:
    """Runs a program and ends as the interpreter does, except that no object is freed.

    To free an object that parent and child share copies its page: a third of a second of computing for all of them,
    which is more than many services need for the rest of their lives.
    """
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        exit_code = 0
    except SystemExit as ending:
        if not isinstance(ending.code, int | None):
            raise
        exit_code = ending.code or 0
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def main() -> None:
    """The program."""
    # Ctrl-C is for the tests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _import_all()
    with socket.socket(fileno=os.dup(0)) as parent:
        request = _serve(parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _become(request)
    sys.argv = request["argv"]
    _run(sys.argv[0])


if __name__ == "__main__":
    main()
