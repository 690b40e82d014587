"""A user who calls `blockyard`, each time in a process of its own."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.kit.processes.nursery import ROOT, Child, run_command

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path


class User:
    """Calls the program, with folders of its own."""

    def __init__(self, folder: Path, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HF_"))}
        self.environment = {**kept, "XDG_STATE_HOME": str(folder), **environment}

    def call(self, *arguments: str, code: int = 0, piped: str = "") -> subprocess.CompletedProcess[str]:
        done = run_command(arguments, self.environment, piped)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done


def blockyard(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    """Calls the program as this process would; it must succeed."""
    done = run_command(arguments, os.environ, typed)
    assert done.returncode == 0, done.stderr
    return done


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """Runs `blockyard serve`, and gives what it writes until it is ready; its log is the file `log` in the folder."""
    output, log = folder / "output", folder / "log"
    with output.open("wb") as file, log.open("wb") as errors:
        flags = ["serve", *arguments]
        process = Child("blockyard", flags, os.environ, file.fileno(), errors=errors.fileno(), folder=ROOT)
    try:
        while "python -c" not in (told := output.read_text()):
            assert process.poll() is None, log.read_text()
            # What another process writes into a file: there is no event to wait for.
            time.sleep(0.02)
        yield told
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
