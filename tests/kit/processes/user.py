"""A user who calls `blockyard`, each time in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from blockyard.local.supervisor import ROOT

if TYPE_CHECKING:
    from pathlib import Path


class User:
    """Calls the program, with folders of its own."""

    def __init__(self, folder: Path, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "HF_"))}
        self.environment = {**kept, "XDG_STATE_HOME": str(folder), **environment}

    def call(self, *arguments: str, code: int = 0, piped: str = "") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "blockyard", *arguments],
            cwd=ROOT,
            env=self.environment,
            input=piped,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done
