"""Has a program of its own look at the page in a headless Chromium, and gives what it saw.

What drives the browser is in an environment of its own; Chromium is Debian's.
"""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path
from typing import Any

from tests.kit.processes.system import ROOT

CHROMIUM = Path("/usr/bin/chromium")
PROGRAM = ROOT / "tests" / "e2e" / "page_browser.py"
PACKAGES = ("playwright", "axe-playwright-python")


class Browser:
    """Looks at pages. Making it takes half a minute: it installs what it needs into a folder."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM.exists(), "install Debian's chromium: apt-get install chromium"
        venv.create(folder, with_pip=True)
        self._python = folder / "bin" / "python"
        install = [self._python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES]
        subprocess.run(install, check=True, timeout=250)

    def begin(self, scenario: str, url: str, argument: str = "") -> subprocess.Popen[str]:
        """Begins to look; what it prints is JSON, a line for each thing."""
        line = [str(self._python), str(PROGRAM), scenario, f"{url}/", argument]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def look(self, scenario: str, url: str, argument: str = "") -> dict[str, Any]:
        """Looks, and gives what it saw."""
        return self.end(self.begin(scenario, url, argument))

    @classmethod
    def hear(cls, process: subprocess.Popen[str]) -> Any:
        """Waits for the next thing that what was begun says."""
        assert process.stdout is not None
        line = process.stdout.readline()
        return json.loads(line) if line else cls.end(process)

    @staticmethod
    def answer(process: subprocess.Popen[str]) -> None:
        """Says that what was begun has what it asked for."""
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    @staticmethod
    def end(process: subprocess.Popen[str], seconds: float = 200.0) -> dict[str, Any]:
        """Waits for the end of what was begun, and gives what it saw last."""
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert process.returncode == 0, errors
        return json.loads(output.splitlines()[-1])
