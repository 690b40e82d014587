"""A process that runs batches: it takes a workload from each line of its input, and answers with the seconds it took.

Both ends of the line. Standard library only: the peers' scripts run it in environments of their own.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from benchmarks.kit.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1


class BatchProcess:
    """The process, as its user sees it. `start_seconds`: until it was ready."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Starts it and waits until it is ready. Raises RuntimeError where it ends instead."""
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        self.facts = self._read()
        self.start_seconds = time.perf_counter() - begin

    def run(self, workload: Workload) -> float:
        """Runs a batch, and returns the seconds from its first step to its last answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(workload)) + "\n")
        self._process.stdin.flush()
        return self._read()["seconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with code {self.close()}")
        return json.loads(line)

    def pause(self) -> None:
        """Lets it do nothing at all, not even wait busily."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> int:
        """Ends the process, which reads to the end of its input; returns its exit code."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            self.resume()
            return process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Line:
    """The process's own end: answers go where standard output went, and whatever else is printed to standard error."""

    def __init__(self) -> None:
        # A process that is paused when its user is killed would stay for ever.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def say(self, **answer: Any) -> None:
        """Writes an answer; the first one says that the process is ready."""
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    @staticmethod
    def read() -> Workload | None:
        """Waits for a workload; None when there will be none."""
        line = sys.stdin.readline()
        return Workload(**json.loads(line)) if line else None


def serve_batches(run: Callable[[list[list[int]], int], int], line: Line, **facts: Any) -> None:
    """Runs a batch for each line, until there is none.

    `run` takes prompts and a number of output tokens of each, and returns how many tokens came of it in all.
    """
    line.say(**facts)
    while (workload := line.read()) is not None:
        prompts = workload.prompts()
        begin = time.perf_counter()
        num_tokens = run(prompts, workload.num_output_tokens)
        seconds = time.perf_counter() - begin
        assert num_tokens == workload.num_tokens, (num_tokens, workload)
        line.say(seconds=seconds)
