"""Environments of their own for programs of others, whose pins are not ours to keep."""

from __future__ import annotations

import os
import subprocess
import venv
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

INSTALL_SECONDS = 1200.0


@dataclass(frozen=True)
class Environment:
    """A folder with a Python and packages."""

    folder: Path

    @classmethod
    def with_packages(cls, folder: Path, *packages: str) -> Environment:
        """Makes one, from the network."""
        venv.create(folder, with_pip=True)
        environment = cls(folder)
        install = [environment.program("python"), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(install, check=True, timeout=INSTALL_SECONDS)
        return environment

    def program(self, name: str) -> str:
        """The path of a program that it has."""
        return str(self.folder / "bin" / name)

    def run(self, name: str, *arguments: str, seconds: float = 200, **variables: str) -> str:
        """Runs a program to its end and gives what it printed; fails with that when it fails.

        `variables` are added to the environment.
        """
        line = [self.program(name), *arguments]
        finished = subprocess.run(
            line,
            cwd=self.folder,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert finished.returncode == 0, f"{finished.stdout[-8000:]}\n{finished.stderr[-8000:]}"
        return finished.stdout
