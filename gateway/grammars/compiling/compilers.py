"""Processes that compile grammars, and a cache of their results.

A grammar is compiled in a process, so that it can neither block the gateway's threads nor use up its memory. Its limits
are memory and processor time, not elapsed time: results must not depend on the machine's load.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from queue import LifoQueue
from threading import Lock
from typing import BinaryIO, cast

from blockyard.errors import BlockyardError, Reason
from blockyard.grammars.limits import (
    MAX_CHECK_BYTES,
    MAX_CHECK_SECONDS,
    MAX_GRAMMAR_BYTES,
    MAX_REQUEST_SECONDS,
)
from blockyard.service.threads import stopping
from gateway.grammars.compiling.compiler_process import read_message, write_message

NUM_COMPILERS = 2
_MODULE = "gateway.grammars.compiling.compiler_process"
_ROOT = Path(__file__).parents[3]
# The number of results kept: clients send the same few grammars.
_MAX_KNOWN = 64
_MAX_COMPLAINT = 400
# The signals by which a grammar ends its process. Any other end has another cause.
_TOO_COMPLEX = {
    -signal.SIGPROF: f"too complex: it takes more than {MAX_CHECK_SECONDS:g} s of processor time to compile",
    -signal.SIGABRT: f"too complex: it takes more than {MAX_CHECK_BYTES >> 20} MiB to compile",
    -signal.SIGSEGV: "too complex: it leads too deep to compile",
    -signal.SIGBUS: "too complex: it leads too deep to compile",
}
SPENT = f"too complex: it takes more than {MAX_REQUEST_SECONDS:g} s of processor time to check"
"""The error of every check after a request has used all its processor time."""
_MAX_TRIES = 3


class _Compiler:
    """One compiler process, which is started at the first grammar."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = Lock()

    def ask(self, text: str, seconds: float) -> tuple[float, str]:
        """Compiles a grammar in the process; returns the processor seconds used and the error, empty if it is valid.

        Raises BlockyardError: DRAINING after `close`; BUG if the process ends repeatedly.
        """
        with self._lock:
            for _ in range(_MAX_TRIES):
                process = self._process or self._start()
                try:
                    write_message(cast("BinaryIO", process.stdin), seconds, text)
                    return read_message(cast("BinaryIO", process.stdout))
                except (EOFError, OSError):
                    code = self._end()
                    if code in _TOO_COMPLEX:
                        return seconds, _TOO_COMPLEX[code]
        raise BlockyardError(Reason.BUG, "the process that compiles grammars exited")

    def _start(self) -> subprocess.Popen[bytes]:
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(MAX_CHECK_BYTES)],
            cwd=_ROOT,
            # Use a single heap, so that memory is measured exactly: further heaps are reserved in large pieces.
            env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # A terminal's signals are for the gateway; this process ends when its input does.
            start_new_session=True,
        )
        try:
            if self._is_closed:
                raise EOFError
            read_message(cast("BinaryIO", process.stdout))
        except EOFError:
            process.kill()
            self._end()
            if self._is_closed:
                raise stopping() from None
            raise BlockyardError(Reason.BUG, "the process that compiles grammars did not start") from None
        return process

    def _end(self) -> int:
        """Waits for the process to end; returns its exit code."""
        process = self._process
        assert process is not None
        self._process = None
        for stream in (process.stdin, process.stdout):
            # Unwritten output is of no use any more.
            with suppress(OSError):
                cast("BinaryIO", stream).close()
        return process.wait()

    def close(self) -> None:
        """Ends the process. Any thread may call it."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            if self._process is not None:
                self._end()


class Compilers:
    """The compiler processes of one gateway. The creator of this object calls `close`."""

    def __init__(self) -> None:
        self._all = [_Compiler() for _ in range(NUM_COMPILERS)]
        self._free: LifoQueue[_Compiler] = LifoQueue()
        for each in self._all:
            self._free.put(each)
        self._known: OrderedDict[str, str] = OrderedDict()
        self._lock = Lock()

    def close(self) -> None:
        for each in self._all:
            each.close()

    def begin(self) -> Checks:
        return Checks(self)

    def find(self, text: str) -> str | None:
        """Returns the cached error of a grammar: an empty text if it is valid, None if it is not cached."""
        with self._lock:
            if text in self._known:
                self._known.move_to_end(text)
            return self._known.get(text)

    def note(self, text: str, complaint: str) -> None:
        with self._lock:
            self._known[text] = complaint
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def ask(self, text: str, seconds: float) -> tuple[float, str]:
        """Compiles a grammar in a free process; returns the processor seconds used and the error, empty if valid."""
        compiler = self._free.get()
        try:
            return compiler.ask(text, seconds)
        finally:
            self._free.put(compiler)


class Checks:
    """The checks of one request, within the processor time that a request may use."""

    def __init__(self, compilers: Compilers) -> None:
        self._compilers = compilers
        # The thread's processor time at the first check. Only one thread uses this object.
        self._begin: float | None = None
        self.num_seconds = 0.0
        """Processor time that the compiler processes have used for this request."""

    @property
    def is_spent(self) -> bool:
        """Whether the request has used up its processor time, in this thread and in the compiler processes."""
        return self._num_seconds_left() <= 0

    def _num_seconds_left(self) -> float:
        now = time.thread_time()
        self._begin = now if self._begin is None else self._begin
        return MAX_REQUEST_SECONDS - self.num_seconds - (now - self._begin)

    def complain(self, text: str) -> str:
        """Returns llguidance's error for a grammar, or an empty text if the grammar is valid."""
        known = self._compilers.find(text)
        if known is not None:
            return known
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            return "must be Unicode text, but contains half a surrogate pair"
        if size > MAX_GRAMMAR_BYTES:
            return f"too large: {size} bytes, and at most {MAX_GRAMMAR_BYTES} are taken"
        if (left := self._num_seconds_left()) <= 0:
            return SPENT
        allowed = min(left, MAX_CHECK_SECONDS)
        taken, message = self._compilers.ask(text, allowed)
        complaint = _shorten(message)
        self.num_seconds += taken
        if allowed == MAX_CHECK_SECONDS or taken < allowed:
            self._compilers.note(text, complaint)
        return complaint


def _shorten(message: str) -> str:
    """Removes the quoted grammar and the position in it: a client that sent a schema has never seen the grammar."""
    first = message.split("\n   1 | ")[0].split("<state>")[0].split("<non")[0]
    said = first.split("failed to compile JSON schema: ")[-1]
    return " ".join(said.split())[:_MAX_COMPLAINT]
