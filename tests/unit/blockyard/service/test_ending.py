"""A process whose threads hang ends all the same, soon after its service has."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from blockyard.local.supervisor import ROOT

if TYPE_CHECKING:
    from pathlib import Path

# A service that ends with a thread that reads a pipe to which nobody writes: one of asyncio's, or one of its own.
PROGRAM = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from blockyard.configuration import LogSettings, TracingSettings
from blockyard.service import process

pipe, kind, outcome = sys.argv[1:]

async def serve(configuration):
    executor = None if kind == "asyncio" else ThreadPoolExecutor(1)
    asyncio.get_running_loop().run_in_executor(executor, open, pipe)
    if outcome == "error":
        raise RuntimeError("it broke")

process.TEARDOWN_SECONDS = 0.1
process.run_process("test", SimpleNamespace(log=LogSettings(), tracing=TracingSettings()), serve)
"""


@pytest.mark.parametrize(("outcome", "code"), [("good", 0), ("error", 1)])
@pytest.mark.parametrize("kind", ["asyncio", "own"])
def test_threads_that_hang_are_left(tmp_path: Path, kind: str, outcome: str, code: int) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "pipe"), kind, outcome],
        cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=20,
    )  # fmt: skip
    assert (done.returncode, "ends without threads that still work" in done.stderr) == (code, True)
