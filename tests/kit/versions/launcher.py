"""Runs a service of a chosen version: `python -m tests.kit.versions.launcher MODULE [FLAG ...]`.

BLOCKYARD_TEST_VERSION names the folder of another version, which a fresh interpreter runs in this process's place.
Without it the service is that of this tree.
"""

from __future__ import annotations

import os
import runpy
import sys

VARIABLE = "BLOCKYARD_TEST_VERSION"


def main() -> None:
    """The program."""
    if folder := os.environ.get(VARIABLE):
        line = [sys.executable, "-P", "-m", "run_service", *sys.argv[1:]]
        os.execve(sys.executable, line, {**os.environ, "PYTHONPATH": folder})
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
