"""Processes of the services and the commands that need not import their libraries: forked from one that has.

Importing torch and gRPC takes longer than most of what a test has its processes do. `python -m
tests.kit.processes.nursery` imports what the services and the commands import and no more: no thread, no channel,
nothing computed. It serves all processes that know its address, by connections over which each asks for children: it
forks one that becomes `python -m module flags` with an environment, a folder, a session, a standard input and two
outputs of its own, and tells when that ended. It kills the children of a connection that ends, and ends with the last.
`Child` is the other end, as `subprocess.Popen` is of others; `run_command` is as `subprocess.run`; `start_process` is
for the product's supervisor.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from concurrent import futures
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from blockyard.local.supervisor import Service

ROOT = Path(__file__).parents[3]
# Where it listens, for all processes of a run.
ADDRESS_VARIABLE = "BLOCKYARD_TEST_NURSERY"
MAX_MESSAGE_BYTES = 1 << 18


class Child:
    """A process `python -m module flags`. Use from any thread; `exit_code` is a future of its exit code."""

    def __init__(
        self,
        module: str,
        flags: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        *,
        errors: int | None = None,
        typed: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """Starts it.

        Args:
            output: a file for standard output.
            errors: a file for standard error; None: the same.
            typed: a file for standard input; None: an empty one. A terminal becomes the one that controls the process.
            folder: where it runs; None: where this process does.
        """
        with open(os.devnull, "rb") as nothing:
            files = [nothing.fileno() if typed is None else typed, output, output if errors is None else errors]
            told = {"argv": [module, *flags], "environment": dict(environment), "folder": str(folder or Path.cwd())}
            self.pid, self.exit_code = _nursery().start(told, files)

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


def run_command(
    arguments: Sequence[str], environment: Mapping[str, str], typed: str = "", seconds: float = 100.0
) -> subprocess.CompletedProcess[str]:
    """Runs `blockyard arguments` to its end; `typed` comes through a pipe."""
    reading, writing = os.pipe()
    with open(writing, "w", encoding="utf-8") as pipe:
        pipe.write(typed)
    with open(reading, "rb") as pipe, tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        files = {"errors": errors.fileno(), "typed": pipe.fileno()}
        child = Child("blockyard", arguments, environment, output.fileno(), folder=ROOT, **files)
        try:
            exit_code = child.wait(seconds)
        finally:
            child.kill()
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, exit_code, output.read(), errors.read())


class _Nursery:
    """The process, as one of those sees it that it serves; started by the first of them."""

    def __init__(self, address: str) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with _locked(address):
            try:
                self._socket.connect(address)
            except (FileNotFoundError, ConnectionRefusedError):
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                    Path(address).unlink(missing_ok=True)
                    listener.bind(address)
                    listener.listen()
                    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
                    line = [sys.executable, "-P", "-m", "tests.kit.processes.nursery", address]
                    self._process = subprocess.Popen(line, cwd=ROOT, stdin=listener, env=environment)
                self._socket.connect(address)
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
        if self._process is not None:
            # The others end with this one.
            self._process.wait()

    def start(self, told: Mapping[str, object], files: Sequence[int]) -> tuple[int, futures.Future[int]]:
        with self._lock:
            self._started = futures.Future[tuple[int, futures.Future[int]]]()
            socket.send_fds(self._socket, [json.dumps(told).encode()], files)
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
    address = os.environ.get(ADDRESS_VARIABLE)
    if address is None:
        # A program of the kit that is run by itself.
        folder = tempfile.mkdtemp(prefix="blockyard-nursery-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        address = os.environ[ADDRESS_VARIABLE] = f"{folder}/nursery"
    return _Nursery(address)


@contextlib.contextmanager
def _locked(address: str) -> Iterator[None]:
    """Holds what keeps a nursery from ending while another process connects to it."""
    with open(f"{address}.lock", "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _import_all() -> None:
    """Imports what the programs do, with what these set before."""
    # numpy's products, of which no service makes any, have threads from the beginning.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    # What the programs of a command and of a worker import when they know what they are asked for; and the programs.
    programs = [f"{service}.__main__" for service in ("gateway", "scheduler_service", "worker_service")]
    for module in ("blockyard.cli.main", "worker_service.server", *programs):
        importlib.import_module(module)

    # What is imported is no garbage: a child that looked for some would have pages of its own of all of it.
    gc.freeze()
    # The worker's program turns it off until it has imported all.
    gc.enable()
    for program in programs:
        # It will run as a program.
        del sys.modules[program]
    assert len(os.listdir("/proc/self/task")) == 1, "what was imported has begun a thread, which no child would have"


class _Children:
    """What the nursery serves: connections, and the children of each."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        # Pids of the children by the descriptors that become readable when they end.
        self._running: dict[socket.socket, dict[int, int]] = {}

    def serve(self, address: str) -> dict[str, Any]:
        """Forks a child for each request; returns it in the child. In the parent it ends with the last connection."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._running[connection] = {}
                    self._selector.register(connection, selectors.EVENT_READ)
                elif isinstance(key.fileobj, int):
                    self._on_end(key.fileobj, key.data)
                elif key.fileobj in self._running and (request := self._receive(key.fileobj)):
                    return request
            if not self._running:
                with _locked(address):
                    if not select.select([self._listener], [], [], 0)[0]:
                        os.unlink(address)
                        sys.exit()

    def _receive(self, connection: socket.socket) -> dict[str, Any] | None:
        """Returns the request in a child; None in the parent."""
        try:
            request, files, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 3)
        except ConnectionError:
            request, files = b"", []
        if not request:
            self._on_loss(connection)
            return None
        pid = os.fork()
        if pid == 0:
            self._close()
            return {**json.loads(request), "files": files}
        for file in files:
            os.close(file)
        descriptor = os.pidfd_open(pid)
        self._running[connection][descriptor] = pid
        self._selector.register(descriptor, selectors.EVENT_READ, connection)
        self._tell(connection, {"pid": pid})
        return None

    def _on_end(self, descriptor: int, connection: socket.socket) -> None:
        if connection in self._running:
            pid = self._forget(descriptor, connection)
            self._tell(connection, {"pid": pid, "exit_code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])})

    def _on_loss(self, connection: socket.socket) -> None:
        for descriptor, pid in list(self._running[connection].items()):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._forget(descriptor, connection)
        del self._running[connection]
        self._selector.unregister(connection)
        connection.close()

    def _forget(self, descriptor: int, connection: socket.socket) -> int:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        return self._running[connection].pop(descriptor)

    def _tell(self, connection: socket.socket, message: dict[str, int]) -> None:
        # One that has gone will be noticed when it is read from.
        with contextlib.suppress(ConnectionError):
            connection.send(json.dumps(message).encode())

    def _close(self) -> None:
        """Leaves a child nothing of all this."""
        self._selector.close()
        self._listener.close()
        for connection, running in self._running.items():
            connection.close()
            for descriptor in running:
                os.close(descriptor)


def _become(request: dict[str, Any]) -> None:
    """Makes this process as one is that was started by itself."""
    from blockyard.local import supervisor
    from blockyard.service import faults

    for descriptor, file in enumerate(request["files"]):
        os.dup2(file, descriptor)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    os.setsid()
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    # Read when it was imported.
    faults.reach = faults._from_environment()
    # A command's services too.
    # One that does not know the address has children of its own.
    if ADDRESS_VARIABLE in request["environment"]:
        supervisor.start_process = start_process


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
    with socket.socket(fileno=os.dup(0)) as listener:
        request = _Children(listener).serve(sys.argv[1])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _become(request)
    sys.argv = request["argv"]
    _run(sys.argv[0])


if __name__ == "__main__":
    main()
